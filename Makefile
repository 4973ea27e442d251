# Every target creates .venv when it is missing. Nothing outside this folder is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The oldest Triton that the kernels are compiled with, in an environment of its own: torch does not care which one is there.
OLD_TRITON := 3.6.0
OLD_VENV   := .venv-triton36
OLD_STAMP  := $(OLD_VENV)/.installed

# Compiled kernels, by a key of all that they depend on.
KERNELS := .triton-cache

# Triton exists on Linux only.
ifeq ($(shell uname -s),Linux)
COMPILE_QUICKLY := compile-quickly
endif

.PHONY: setup demo test test-exhaustive lint bench bench-gpu traffic docs train compile compile-quickly clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,plots,docs,hf]'
	touch $(STAMP)

$(OLD_STAMP): pyproject.toml constraints.txt
	test -x $(OLD_VENV)/bin/python || $(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . triton==$(OLD_TRITON)
	touch $(OLD_STAMP)

demo: $(STAMP)
	$(BIN)/python -m dsspark demo --out demo-output

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every variant for the architecture whose spills count, one variant of each kernel for the others. What has been compiled is kept.
compile-quickly: $(STAMP)
	$(BIN)/python -m dsspark compile --cache $(KERNELS) --brief --arch sm_90
	$(BIN)/python -m dsspark compile --cache $(KERNELS) --brief --one-per-kernel --arch sm_80 sm_100 gfx942

# Every variant for every architecture, with both Tritons.
compile: $(STAMP) $(OLD_STAMP)
	$(BIN)/python -m dsspark compile --cache $(KERNELS) --brief
	$(OLD_VENV)/bin/python -m dsspark compile --cache $(KERNELS) --brief

test: lint docs $(COMPILE_QUICKLY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not exhaustive"

# Planted faults around the kernels, in the interpreter.
test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m exhaustive

# On a CPU: references, compiled references and eager baselines, then the ratios that are claimed; the interpreter is never timed.
bench: $(STAMP)
	mkdir -p .benchmarks
	rm -f .benchmarks/measured.jsonl
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only --benchmark-json=.benchmarks/run.json
	$(BIN)/python -m benchmarks.report .benchmarks/run.json --claims --plots

# On a GPU: its tests, kernels with and without CUDA graphs, peers where installed, the captured round, the pictures.
# A test that fails, or a run that is cut short, does not cost what was measured; it is the exit status.
bench-gpu: $(STAMP)
	mkdir -p .benchmarks
	rm -f .benchmarks/measured.jsonl
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'bench-gpu: no GPU that this torch can use'"
	$(BIN)/python -m benchmarks.gpu_tests; tests=$$?; \
	$(BIN)/python -m pytest benchmarks -rs --benchmark-enable --benchmark-only --benchmark-max-time=0.2 --benchmark-min-rounds=5; times=$$?; \
	$(BIN)/python -m benchmarks.report .benchmarks/measured.jsonl --plots && exit $$((tests || times))

traffic: $(STAMP)
	$(BIN)/python -m benchmarks.traffic
	$(BIN)/python -m benchmarks.movement

docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

train: $(STAMP)
	$(BIN)/python -m dsspark train --out training-output

clean:
	rm -rf $(VENV) $(OLD_VENV) $(KERNELS) docs/_build demo-output training-output

"""`make bench-gpu` survives what happens on a borrowed machine: a failing test, a file that takes too long, a run that is cut short."""

from __future__ import annotations

import json
import time

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks import gpu_tests, harness, report
from benchmarks.cases import COMPILED, KERNEL
from benchmarks.sizes import GPU

PASSES = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    pass\n"
FAILS = PASSES.replace("pass\n", "assert 0, 'broken'\n")
HANGS = PASSES.replace("    pass", "    import time; time.sleep(60)")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that makes these files the GPU's tests; they need no GPU."""

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
        monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
        monkeypatch.setattr(gpu_tests, "gpu_files", lambda found=gpu_tests.gpu_files: found((tmp_path,)))

    return write


def test_the_files_with_gpu_tests_are_found():
    names = {path.name for path in gpu_tests.gpu_files()}
    assert {"test_kernels_markov.py", "test_kernels_rejection.py", "test_delayed.py"} <= names
    assert "test_randomness.py" not in names


def test_files_that_pass_pass(written, capsys):
    written(one=PASSES, two=PASSES, other="def test_nothing_for_a_gpu():\n    pass\n")
    assert gpu_tests.main(["--workers", "2"]) == 0
    assert capsys.readouterr().out.count("1 passed") == 2


def test_a_failure_fails_and_shows_why(written, capsys):
    written(one=PASSES, two=FAILS)
    assert gpu_tests.main(["--workers", "2"]) == 1
    printed = capsys.readouterr().out
    assert "1 passed" in printed
    assert "broken" in printed


def test_a_file_that_takes_too_long_is_ended(written, capsys):
    written(one=HANGS)
    began = time.monotonic()
    assert gpu_tests.main(["--seconds", "3"]) == 1
    assert time.monotonic() - began < 30
    assert "not done in time" in capsys.readouterr().out


def test_a_run_that_was_cut_short_is_reported(tmp_path, monkeypatch, capsys):
    """Every measurement is a line as soon as it is made, and the report reads lines."""
    monkeypatch.setattr(harness, "MEASURED", tmp_path / "measured.jsonl")
    monkeypatch.setattr(report, "provenance", lambda device: {"commit": "abc"})
    info = {"task": "markov", "size": "R1", "contender": KERNEL, "device_seconds": 0.002, "share_of_copy": 0.25}
    for size in ("R1", "R8"):
        harness._record({**info, "size": size, "floor_bytes": 2**20})
    assert report.main([str(harness.MEASURED), "--out", str(tmp_path / "out.json")]) == 0
    assert [line["size"] for line in json.loads((tmp_path / "out.json").read_text())["times"]] == ["R1", "R8"]
    assert "| markov | R8 | kernel | 2.000 ms | 1.00 MiB |" in capsys.readouterr().out


def test_a_gpu_compiles_each_reference_at_one_size(monkeypatch):
    """Compiling takes half a minute a size, and after eight sizes of one function torch.compile falls back to eager code."""
    monkeypatch.setattr(harness, "DEVICE", "cuda")
    for task, (component, _) in harness.TIMED.items():
        points = [point.values for point in harness.points(task) if not point.marks]
        compiled = [size for size, name in points if name == COMPILED]
        assert len(compiled) == (0 if task in ("calibration", "round") else 1)
        graphs = {size for size, name in points if name == KERNEL + harness.GRAPH}
        assert graphs == (set() if task == "calibration" else set(GPU[component]))


def test_slow_contenders_are_timed_five_times_and_fast_ones_fifty(monkeypatch):
    calls = []

    def taking(seconds):
        def timed(run, device):
            calls.append(run)
            return seconds

        return timed

    for seconds, count in ((1.0, 5), (0.05, 6), (1e-4, 50)):
        calls.clear()
        monkeypatch.setattr(harness, "timed", taking(seconds))
        median, quartiles = harness.device_times(iter(range(1000)))
        assert (len(calls), median, quartiles) == (count, seconds, [seconds, seconds])


def test_every_kernel_file_the_tuner_names_exists():
    from benchmarks import tune

    for place in tune.PLACES.values():
        assert callable(__import__(f"dsspark.kernels.{place}", fromlist=["choose_config"]).choose_config)


def test_inputs_are_drawn_where_they_are_used():
    """Gigabytes drawn on a processor would take the minutes that the run has; on one device the draws are the same either way."""
    from benchmarks.sizes import Size
    from benchmarks.tasks_sampling import draft_inputs

    size = Size(num_requests=2, block_size=2, vocab_size=32, rank=4)
    with torch.device("meta"):
        inputs = draft_inputs(size, "cpu")
    tensors = inputs.base, inputs.anchors, inputs.uniforms.draft, inputs.head.markov_w2.weight
    assert {tensor.device.type for tensor in tensors} == {"cpu"}

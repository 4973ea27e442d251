"""What of the GPU's half can be run without one: the search, the round, the plots, and that what cannot run says why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks import harness, peers, plots, tune
from benchmarks.cases import COMPETENT, KERNEL, PUBLIC, REFERENCE, copied, moved_to
from benchmarks.sizes import GPU, SMALL_TRAFFIC, Size, sizes
from benchmarks.tasks import TASKS
from benchmarks.tasks_round import whole_round

SMALL = Size(
    num_requests=3, block_size=2, vocab_size=300, rank=16, hidden_size=16, samples=200, temperatures=3, context=16
)


@dataclass(frozen=True)
class Config:
    block: int
    warps: int = 4
    flag: bool = True


def test_neighbours_differ_in_one_field_by_two():
    assert set(tune.neighbours(Config(8))) == {Config(16), Config(4), Config(8, 8), Config(8, 2)}
    assert set(tune.neighbours(Config(1, 1))) == {Config(2, 1), Config(1, 2)}


@pytest.mark.parametrize("task", list(tune.PLACES))
def test_the_tuner_knows_where_each_kernel_chooses(task):
    case = TASKS[task][1](SMALL, "cpu")
    config = tune.chosen_config(task, case)
    assert list(tune.neighbours(config))


def test_the_tuner_descends_to_the_fastest_and_drops_what_fails(monkeypatch):
    from dsspark.kernels import packing

    case = TASKS["verification, pack"][1](SMALL, "cpu")
    start = packing.choose_config()

    def clock(run):
        run()
        return abs(packing.choose_config().block_n - 2 * start.block_n) + 1.0

    original = case.contenders[KERNEL].run

    def run(x):
        if packing.choose_config().num_warps != start.num_warps:
            raise RuntimeError("out of resources")
        return original(x)

    contenders = {**case.contenders, KERNEL: SimpleNamespace(run=run, comparable=None)}
    tuned = tune.tune("verification, pack", SimpleNamespace(**{**vars(case), "contenders": contenders}), clock)
    assert tuned.chosen == start
    assert tuned.best.block_n == 2 * start.block_n
    assert tuned.seconds[0] > tuned.seconds[1] == 1.0
    assert all("out of resources" in reason for reason in tuned.dropped.values())
    assert tuned.dropped
    assert "block_n" in tune.line("verification, pack", case, tuned)


def test_the_tuner_refuses_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "no GPU" in capsys.readouterr().out


def test_a_round_of_kernels_is_a_round_of_references():
    case = whole_round(
        Size(**{**vars(SMALL), "num_requests": 24}), "cpu"
    )  # enough that one tolerated difference hides no fault
    case.check(KERNEL)
    assert case.floor_bytes > 0
    lengths, result = case.contenders[KERNEL].run(case.inputs)
    assert result.valid.all()
    assert int(lengths.sum()) > 0


def test_copies_share_no_memory():
    case = TASKS["rejection"][1](SMALL, "cpu")
    other = copied(case.inputs)
    assert other.target.data_ptr() != case.inputs.target.data_ptr()
    assert other.block.logits.data_ptr() != case.inputs.block.logits.data_ptr()
    assert torch.equal(moved_to(other, "cpu").batch.tokens, case.inputs.batch.tokens)


def test_a_peers_acceptance_is_checked():
    case = TASKS["rejection"][1](Size(num_requests=32, block_size=3, vocab_size=64, rank=8), "cpu")
    arguments = {"name": "peer", "reason": None, "prepare_inputs": lambda x: x}
    peers.Peer(accepted=lambda x: peers._fresh(case), **arguments).check(case)
    with pytest.raises(AssertionError, match="mean accepted"):
        peers.Peer(accepted=lambda x: torch.zeros(32), **arguments).check(case)


def test_the_size_table_is_the_one_asked_for():
    for component in ("markov", "rejection", "confidence", "verification"):
        assert {1, 8, 32, 128, 256} <= {size.num_requests for size in sizes(component, "cuda")}
        assert {5, 7, 15} <= {size.block_size for size in GPU[component]}
        assert {32_000, 151_936} <= {size.vocab_size for size in GPU[component]}
    assert max(size.num_requests for size in SMALL_TRAFFIC.values()) <= 16


def test_the_interpreter_is_never_timed(monkeypatch):
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    for task in harness.TIMED:
        names = {parameter.values[1] for parameter in harness.points(task) if not parameter.marks}
        assert not any(KERNEL in name for name in names)
        assert REFERENCE in names
    monkeypatch.setattr(harness, "DEVICE", "cuda")
    names = {parameter.values[1] for parameter in harness.points("markov")}
    assert {REFERENCE, PUBLIC, COMPETENT, KERNEL, KERNEL + harness.GRAPH} <= names


def test_a_share_of_bandwidth_is_of_a_copy_measured_here():
    assert 1e8 < harness.copy_bandwidth("cpu", 1 << 20) < 1e13


def test_plots_are_drawn_from_the_json(tmp_path):
    line = {"task": "markov", "size": "R1", "device_seconds": 0.002, "floor_bytes": 2**20, "share_of_copy": 0.2}
    times = [{**line, "contender": name} for name in ("reference", "eager, public")]
    source = tmp_path / "bench.json"
    facts = {"processor": "toy", "commit": "abc", "date": "today"}
    source.write_text(json.dumps({"provenance": facts, "claims": [], "times": times}))
    written = plots.draw(source, tmp_path)
    assert {path.suffix for path in written} == {".svg"}
    assert all(path.stat().st_size > 2000 for path in written)

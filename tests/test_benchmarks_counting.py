"""The counters and clocks of the benchmarks: bytes and memory by hand, pairs on a fake clock, tables from a fixed run."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import provenance, report
from benchmarks.eager import HIDDEN, count_eager, touched
from benchmarks.paired import paired

ROW = 4000  # bytes of 1,000 float32
INDEX = torch.zeros(4, 1, dtype=torch.int64)
OUT = torch.zeros(1, 1000)


@pytest.fixture
def x():
    return torch.ones(4, 1000)


def counted(run):
    with count_eager() as eager:
        run()
    return sum(eager.read.values()), sum(eager.written.values()), eager.operations


@pytest.mark.parametrize(
    ("run", "read", "written", "operations"),
    [
        (lambda x: torch.softmax(x, dim=-1), 4 * ROW, 4 * ROW, 1),
        (lambda x: x[:, 3:].t().view(-1, 4)[:2], 0, 0, 0),
        (lambda x: x + x[:1], 5 * ROW, 4 * ROW, 1),
        (lambda x: x.add_(1), 4 * ROW, 4 * ROW, 1),
        (lambda x: x.fill_(1), 0, 4 * ROW, 1),
        (lambda x: x.to(torch.bfloat16), 4 * ROW, 2 * ROW, 1),
        (lambda x: x[:1].expand(4, 1000).clone(), ROW, 4 * ROW, 1),
        (lambda x: x[torch.tensor([2])], ROW + 8, ROW, 1),
        (lambda x: x.gather(1, INDEX), 4 * (4 + 8), 4 * 4, 1),
        (lambda x: x[:2].copy_(x[2:]), 2 * ROW, 2 * ROW, 1),
        (lambda x: torch.mul(x[:1], 2, out=OUT), ROW, ROW, 1),
        (lambda x: torch.index_select(x, 0, INDEX[0], out=OUT), ROW + 8, ROW, 1),
        (lambda x: torch.stack((x, x)), 8 * ROW, 8 * ROW, 1),
        (lambda x: torch.logsumexp(x, dim=-1), 16 * ROW, 8 * ROW + 16, 1),
        (lambda x: torch.multinomial(x, 1), 20 * ROW, 8 * ROW + 32, 1),
    ],
)
def test_bytes_of_an_operation(x, run, read, written, operations):
    assert counted(lambda: run(x)) == (read, written, operations)


@pytest.mark.parametrize(
    ("name", "run"),
    [("aten::multinomial", lambda x: torch.multinomial(x, 1)), ("aten::logsumexp", lambda x: torch.logsumexp(x, -1))],
)
def test_what_is_hidden_is_what_this_torch_does(x, name, run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(x)
    inside = [event.name.removeprefix("aten::") for event in profile.events()]
    assert set(HIDDEN[name].kernels) <= set(inside)


def test_an_expanded_dimension_counts_once(x):
    assert touched(x) == 4 * ROW
    assert touched(x[:1].expand(9, 1000)) == ROW
    assert touched(x[:0]) == 0


def test_peak_is_what_lives_at_once(x):
    with count_eager() as eager:
        y = x + 1
        y = y + 1  # two alive, then one
        y = y[:1]  # the view keeps its memory alive
        z = y + 1
    assert eager.peak == 8 * ROW
    assert eager.live == 5 * ROW
    assert z.shape == (1, 1000)


def test_pairs_take_turns_and_report_the_median_ratio():
    calls, seconds = [], {"ours": 1.0, "theirs": 2.0}

    def timed(run):
        name = run()
        return seconds[name] * (10 if len(calls) == 7 else 1), 3 * seconds[name]  # one disturbed pair

    def contender(name):
        return lambda: calls.append(name) or name

    result = paired(contender("ours"), contender("theirs"), pairs=5, timed=timed)
    assert calls == ["ours", "theirs"] + ["ours", "theirs", "theirs", "ours"] * 2 + ["ours", "theirs"]
    assert (result.ours, result.theirs, result.ratio, result.cpu_ratio) == (1.0, 2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="pairs"):
        paired(contender("ours"), contender("theirs"), pairs=1, timed=timed)


def test_the_report_keeps_what_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "provenance", lambda device: {"commit": "abc"})
    info = {"task": "markov", "size": "R1", "contender": "reference", "device_seconds": 0.002, "share_of_copy": 0.25}
    info |= {"floor_bytes": 2**20, "moved_bytes": 3 * 2**20, "peak_bytes": 2**21, "launches": 7}
    stats = {"median": 0.002, "iqr": 0.001, "rounds": 5, "data": [0.002] * 5}
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"benchmarks": [{"extra_info": info, "stats": stats}]}))
    assert report.main([str(run), "--out", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["provenance"] == {"commit": "abc"}
    assert written["times"][0]["median_seconds"] == 0.002
    assert "data" not in written["times"][0]
    assert "| markov | R1 | reference | 2.000 ms | 1.00 MiB | 3.0 | 25.0 % | 7 | 2.0 MiB |" in capsys.readouterr().out


def test_a_claim_that_does_not_hold_fails_the_report(tmp_path, monkeypatch):
    claim = {"task": "markov", "other": "x", "size": "s", "ratio": 0.9, "low": 0.8, "high": 1.0, "cpu_ratio": 0.9}
    claim |= {"claimed": 1.2, "memory": 0.4, "claimed_memory": 0.5, "holds": False}
    claim |= {"one_thread": 0.8, "ours": 0.2, "theirs": 0.18}
    monkeypatch.setattr(report, "measure_all", lambda: [claim])
    run = tmp_path / "run.json"
    run.write_text('{"benchmarks": []}')
    assert report.main([str(run), "--claims", "--out", str(tmp_path / "out.json")]) == 1
    claim["holds"] = True
    assert report.main([str(run), "--claims", "--out", str(tmp_path / "out.json")]) == 0


def test_provenance_names_machine_versions_and_commit():
    facts = provenance.provenance("cpu")
    assert {"date", "commit", "processor", "cores", "threads", "python", "torch", "triton"} <= set(facts)
    assert all(isinstance(text, str) and text for text in facts.values())
    assert provenance.slug("cpu") == "cpu"

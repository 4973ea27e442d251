"""No component moves more bytes than the recorded table says: counted again at the small sizes, kernels in the interpreter."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks.cases import KERNEL, Contender
from benchmarks.sizes import SMALL_TRAFFIC
from benchmarks.tasks import TASKS
from benchmarks.traffic_table import count, count_all, read, regressions


@pytest.fixture(scope="module")
def recorded():
    return read()


def test_no_ratio_grew(recorded, monkeypatch):
    # The poison of the root conftest fills what is allocated, and would be counted.
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)
    monkeypatch.setattr(torch, "empty_like", torch._C._VariableFunctions.empty_like)
    assert regressions(recorded["small"], count_all(SMALL_TRAFFIC)) == []


def test_every_task_has_a_kernel_in_the_table(recorded):
    for table in ("table", "small"):
        assert {row["task"] for row in recorded[table] if row["contender"] == KERNEL} == set(TASKS)


def test_kernels_stay_near_the_floor_where_the_vocabulary_counts(recorded):
    ratios = {row["task"]: row["ratio"] for row in recorded["table"] if row["contender"] == KERNEL}
    assert ratios["markov"] <= 1.05
    # The picked cell of W2 is read again: R * 256 * (r + 1) * 2 bytes beside a W2 of 8 MiB.
    assert ratios["markov, recomputed"] <= 1.07
    assert ratios["rejection"] <= 9.6 / 9


def test_one_more_copy_in_a_kernel_is_a_regression(recorded, monkeypatch):
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)
    monkeypatch.setattr(torch, "empty_like", torch._C._VariableFunctions.empty_like)
    case = TASKS["confidence"][1](SMALL_TRAFFIC["confidence"], "cpu")
    before = [row for row in recorded["small"] if (row["task"], row["contender"]) == ("confidence", KERNEL)]
    kernel = case.contenders[KERNEL].run

    def counted(run):
        contenders = {**case.contenders, KERNEL: Contender(run=run)}
        return [count(dataclasses.replace(case, contenders=contenders), KERNEL)]

    assert regressions(before, counted(kernel)) == []
    assert "grew" in regressions(before, counted(lambda x: (x.hidden.clone(), kernel(x))[1]))[0]


def test_a_ratio_that_grows_is_a_regression(recorded):
    now = copy.deepcopy(recorded["small"])
    now[3]["ratio"] = 1.01 * now[3]["ratio"]
    assert len(regressions(recorded["small"], now)) == 1
    assert regressions(now, recorded["small"]) == []


def test_a_row_that_is_gone_and_a_kernel_that_is_new_are_regressions(recorded):
    rows = recorded["small"]
    kernel = next(row for row in rows if row["contender"] == KERNEL)
    others = [row for row in rows if row is not kernel]
    assert "not counted" in regressions(rows, others)[0]
    assert "no record" in regressions(others, rows)[0]

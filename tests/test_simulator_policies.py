"""The simulator's policies are the library's, and every policy is audited."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dsspark
from dsspark import CostTable, DelayedScheduler
from dsspark.serving import simulated
from dsspark.serving.policies import ConfidenceThreshold, EarlyStopping, FixedLength
from dsspark.serving.simulated import Delayed, EarlyStop, Fixed, Threshold, make_policy
from dsspark.testing.audit import audit_scheduler


def survivals(rng, num_requests, gamma, kind):
    """Rows that never rise: continuous, of few values so that everything ties, or with zeros and ones."""
    if kind == "ties":
        values = rng.integers(0, 5, (num_requests, gamma)) / 4
    elif kind == "edges":
        values = rng.choice([0.0, 1.0, 0.5, 1e-30], (num_requests, gamma))
    else:
        values = rng.random((num_requests, gamma))
    return np.minimum.accumulate(values.astype(np.float32), axis=1)


def ragged_table(rng, max_tokens):
    """Staircases that fall and rise again, in rates of few values."""
    return CostTable([1.0, *(rng.choice([1.0, 0.5, 0.45, 0.9, 0.4, 0.25], max_tokens).tolist())])


CASES = [
    (r, g, kind, seed) for r in (1, 2, 7, 40) for g in (1, 3, 7) for kind in ("any", "ties", "edges") for seed in (0, 1)
]


@pytest.mark.parametrize(("num_requests", "gamma", "kind", "seed"), CASES)
def test_the_twins_do_what_the_library_does(num_requests, gamma, kind, seed):
    rng = np.random.default_rng([seed, num_requests, gamma, len(kind)])
    for _ in range(6):
        a, old = (survivals(rng, num_requests, gamma, kind) for _ in range(2))
        table = ragged_table(rng, int(rng.integers(num_requests, num_requests * (1 + gamma) + 3)) + (num_requests == 1))
        current, stale = torch.from_numpy(a), torch.from_numpy(old)
        ids = list(range(num_requests))
        for budget in (0, 1, num_requests * gamma // 2, num_requests * gamma, num_requests * gamma + 5):
            assert simulated.admit(a, budget).tolist() == dsspark.admit(current, budget).tolist()
        assert EarlyStop("", table).lengths(a, old).tolist() == EarlyStopping(table).step(current, ids).tolist()
        wanted = dsspark.admit(current, dsspark.plan_budget(stale, table))
        assert Delayed("", table).lengths(a, old).tolist() == wanted.tolist()
        bar = float(rng.choice([0.0, 0.25, 0.5, 1.0, rng.random()]))
        wanted = ConfidenceThreshold(float(np.float32(bar))).step(current, ids)
        assert Threshold("", bar).lengths(a, old).tolist() == wanted.tolist()
        for length in (0, 1, gamma, gamma + 1):
            assert (
                Fixed("", "dspark", length).lengths(a, old).tolist() == FixedLength(length).step(current, ids).tolist()
            )


def test_staircases_stop_algorithm_1_and_not_the_global_search():
    """One expensive stair, then room for free: the figure of the page, in small."""
    table = CostTable.from_points([4, 12], [1.0, 1.5])
    a = np.full((4, 2), 0.9, dtype=np.float32)
    assert EarlyStop("", table).lengths(a, a).sum() == 0  # 4.9 / 1.5 < 4 / 1: the first step up does not pay
    assert Delayed("", table).lengths(a, a).sum() == 8  # 11.2 / 1.5 > 4 / 1: the stair as a whole does
    assert dsspark.schedule(torch.from_numpy(a), table).sum() == 0
    scheduler = DelayedScheduler(table, 2, delay=1)
    assert [int(scheduler.step(torch.from_numpy(a), range(4)).sum()) for _ in range(3)] == [8, 8, 8]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("none", Fixed("none", "none", 0)),
        ("mtp-1", Fixed("mtp-1", "mtp", 1)),
        ("fixed-3", Fixed("fixed-3", "dspark", 3)),
        ("threshold-0.25", Threshold("threshold-0.25", 0.25)),
    ],
)
def test_names(name, policy):
    assert make_policy(name, {}) == policy


def test_scheduler_names():
    table = CostTable([1.0, 1.0])
    assert make_policy("algorithm-1", {"dspark": table}).table is table
    assert make_policy("delayed", {"dspark": table}).delay == 2
    assert make_policy("delayed-3", {"dspark": table}).delay == 3


@pytest.mark.parametrize(
    "name", ["", "greedy", "fixed", "fixed-x", "fixed-0", "threshold-2", "threshold-nan", "delayed-0", "mtp-2"]
)
def test_an_unknown_policy_is_named(name):
    with pytest.raises(ValueError, match=f"--policies: got '{name}', expected none, mtp-1"):
        make_policy(name, {"dspark": CostTable([1.0, 1.0])})


# Audits


POLICIES = {
    "none": lambda table: FixedLength(0),
    "MTP-1": lambda table: FixedLength(1),
    "fixed 2": lambda table: FixedLength(2),
    "threshold on survival": lambda table: ConfidenceThreshold(0.5),
    "threshold on conditional confidence": lambda table: ConfidenceThreshold(0.5, conditional=True),
    "Algorithm 1": EarlyStopping,
}


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_leaks(name):
    audit_scheduler(lambda a, table: POLICIES[name](table).step(a, range(len(a))), max_examples=12).assert_lossless()


def test_the_twins_do_not_leak_either():
    def algorithm_1(a, table):
        return torch.from_numpy(EarlyStop("", table).lengths(a.numpy(), a.numpy()))

    audit_scheduler(algorithm_1, max_examples=12).assert_lossless()
    audit_scheduler(lambda a, t: torch.from_numpy(simulated.admit(a.numpy(), 2)), max_examples=12).assert_lossless()


def conditional(a):
    before = torch.cat((torch.ones_like(a[:, :1]), a[:, :-1]), dim=1)
    return torch.where(before > 0, a / before, 0.0)


LEAKS = {
    "reads c_{k+1} to decide about x_k": lambda a, t: (
        (torch.cat((conditional(a)[:, 1:], conditional(a)[:, -1:]), dim=1) >= 0.5).cumprod(dim=1).sum(dim=1)
    ),
    "counts the good positions anywhere": lambda a, t: (conditional(a) >= 0.5).sum(dim=1),
    "mean confidence of the whole block": lambda a, t: ((conditional(a).mean(dim=1) >= 0.5) * a.shape[1]).to(
        torch.int32
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_threshold_that_looks_ahead_is_caught(name):
    assert not audit_scheduler(LEAKS[name], max_examples=20).passed


def test_the_conditional_threshold_reads_c_k():
    a = torch.tensor([[0.9, 0.81, 0.081, 0.08], [0.4, 0.4, 0.4, 0.4], [1.0, 0.0, 0.0, 0.0]])
    assert ConfidenceThreshold(0.5, conditional=True).step(a, [0, 1, 2]).tolist() == [2, 0, 1]
    assert ConfidenceThreshold(0.0, conditional=True).step(a, [0, 1, 2]).tolist() == [4, 4, 2]  # no c_3 where a_2 = 0
    assert ConfidenceThreshold(0.5).step(a, [0, 1, 2]).tolist() == [2, 0, 1]

"""The simulator against closed forms, against a simulator of one request at a time, and against its own promises."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from dsspark import CostTable
from dsspark.serving.acceptance import RoundPool
from dsspark.serving.roofline import StepCosts, measured_costs
from dsspark.serving.simulated import make_policy
from dsspark.serving.simulator import simulate
from dsspark.serving.workload import Workload, draw_workload

STAIRS = CostTable.from_points([4, 8, 16, 32, 128], [1.0, 1.1, 1.5, 2.5, 9.0])
TABLES = {"dspark": STAIRS}


def pool_of(seed=0, size=64, gamma=3, domains=("a", "b")):
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.random((len(domains), size, gamma)) ** 0.3, axis=2).astype(np.float32)
    accepted = (rng.random((len(domains), size, 1)) < survival).sum(axis=2)
    return RoundPool(domains=domains, survival=survival, accepted=accepted, origin="test")


def load(count, pool, **options):
    defaults = {"prompt_tokens": 20.0, "output_tokens": 12.0, "mix": dict.fromkeys(pool.domains, 1.0)}
    return draw_workload(count, domains=pool.domains, **(defaults | options))


def one_by_one(workload, pool, costs, policy, users):
    """Every request an object, every step a loop: slow and plain."""
    waiting, batch, now, log = (
        list(range(len(workload))),
        [],
        0.0,
        {"steps": 0, "finish": {}, "begin": {}, "totals": set()},
    )
    history = []
    while waiting or batch:
        if workload.arrival is not None and not batch:
            now = max(now, workload.arrival[waiting[0]])
        while waiting and len(batch) < users and (workload.arrival is None or workload.arrival[waiting[0]] <= now):
            request = waiting.pop(0)
            batch.append(
                {"id": request, "left": workload.output[request], "cached": workload.prompt[request], "round": 0}
            )
            log["begin"][request] = now
        rows = [
            (workload.start[b["id"]] + b["round"] * workload.stride[b["id"]]) % pool.accepted.shape[1] for b in batch
        ]
        survival = np.stack([pool.survival[workload.domain[b["id"]], row] for b, row in zip(batch, rows, strict=True)])
        past = history[-policy.delay] if policy.delay and len(history) >= policy.delay else {}
        ones = np.ones(pool.block_size, dtype=np.float32)
        stale = np.stack([past.get(b["id"], ones) for b in batch])
        lengths = policy.lengths(survival, stale)
        history.append({b["id"]: a for b, a in zip(batch, survival, strict=True)})
        now += (
            costs.verify[len(batch) + lengths.sum()]
            + costs.draft[len(batch)]
            + costs.cached_token * sum(b["cached"] for b in batch)
        )
        for b, row, length in zip(batch, rows, lengths, strict=True):
            emitted = min(min(pool.accepted[workload.domain[b["id"]], row], length) + 1, b["left"])
            b["left"], b["cached"], b["round"] = b["left"] - emitted, b["cached"] + emitted, b["round"] + 1
        log["steps"] += 1
        log["totals"].add(int(lengths.sum()))
        for b in batch:
            if b["left"] == 0:
                log["finish"][b["id"]] = now
        batch = [b for b in batch if b["left"] > 0]
    return now, log


COSTS = StepCosts(verify=STAIRS.seconds.numpy().copy(), draft=0.01 * np.arange(33.0), cached_token=1e-4, table=STAIRS)


@pytest.mark.parametrize("rate", [None, 0.4, 3.0])
@pytest.mark.parametrize("policy", ["none", "fixed-2", "threshold-0.5"])
def test_policies_of_one_request_agree_with_a_plain_simulation(policy, rate):
    pool = pool_of()
    workload = load(90, pool, rate=rate)
    chosen = make_policy(policy, TABLES)
    outcome = simulate(workload, pool, COSTS, chosen, users=6)
    now, log = one_by_one(workload, pool, COSTS, chosen, 6)
    assert outcome.simulated_seconds == pytest.approx(now, rel=1e-12)
    assert (outcome.steps, outcome.requests, outcome.tokens) == (log["steps"], 90, int(workload.output.sum()))


@pytest.mark.parametrize("rate", [None, 3.0])
@pytest.mark.parametrize("policy", ["delayed-1", "delayed", "delayed-3", "algorithm-1"])
def test_schedulers_agree_with_a_plain_simulation(policy, rate):
    """Continuous survivals: ties between requests would be broken by the order of the batch, which differs."""
    rng = np.random.default_rng(5)
    quality = rng.random((2, 1024, 1)) ** 2  # good rounds and bad ones, so that the budget depends on which are seen
    survival = (quality * np.cumprod(0.5 + 0.5 * rng.random((2, 1024, 3)), axis=2)).astype(np.float32)
    accepted = (rng.random((2, 1024, 1)) < survival).sum(axis=2)
    pool = RoundPool(domains=("a", "b"), survival=survival, accepted=accepted, origin="test")
    table = CostTable.from_points([4, 6, 8, 12, 128], [1.0, 1.05, 1.25, 1.5, 3.0])
    costs = dataclasses.replace(COSTS, verify=table.seconds.numpy().copy(), table=table)
    workload = load(90, pool, rate=rate)
    chosen = make_policy(policy, {"dspark": table})
    outcome = simulate(workload, pool, costs, chosen, users=6)
    now, log = one_by_one(workload, pool, costs, chosen, 6)
    assert outcome.steps == log["steps"]
    assert outcome.simulated_seconds == pytest.approx(now, rel=1e-12)
    assert len(log["totals"]) >= 5


def test_a_machine_that_can_be_calculated():
    """Everything accepted, fixed outputs, a constant step: rates in closed form."""
    pool = RoundPool(
        domains=("a",), survival=np.ones((1, 4, 3), dtype=np.float32), accepted=np.full((1, 4), 3), origin="test"
    )
    costs = measured_costs(CostTable.from_points([64], [0.5]), max_requests=8)
    workload = load(80, pool, output_spread="fixed", prompt_tokens=0.0)
    expected = {"none": (1, 1.0, 0.0), "fixed-1": (2, 2.0, 0.0), "fixed-3": (4, 4.0, 0.0), "delayed": (4, 4.0, 0.0)}
    for name, (per_round, budget, waste) in expected.items():
        policy = make_policy(name, {"dspark": costs.table})
        outcome = simulate(workload, pool, costs, policy, users=8)
        assert outcome.throughput == pytest.approx(8 * per_round / 0.5)
        assert outcome.user_speed == pytest.approx(per_round / 0.5)
        assert (outcome.concurrency, outcome.budget, outcome.waste) == (pytest.approx(8), budget, waste)
        assert outcome.p50_token_seconds == outcome.p95_token_seconds == pytest.approx(0.5 / per_round)
        assert outcome.simulated_seconds == pytest.approx(10 * 12 / per_round * 0.5)
        assert math.isnan(outcome.p50_wait_seconds)


def test_waste_is_what_was_verified_and_not_accepted():
    survival = np.full((1, 2, 3), 0.5, dtype=np.float32)
    pool = RoundPool(domains=("a",), survival=survival, accepted=np.array([[1, 3]]), origin="test")
    costs = measured_costs(STAIRS, max_requests=4)
    workload = dataclasses.replace(
        load(40, pool, output_tokens=1e4, output_spread="fixed"), stride=np.ones(40, dtype=np.int64)
    )
    outcome = simulate(
        dataclasses.replace(workload, output=np.full(40, 12)), pool, costs, make_policy("fixed-3", {}), users=4
    )
    # Rounds alternate between 2 and 4 tokens: 12 tokens are 4 rounds, 12 drafts verified, 8 of them accepted.
    assert outcome.waste == pytest.approx(1 / 3)
    assert outcome.tokens_per_round == pytest.approx(3.0)
    assert outcome.budget == 4.0


def test_an_open_system_waits_when_it_is_overloaded_and_idles_when_it_is_not():
    pool = pool_of()
    costs = measured_costs(STAIRS, max_requests=4)
    calm = simulate(load(400, pool, rate=0.01), pool, costs, make_policy("none", {}), users=4)
    assert calm.p95_wait_seconds < 1.1  # at most the step that is running
    assert calm.concurrency == pytest.approx(1.0, abs=0.3)  # over steps; the idle time has none
    busy = simulate(load(400, pool, rate=50.0), pool, costs, make_policy("none", {}), users=4)
    assert busy.p50_wait_seconds > 100
    assert busy.concurrency == pytest.approx(4.0, abs=1e-9)
    assert busy.simulated_seconds < calm.simulated_seconds


def test_common_random_numbers():
    """A request has the same rounds, length and prompt whatever the policy, the batch and the other requests."""
    pool = pool_of()
    small, large = load(50, pool, rate=1.0, seed=3), load(50, pool, rate=4.0, seed=3)
    for name in ("domain", "prompt", "output", "start", "stride"):
        assert np.array_equal(getattr(small, name), getattr(large, name)), name
    assert np.allclose(small.arrival, 4 * large.arrival)
    assert not np.array_equal(small.start, load(50, pool, rate=1.0, seed=4).start)
    runs = [simulate(small, pool, COSTS, make_policy("delayed", TABLES), users=5) for _ in range(2)]
    assert dataclasses.astuple(runs[0]) == dataclasses.astuple(runs[1])


def test_requests_draw_every_round_of_the_pool_about_equally():
    pool = pool_of(size=16, gamma=1)
    workload = load(4000, pool)
    rounds = np.arange(8)
    rows = (workload.start[:, None] + rounds * workload.stride[:, None]) % 16
    counts = np.bincount(rows.ravel(), minlength=16)
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()


def test_the_counted_steps_leave_out_the_cold_start_and_the_end():
    """Outputs of one token: every step finishes its whole batch, so the counted steps are all full."""
    pool = pool_of()
    workload = dataclasses.replace(load(103, pool), output=np.ones(103, dtype=np.int64))
    outcome = simulate(workload, pool, measured_costs(STAIRS, max_requests=10), make_policy("none", {}), users=10)
    assert outcome.concurrency == pytest.approx(10.0)
    assert outcome.steps == 11
    few = simulate(load(3, pool), pool, COSTS, make_policy("none", {}), users=10)  # nothing left to count: all is
    assert few.requests == 3
    assert few.throughput > 0
    assert math.isnan(few.p50_token_seconds)


def test_progress_counts_every_request_once():
    pool, seen = pool_of(), []
    simulate(load(3000, pool), pool, COSTS, make_policy("none", {}), users=4, on_progress=seen.append)
    assert sum(seen) == 3000
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("policy", "users", "text"),
    [
        ("none", 0, "--users: got 0"),
        ("none", 33, "expected at least 33 and 33 for none"),
        ("fixed-3", 32, "got 127 batch tokens"),
        ("threshold-0.5", 32, "for threshold-0.5 with 32 users; profile larger sizes"),
    ],
)
def test_a_table_that_is_too_short_is_refused_before_it_runs(policy, users, text):
    pool = pool_of()
    costs = dataclasses.replace(COSTS, verify=COSTS.verify[:128])
    with pytest.raises(ValueError, match=text):
        simulate(load(10, pool), pool, costs, make_policy(policy, TABLES), users=users)


def test_a_measured_table_must_hold_one_token_a_request():
    with pytest.raises(ValueError, match="--cost-table: got 128 batch tokens, expected at least 129"):
        measured_costs(STAIRS, max_requests=129)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_requests": 0}, "requests, output and prompt tokens: got 0"),
        ({"output_tokens": 0.5}, "requests, output and prompt tokens"),
        ({"prompt_tokens": -1.0}, "requests, output and prompt tokens"),
        ({"rate": 0.0}, "--rate: got 0.0"),
        ({"rate": math.nan}, "--rate: got nan"),
        ({"mix": {"poetry": 1.0}}, "--mix: got .*poetry.*expected shares of a, b"),
        ({"mix": {"a": 0.0}}, "--mix"),
        ({"mix": {"a": -1.0, "b": 2.0}}, "--mix"),
        ({"mix": {"a": math.nan}}, "--mix"),
        ({"output_spread": "wide"}, "--output-spread: got 'wide'"),
    ],
)
def test_a_load_that_is_none_is_refused(options, text):
    defaults = {"num_requests": 5, "domains": ("a", "b"), "mix": {"a": 1.0}, "prompt_tokens": 1.0, "output_tokens": 5.0}
    with pytest.raises(ValueError, match=text):
        draw_workload(**(defaults | options))


def test_a_load_is_what_was_asked_for():
    workload = draw_workload(
        20000, domains=("a", "b"), mix={"a": 1.0, "b": 3.0}, prompt_tokens=100.0, output_tokens=50.0, rate=5.0
    )
    assert isinstance(workload, Workload)
    assert workload.domain.mean() == pytest.approx(0.75, abs=0.02)
    assert workload.prompt.mean() == pytest.approx(100, rel=0.03)
    assert workload.output.mean() == pytest.approx(50, rel=0.03)
    assert workload.output.min() >= 1
    assert np.diff(workload.arrival).mean() == pytest.approx(0.2, rel=0.03)
    assert (workload.stride % 2 == 1).all()

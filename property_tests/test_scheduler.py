"""Laws of the scheduler: budget, prefixes, optimality where Algorithm 1 promises it, and no look at what is being decided."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dsspark
from dsspark.cost_table import CostTable
from dsspark.testing import strategies
from dsspark.testing.scheduling import anticipates

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXHAUSTIVE = settings.get_profile("exhaustive")


@st.composite
def steps(draw, max_requests=3, max_block=4):
    """Survivals and a table that covers them."""
    sizes = draw(st.integers(1, max_requests)), draw(st.integers(1, max_block))
    survival = draw(strategies.survivals(*sizes, dtypes=DTYPES))
    requests, gamma = survival.shape
    return survival, draw(strategies.cost_tables(requests * (1 + gamma)))


def theta(survival, table, lengths):
    requests = len(survival)
    tau = requests + sum(float(survival[r, :length].double().sum()) for r, length in enumerate(lengths))
    return tau * float(table.sps[requests + sum(lengths)])


def thetas(survival, table):
    """Theta after each admission in order of survival."""
    ranked = sorted(survival[survival > 0].double().tolist(), reverse=True)
    requests = len(survival)
    return [(requests + sum(ranked[:k])) * float(table.sps[requests + k]) for k in range(len(ranked) + 1)]


@given(step=steps(), limit=st.integers(0, 12))
def test_no_scheduler_exceeds_its_budget(backend, step, limit):
    survival, table = step
    requests, gamma = survival.shape
    limit = requests + limit
    lengths = dsspark.schedule(survival, table, max_tokens=limit, backend=backend)
    assert requests + int(lengths.sum()) <= limit
    budget = dsspark.plan_budget(survival, table, max_tokens=limit, backend=backend)
    assert 0 <= int(budget) <= min(limit - requests, requests * gamma)
    delayed = dsspark.DelayedScheduler(table, gamma, delay=1)
    for _ in range(3):
        assert requests + int(delayed.step(survival, range(requests), limit).sum()) <= limit


@given(step=steps(), budget=st.integers(0, 16))
def test_lengths_are_prefixes_of_the_most_probable_survivors(backend, step, budget):
    """Nothing outside of the chosen prefixes is more probable than anything inside, and inside nothing is hopeless."""
    survival, table = step
    for lengths in (
        dsspark.schedule(survival, table, backend=backend),
        dsspark.admit(survival, budget, backend=backend),
    ):
        inside = torch.arange(survival.shape[1]) < lengths[:, None]
        assert (lengths >= 0).all()
        assert (lengths <= survival.shape[1]).all()
        assert (survival[inside] > 0).all()
        if inside.any() and not inside.all():
            assert survival[inside].min() >= survival[~inside].max()


@given(survival=strategies.survivals(dtypes=DTYPES), budget=st.integers(0, 16), as_tensor=st.booleans())
def test_admit_takes_exactly_the_budget_or_all_candidates(backend, survival, budget, as_tensor):
    given_budget = torch.tensor(budget, dtype=torch.int32) if as_tensor else budget
    taken = int(dsspark.admit(survival, given_budget, backend=backend).sum())
    assert taken == min(budget, int((survival > 0).sum()))


@given(survival=strategies.survivals(dtypes=DTYPES), budget=st.integers(0, 16))
def test_ties_break_by_position_then_request(backend, survival, budget):
    ranked = sorted((-float(a), j, r) for r, row in enumerate(survival) for j, a in enumerate(row) if a > 0)
    expected = [sum(r == request for _, _, r in ranked[:budget]) for request in range(len(survival))]
    assert dsspark.admit(survival, budget, backend=backend).tolist() == expected


@given(step=steps(max_requests=2, max_block=3))
def test_early_stopping_finds_the_best_lengths_where_theta_is_unimodal(backend, step):
    survival, table = step
    curve = thetas(survival, table)
    peak = curve.index(max(curve))
    assume(all(b > a * (1 + 1e-9) for a, b in itertools.pairwise(curve[: peak + 1])))
    assume(all(b <= a for a, b in itertools.pairwise(curve[peak:])))
    lengths = dsspark.schedule(survival, table, backend=backend).tolist()
    every = itertools.product(*(range(int(hopeful) + 1) for hopeful in (survival > 0).sum(dim=1)))
    best = max(theta(survival, table, candidate) for candidate in every)
    assert theta(survival, table, lengths) == pytest.approx(best, rel=1e-12)


@given(step=steps())
def test_early_stopping_stops_at_the_first_candidate_that_does_not_pay(backend, step):
    survival, table = step
    curve = thetas(survival, table)
    assume(all(a == b or abs(a - b) > 1e-9 * a for a, b in itertools.pairwise(curve)))
    stop = next((k for k in range(len(curve) - 1) if not curve[k + 1] > curve[k]), len(curve) - 1)
    assert int(dsspark.schedule(survival, table, backend=backend).sum()) == stop


@given(requests=st.sampled_from([1, 3]), rate=st.integers(1, 64))
def test_equal_theta_stops(backend, requests, rate):
    """A draft that changes nothing is not verified, though the next one would pay."""
    sps = [1.0] * requests + [rate / 8, rate / 8 * requests / (requests + 1), float(rate), float(rate)]
    survival = torch.zeros(requests, 2)
    survival[0] = 1.0
    assert dsspark.schedule(survival, CostTable(sps), backend=backend).sum() == 0
    assert dsspark.plan_budget(survival, CostTable(sps), backend=backend) == 2


@given(step=steps())
def test_the_planned_budget_is_the_global_optimum_and_the_smallest(backend, step):
    survival, table = step
    curve = thetas(survival, table)
    assume(all(curve.count(a) == 1 or table.sps.unique().numel() > 1 for a in curve))
    budget = int(dsspark.plan_budget(survival, table, backend=backend))
    assert curve[budget] >= max(curve) * (1 - 1e-12)
    assert all(a < curve[budget] * (1 + 1e-12) for a in curve[:budget])


@given(step=steps(), data=st.data())
def test_renaming_the_requests_renames_their_lengths(backend, step, data):
    """Where no two survivals tie, the order of the rows is nobody's business."""
    survival, table = step
    values = survival[survival > 0]
    assume(len(values.unique()) == len(values))
    order = data.draw(st.permutations(range(len(survival))))
    lengths = dsspark.schedule(survival, table, backend=backend)
    assert torch.equal(dsspark.schedule(survival[order], table, backend=backend), lengths[order])


@given(step=steps(), requests=st.integers(1, 3))
def test_a_request_without_hope_only_costs_its_anchor(backend, step, requests):
    """`admit` gives the others what it gave them without it."""
    survival, _ = step
    wider = torch.cat((survival, torch.zeros(requests, survival.shape[1])))
    for budget in range(survival.numel() + 1):
        lengths = dsspark.admit(wider, budget, backend=backend)
        assert torch.equal(lengths[: len(survival)], dsspark.admit(survival, budget, backend=backend))
        assert (lengths[len(survival) :] == 0).all()


def decides_without_looking(step, other, lengths_fn):
    survival, _ = step
    for replacement in (other, torch.ones_like(other), torch.zeros_like(other)):
        assert anticipates(lengths_fn, survival, replacement) is None


RATES = st.sampled_from([1.0, 0.5, 0.45, 0.9, 0.4, 0.25])
"""Steps per second of ragged tables, on which Theta often falls and then rises above where it was: there a search finds something."""


@st.composite
def pairs_of_steps(draw):
    survival, shaped = draw(steps())
    rates = st.lists(RATES, min_size=len(shaped.sps) - 1, max_size=len(shaped.sps) - 1)
    step = survival, draw(st.one_of(rates.map(lambda ragged: CostTable([1.0, *ragged])), st.just(shaped)))
    return step, draw(strategies.survivals(*step[0].shape)), draw(strategies.survivals(*step[0].shape))


@pytest.mark.slow
@settings(EXHAUSTIVE)
@given(pair=pairs_of_steps(), budget=st.integers(0, 12))
def test_no_length_depends_on_a_token_whose_verification_it_decides(backend, pair, budget):
    step, other, earlier = pair
    survival, table = step
    requests, gamma = survival.shape
    decides_without_looking(step, other, lambda a: dsspark.schedule(a, table, backend=backend))
    decides_without_looking(step, other, lambda a: dsspark.admit(a, budget, backend=backend))

    def delayed(a):
        scheduler = dsspark.DelayedScheduler(table, gamma, delay=1)
        scheduler.step(earlier, range(requests))
        return scheduler.step(a, range(requests))

    decides_without_looking(step, other, delayed)


def test_the_same_law_rejects_a_search_over_current_confidences():
    """Planted fault: the budget is planned from the survivals it decides about (paper Appendix A)."""
    table = CostTable([1.0, 1.0, 0.5, 0.45])
    step = (torch.tensor([[0.8, 0.0]]), table)
    with pytest.raises(AssertionError):
        decides_without_looking(step, torch.ones(1, 2), lambda a: dsspark.admit(a, dsspark.plan_budget(a, table)))

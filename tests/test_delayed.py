"""The delayed scheduler: what it remembers, of whom, and for how long."""

from __future__ import annotations

import random

import pytest
import torch

from dsspark import CostTable, DelayedScheduler, admit, plan_budget

GAMMA = 3
STAIRS = CostTable.from_points([2, 4, 8, 12, 16, 64], [1.0, 1.25, 1.5, 2.0, 2.75, 16.0])


def survivals(num_requests, rng):
    return torch.tensor(
        [
            sorted((rng.choice([rng.random(), 0.5, 1.0]) for _ in range(GAMMA)), reverse=True)
            for _ in range(num_requests)
        ]
    ).view(num_requests, GAMMA)


class History:
    """Remembers everything, and looks `delay` steps back."""

    def __init__(self, delay):
        self.delay, self.steps = delay, []

    def budget(self, ids, max_tokens=None):
        past = self.steps[-self.delay] if len(self.steps) >= self.delay else {}
        stale = [past.get(request, [1.0] * GAMMA) for request in ids]
        return plan_budget(torch.tensor(stale).view(-1, GAMMA), STAIRS, max_tokens=max_tokens)

    def record(self, ids, survival):
        self.steps.append(dict(zip(ids, survival.tolist(), strict=True)))


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_budget_is_that_of_delay_steps_ago_whatever_comes_and_goes(delay, seed):
    rng = random.Random(seed)
    scheduler, history = DelayedScheduler(STAIRS, GAMMA, delay), History(delay)
    budgets = set()
    for step in range(40):
        ids = rng.sample("abcdefgh", rng.randint(0, 7))  # new, finished and returning requests, in any order
        survival = survivals(len(ids), rng)
        max_tokens = rng.choice([None, 12])
        lengths = scheduler.step(survival, ids, max_tokens)
        budget = history.budget(ids, max_tokens)
        assert lengths.tolist() == admit(survival, budget).tolist(), step
        assert lengths.dtype == torch.int32
        history.record(ids, survival)
        budgets.add(budget.item())
    assert len(budgets) > 4


def test_new_requests_are_planned_with_survival_one():
    table = CostTable.from_points([2, 4, 8], [1.0, 1.25, 2.2])
    scheduler = DelayedScheduler(table, GAMMA)
    low = torch.full((2, GAMMA), 0.01)
    optimistic = plan_budget(torch.ones(2, GAMMA), table).item()
    assert optimistic == 6
    assert scheduler.step(low, ["a", "b"]).sum().item() == optimistic  # no history at all
    assert scheduler.step(low, ["a", "b"]).sum().item() == optimistic  # none two steps ago
    assert scheduler.step(low, ["a", "b"]).sum().item() == plan_budget(low, table).item() == 0
    half_new = torch.tensor([[0.01] * GAMMA, [1.0] * GAMMA])
    assert scheduler.step(low, ["a", "c"]).sum().item() == plan_budget(half_new, table).item() == 2
    assert scheduler.step(low, ["c", "d"]).sum().item() == optimistic  # c was not there two steps ago either


def test_the_budget_knows_nothing_of_the_current_step_and_of_the_one_before():
    def total(older, previous, current):
        scheduler = DelayedScheduler(STAIRS, GAMMA, delay=2)
        for survival in (older, previous):
            scheduler.step(survival, ["a", "b"])
        return scheduler.step(current, ["a", "b"]).sum().item()

    high, low = torch.full((2, GAMMA), 0.9), torch.full((2, GAMMA), 0.1)
    assert [total(high, *rest) for rest in ((high, high), (high, low), (low, high), (low, low))] == [6] * 4
    assert [total(low, *rest) for rest in ((high, high), (high, low), (low, high), (low, low))] == [0] * 4


def test_rows_follow_their_request_when_the_order_changes():
    scheduler = DelayedScheduler(STAIRS, GAMMA, delay=1)
    survival = torch.tensor([[0.9] * GAMMA, [0.1] * GAMMA, [0.5] * GAMMA])
    scheduler.step(survival, ["a", "b", "c"])
    stale = scheduler._stale(survival, ["c", "new", "a", "b"])
    assert torch.equal(stale, torch.cat((survival[[2]], torch.ones(1, GAMMA), survival[[0, 1]])))


def test_it_keeps_the_last_steps_only_and_copies_them():
    scheduler = DelayedScheduler(STAIRS, GAMMA, delay=2)
    buffer = torch.full((2, GAMMA), 0.1)
    for _ in range(5):
        scheduler.step(buffer, ["a", "b"])
        assert len(scheduler._steps) <= 2
    buffer.fill_(1.0)  # an engine reuses its output buffer
    assert scheduler.step(buffer, ["a", "b"]).sum().item() == 0
    assert not any(past.requires_grad for _, past in scheduler._steps)
    scheduler.step(buffer.clone().requires_grad_(), ["a", "b"])
    assert not any(past.requires_grad for _, past in scheduler._steps)


def test_finished_requests_leave_no_trace():
    scheduler = DelayedScheduler(STAIRS, GAMMA, delay=1)
    scheduler.step(torch.full((4, GAMMA), 0.9), ["a", "b", "c", "d"])
    only = torch.full((1, GAMMA), 0.9)
    assert scheduler.step(only, ["b"]).item() == plan_budget(only, STAIRS).item()
    scheduler.step(torch.zeros(0, GAMMA), [])
    assert scheduler.step(torch.zeros(1, GAMMA) + 0.01, ["b"]).item() == 3  # b was away: the prior again


def test_reset_forgets():
    scheduler = DelayedScheduler(STAIRS, GAMMA, delay=1)
    low = torch.full((2, GAMMA), 0.01)
    scheduler.step(low, ["a", "b"])
    scheduler.reset()
    assert scheduler.step(low, ["a", "b"]).sum().item() == 6


def test_ids_may_be_a_tensor_or_any_hashable():
    low = torch.full((2, GAMMA), 0.01)
    for ids in (torch.tensor([7, 9]), [7, 9], ("x", ("y", 1))):
        scheduler = DelayedScheduler(STAIRS, GAMMA, delay=1)
        scheduler.step(low, ids)
        assert scheduler.step(low, ids).sum().item() == 0
    scheduler = DelayedScheduler(STAIRS, GAMMA, delay=1)
    scheduler.step(low, torch.tensor([7, 9]))
    assert scheduler.step(low, [9, 7]).sum().item() == 0  # a tensor's ids are its numbers


@pytest.mark.parametrize("delay", [0, -1, 1.0, True])
def test_a_delay_below_one_is_refused_because_it_leaks(delay):
    with pytest.raises(ValueError, match=r"delay: got .*leaks"):
        DelayedScheduler(STAIRS, GAMMA, delay=delay)


def test_it_names_the_bad_argument_and_keeps_its_state():
    scheduler = DelayedScheduler(STAIRS, GAMMA, delay=1)
    low = torch.full((2, GAMMA), 0.01)
    scheduler.step(low, ["a", "b"])
    for arguments, error, text in (
        ((low, ["a", "a"]), ValueError, "request_ids: got a more than once"),
        ((low, ["a"]), ValueError, "request_ids: got 1 ids, expected 2"),
        ((low[:, :2], ["a", "b"]), ValueError, "survival: got shape"),
        ((low.long(), ["a", "b"]), TypeError, "survival: got dtype"),
        ((low, ["a", "b"], 1), ValueError, "max_tokens: got 1"),
        ((torch.ones(65, GAMMA), list(range(65))), ValueError, "cost_table: got 64 batch tokens for R = 65"),
    ):
        with pytest.raises(error, match=text):
            scheduler.step(*arguments)
    assert scheduler.step(low, ["a", "b"]).sum().item() == 0
    for block_size in (0, 33):
        with pytest.raises(ValueError, match=f"block_size: got {block_size}"):
            DelayedScheduler(STAIRS, block_size)

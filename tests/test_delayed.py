"""The delayed scheduler: what it remembers, of whom, and for how long."""

from __future__ import annotations

import random

import pytest
import torch

from dsspark import CostTable, DelayedScheduler, admit, plan_budget
from dsspark.serving.delayed_device import DeviceDelayedScheduler
from dsspark.testing.audit import audit_scheduler
from dsspark.testing.laws import GridLaw, LosslessnessError, Stages, assert_exact, composed_law

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


# The device variant


class Engine:
    """Requests that come and go, and the slots they are given; a slot is handed on at once."""

    def __init__(self, rng, slots):
        self.rng, self.free, self.slot_of, self.next_id = rng, list(range(slots)), {}, 1000

    def turn(self):
        """Let some requests leave, some come, some pause; return the ids and slots of this step, in any order."""
        for request in [r for r in self.slot_of if self.rng.random() < 0.2]:
            self.free.append(self.slot_of.pop(request))
        while self.free and self.rng.random() < 0.6:
            self.slot_of[self.next_id] = self.free.pop(self.rng.randrange(len(self.free)))
            self.next_id += 1
        ids = [request for request in self.slot_of if self.rng.random() < 0.85]
        self.rng.shuffle(ids)
        return ids, [self.slot_of[request] for request in ids]


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_device_variant_does_what_the_host_variant_does(delay, seed):
    rng = random.Random(seed)
    engine, totals = Engine(rng, slots=7), set()
    host = DelayedScheduler(STAIRS, GAMMA, delay)
    device = DeviceDelayedScheduler(STAIRS, GAMMA, max_requests=7, delay=delay)
    for step in range(60):
        ids, slots = engine.turn()
        survival = survivals(len(ids), rng) * rng.choice([0.03, 0.1, 0.3, 1.0])
        max_tokens = rng.choice([None, 12])
        wanted = host.step(survival, ids, max_tokens)
        got = device.step(
            survival, torch.tensor(slots, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64), max_tokens
        )
        assert got.tolist() == wanted.tolist(), step
        totals.add((len(ids), int(got.sum())))
    assert len(totals) > 9


def test_a_slot_that_was_handed_on_is_planned_with_the_prior():
    table = CostTable.from_points([2, 4, 8], [1.0, 1.25, 2.2])
    slots, low = torch.tensor([0, 1]), torch.full((2, GAMMA), 0.01)
    scheduler = DeviceDelayedScheduler(table, GAMMA, 4, delay=1)
    assert scheduler.step(low, slots, torch.tensor([7, 8])).sum() == 6
    assert scheduler.step(low, slots, torch.tensor([7, 8])).sum() == 0
    assert scheduler.step(low, slots, torch.tensor([9, 10])).sum() == 6  # same slots, other requests
    assert scheduler.step(low, slots.flip(0), torch.tensor([10, 9])).sum() == 0
    scheduler.reset()
    assert scheduler.step(low, slots, torch.tensor([10, 9])).sum() == 6


@pytest.mark.parametrize("request_id", [0, -1, -(2**63), 2**63 - 1])
def test_any_integer_is_an_id(request_id):
    """No id stands for "nobody"."""
    table = CostTable.from_points([1, 4], [1.0, 1.5])
    scheduler = DeviceDelayedScheduler(table, GAMMA, 1, delay=2)
    low = torch.full((1, GAMMA), 0.01)
    assert [scheduler.step(low, torch.tensor([0]), torch.tensor([request_id])).item() for _ in range(4)] == [3, 3, 0, 0]


def test_the_state_is_changed_in_place_and_its_buffer_is_the_callers():
    """A CUDA graph replays on the same memory, and engines reuse their output buffers."""
    scheduler = DeviceDelayedScheduler(STAIRS, GAMMA, 4, delay=2)
    state = (scheduler._survival, scheduler._owner, scheduler._filled)
    before = [tensor.data_ptr() for tensor in state]
    buffer, slots, ids = torch.full((2, GAMMA), 0.01), torch.tensor([3, 1]), torch.tensor([5, 6])
    for _ in range(5):
        scheduler.step(buffer, slots, ids)
    buffer.fill_(1.0)
    assert scheduler.step(buffer, slots, ids).sum() == 0
    assert [tensor.data_ptr() for tensor in (scheduler._survival, scheduler._owner, scheduler._filled)] == before
    assert torch.equal(scheduler._survival[-1, slots], torch.ones(2, GAMMA))
    assert scheduler._survival[-1, [0, 2]].eq(1.0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2, 2), torch.tensor([0, 1]), torch.tensor([0, 1])), ValueError, "survival: got shape"),
        ((torch.ones(5, GAMMA), torch.arange(5), torch.arange(5)), ValueError, "at most max_requests = 4"),
        ((torch.ones(2, GAMMA), torch.tensor([0]), torch.tensor([0, 1])), ValueError, "slots: got shape"),
        ((torch.ones(2, GAMMA), torch.tensor([0, 1]), torch.tensor([0])), ValueError, "request_ids: got shape"),
        ((torch.ones(2, GAMMA), torch.tensor([0.0, 1.0]), torch.tensor([0, 1])), TypeError, "slots: got dtype"),
        ((torch.ones(2, GAMMA), [0, 1], torch.tensor([0, 1])), TypeError, "slots: got list"),
        ((torch.ones(2, GAMMA), torch.tensor([0, 1]), torch.tensor([0, 1]), 1), ValueError, "max_tokens: got 1"),
    ],
)
def test_the_device_variant_names_the_bad_argument_and_keeps_its_state(arguments, error, text):
    scheduler = DeviceDelayedScheduler(STAIRS, GAMMA, 4, delay=1)
    low, slots = torch.full((2, GAMMA), 0.01), torch.tensor([0, 1])
    scheduler.step(low, slots, slots)
    with pytest.raises(error, match=text):
        scheduler.step(*arguments)
    assert scheduler.step(low, slots, slots).sum() == 0
    for options, name in (
        ({"delay": 0}, "leaks"),
        ({"max_requests": 0}, "max_requests"),
        ({"block_size": 0}, "block_size"),
    ):
        with pytest.raises(ValueError, match=name):
            DeviceDelayedScheduler(**({"cost_table": STAIRS, "block_size": GAMMA, "max_requests": 4} | options))


@pytest.mark.gpu
def test_the_device_variant_replays_in_a_cuda_graph():
    rng = random.Random(0)
    table = STAIRS.to("cuda")
    host, device = DelayedScheduler(STAIRS, GAMMA, 2), DeviceDelayedScheduler(table, GAMMA, 4, delay=2)
    slots, ids = torch.tensor([2, 0, 3], device="cuda"), torch.tensor([7, 8, 9], device="cuda")
    survival = torch.ones(3, GAMMA, device="cuda")
    device.step(survival, slots, ids)
    device.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lengths = device.step(survival, slots, ids)
    device.reset()
    for _ in range(8):
        current = survivals(3, rng)
        survival.copy_(current)
        graph.replay()
        assert lengths.tolist() == host.step(current, [7, 8, 9]).tolist()


# Losslessness over several rounds, jointly over requests, in integers


class OnDevice:
    """The device variant behind the interface of a policy: row r sits in slot R - 1 - r."""

    def __init__(self, cost_table, block_size, delay=2):
        self.scheduler = DeviceDelayedScheduler(cost_table, block_size, max_requests=8, delay=delay)

    def step(self, survival, request_ids):
        ids = torch.as_tensor(list(request_ids))
        return self.scheduler.step(survival, 7 - ids, ids)


class OfThisBlock:
    """The mutant: the budget is planned from the block that it admits."""

    def __init__(self, cost_table, block_size, delay=0):
        self.cost_table = cost_table

    def step(self, survival, request_ids):
        return admit(survival, plan_budget(survival, self.cost_table))


# Four survival matrices a round; SPS is a staircase on which the best budget differs between them. The second law
# has few texts, so that more rounds can be enumerated: target and drafter agree and token 1 goes on forever. A leak shows there all
# the same, since a token that is not verified is drawn anew.
REJECTING = GridLaw.independent((3, 1), (1, 1), 2, ((0.75, 0.75), (0.9, 0.0)))
AGREEING = GridLaw(target=((1, 1), (0, 1)), draft=((1, 1), (0, 1)), block_size=2, confidence=((0.75, 0.75), (0.9, 0.0)))
JOINT_TABLE = CostTable([1.0, 1.0, 1.0, 0.9, 0.62, 0.61, 0.61])


def joint(law, scheduler, delay, rounds, anchors):
    seen = set()

    class Recorded:
        def __init__(self):
            self.inner = scheduler(JOINT_TABLE, 2, delay)

        def step(self, survival, request_ids):
            lengths = self.inner.step(survival, request_ids)
            seen.add(tuple(lengths.tolist()))
            return lengths

    return composed_law(law, Stages(scheduler=Recorded), rounds=rounds, anchors=anchors), seen


@pytest.mark.parametrize(
    ("law", "scheduler", "delay", "rounds"),
    [
        (REJECTING, DelayedScheduler, 1, 2),
        (REJECTING, OnDevice, 1, 2),
        (AGREEING, DelayedScheduler, 1, 3),
        (AGREEING, DelayedScheduler, 2, 3),
        (AGREEING, OnDevice, 2, 3),
    ],
)
def test_two_requests_over_several_rounds_have_exactly_the_targets_joint_law(law, scheduler, delay, rounds):
    anchors = (0, 1) if law is REJECTING else (0, 0)
    counts, seen = joint(law, scheduler, delay, rounds, anchors)
    assert_exact(counts, law, anchors)
    assert len(seen) >= 3  # the lengths really depend on what was drafted


@pytest.mark.parametrize(("law", "rounds"), [(REJECTING, 1), (AGREEING, 1), (AGREEING, 3)])
def test_a_budget_from_the_current_block_is_caught_by_the_same_law(law, rounds):
    counts, seen = joint(law, OfThisBlock, 0, rounds, (0, 0))
    assert len(seen) >= 2
    with pytest.raises(LosslessnessError):
        assert_exact(counts, law, (0, 0))


@pytest.mark.parametrize("scheduler", [OnDevice, DelayedScheduler])
def test_the_audit_finds_no_leak_on_staircases_ties_and_any_history(scheduler):
    audit_scheduler(scheduler, max_examples=15).assert_lossless()


def test_the_audit_finds_the_mutant():
    assert not audit_scheduler(OfThisBlock, max_examples=20).passed

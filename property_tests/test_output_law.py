"""The law of what is emitted, as integers: single, ragged, several requests under each scheduler, several rounds."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsspark
from dsspark.cost_table import CostTable
from dsspark.serving.policies import ConfidenceThreshold, EarlyStopping, FixedLength
from dsspark.testing import strategies
from dsspark.testing.laws import GridLaw, Stages, assert_exact, composed_law, exact_law, grid_round, lattice
from dsspark.testing.sampler_audit import FixedLengths

EXHAUSTIVE = settings.get_profile("exhaustive")
STAIRS = CostTable([1.0, 1.0, 0.7, 0.7, 0.6, 0.5, 0.45])


class Budget:
    """Admit a constant number of drafts."""

    def __init__(self, budget):
        self.budget = budget

    def step(self, survival, request_ids):
        return dsspark.admit(survival, self.budget)


SCHEDULERS = {
    "fixed": lambda gamma: FixedLength(1),
    "threshold": lambda gamma: ConfidenceThreshold(0.5),
    "early stopping": lambda gamma: EarlyStopping(STAIRS),
    "top-K of a fixed budget": lambda gamma: Budget(2),
    "delayed": lambda gamma: dsspark.DelayedScheduler(STAIRS, gamma, delay=1),
}


def stages_on(backend, **parts):
    draft, verify = partial(dsspark.draft_block, backend=backend), partial(dsspark.verify, backend=backend)
    return Stages(draft=draft, verify=verify, **parts)


def check_law(law, stages, anchors=(0,), rounds=1):
    points = lattice(law, cell=stages.cell, num_requests=len(anchors), rounds=rounds)
    assert_exact(exact_law(grid_round(law, stages, anchors), points), law, anchors)


def emits_the_targets_law(backend, law, cell, temperature, draft_temperature):
    check_law(law, stages_on(backend, cell=cell, temperature=temperature, draft_temperature=draft_temperature))


TEMPERATURES = st.sampled_from([1.0, 0.5, 3.0])


@given(law=strategies.grid_laws((2, 3, 4), cell=2), temperature=TEMPERATURES, draft_temperature=TEMPERATURES)
def test_one_request_emits_the_targets_law(backend, law, temperature, draft_temperature):
    emits_the_targets_law(backend, law, 2, temperature, draft_temperature)


@pytest.mark.slow
@settings(EXHAUSTIVE)
@given(
    law=strategies.grid_laws((2, 3, 4, 5), cell=1, max_points=1 << 13),
    temperature=TEMPERATURES,
    draft_temperature=TEMPERATURES,
)
def test_one_request_emits_the_targets_law_exhaustively(backend, law, temperature, draft_temperature):
    emits_the_targets_law(backend, law, 1, temperature, draft_temperature)


@given(law=strategies.grid_laws((2,), (3,), max_points=1 << 12), length=st.integers(0, 3))
def test_a_partly_verified_block_emits_the_targets_law(backend, law, length):
    check_law(law, stages_on(backend, cell=2, scheduler=lambda: FixedLengths((length,))))


@given(law=strategies.grid_laws((2,), (1, 2), num_requests=2, max_points=1 << 13), data=st.data())
def test_two_ragged_requests_emit_the_product_of_their_laws(backend, law, data):
    lengths = tuple(data.draw(st.integers(0, law.block_size)) for _ in range(2))
    check_law(law, stages_on(backend, cell=2, scheduler=lambda: FixedLengths(lengths)), (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
@settings(EXHAUSTIVE, max_examples=150)
@given(law=strategies.grid_laws((2,), (1, 2), num_requests=2, max_points=1 << 12, with_confidence=True))
def test_two_requests_under_a_scheduler_emit_the_product_of_their_laws(backend, scheduler, law):
    make = SCHEDULERS[scheduler]
    check_law(law, stages_on(backend, cell=2, scheduler=lambda: make(law.block_size)), (0, 1))


@settings(max_examples=25)
@given(law=strategies.grid_laws((2, 3), (1, 2), rounds=2, max_points=1 << 13))
def test_two_rounds_emit_the_targets_law(backend, law):
    check_law(law, stages_on(backend, cell=2), rounds=2)


@settings(max_examples=10)
@given(law=strategies.grid_laws((2,), (1,), num_requests=2, rounds=2, max_points=1 << 16, with_confidence=True))
def test_two_requests_and_two_rounds_under_the_delayed_scheduler(backend, law):
    make = SCHEDULERS["delayed"]
    check_law(law, stages_on(backend, cell=2, scheduler=lambda: make(1)), (0, 1), rounds=2)


@pytest.mark.parametrize("delay", [1, 2])
@settings(max_examples=5)
@given(law=strategies.grid_laws((2,), (2,), max_points=1 << 10, with_confidence=True))
def test_three_rounds_under_the_delayed_scheduler_are_exact(backend, delay, law):
    """Long enough for a plan to be made from what was really seen."""
    stages = stages_on(backend, cell=2, scheduler=lambda: dsspark.DelayedScheduler(STAIRS, 2, delay))
    assert_exact(composed_law(law, stages, rounds=3), law)


@given(row=strategies.grid_rows(3), draft=strategies.grid_rows(2))
def test_a_reduced_draft_vocabulary_never_truncates_p(backend, row, draft):
    law = GridLaw.independent(row, draft, draft_to_target=(0, 2))
    check_law(law, stages_on(backend, cell=2))

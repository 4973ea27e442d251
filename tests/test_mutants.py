"""Every planted fault is killed by the check it names, under five seeds; the library without a fault passes every check."""

from __future__ import annotations

import pytest

from dsspark.testing.checks import CHECKS, Library
from dsspark.testing.mutants import MUTANTS, Mutant, healthy_complaints, kill_all

SEEDS = range(5)

# Faults that engines have shipped, by the names used here.
LISTED = {
    "residual from p",
    "residual subtracts q only at the drafted token",
    "softmax q for an argmax draft",
    "q at the wrong temperature",
    "top-k on the draw but not in q",
    "u <= p / q",
    "u fixed at 0",
    "accept noise = draft noise",
    "residual noise = draft noise",
    "noise keyed by position",
    "one stream for all requests",
    "epsilon-clamped q",
    "residual threshold at 1e-8",
    "empty residual gives the last token",
    "target truncated to the draft vocabulary",
    "bonus from the wrong row",
    "-1 accepted",
    "global search over current confidences",
    "tie admitted out of order",
    "threshold admission overshoots",
    "admission by the token's own probability",
    "budget searched over the current block",
    "two requests admit each other",
    "per-position calibration",
    "RNN state late by one",
    "confidence from x_k",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_killed_under_every_seed(mutant):
    assert [seed for seed in SEEDS if mutant.complaint(seed) is None] == []


def test_the_library_passes_every_check():
    assert healthy_complaints(SEEDS) == []


def test_every_listed_fault_is_planted_once_and_described():
    names = [mutant.name for mutant in MUTANTS]
    assert set(names) >= LISTED
    assert len(set(names)) == len(names) >= 24
    assert all(mutant.fault for mutant in MUTANTS)


def test_every_kind_of_check_kills_something():
    used = {name for mutant in MUTANTS for name in mutant.checks}
    assert used == set(CHECKS)


def test_a_mutant_changes_only_its_own_part():
    for mutant in MUTANTS:
        changed = [name for name, part in vars(mutant.library).items() if part is not vars(Library())[name]]
        assert set(changed) - {"from_seeds"} <= set(mutant.parts)  # a class method is another object at every look


def test_a_harmless_change_survives():
    """The kit can tell: a mutant that does nothing is not reported as killed."""
    harmless = Mutant(name="nothing", fault="none", check="law, boundary draw", parts={"verify": Library().verify})
    (killing,) = kill_all(range(2), [harmless])
    assert not killing.killed
    assert killing.complaint == "nothing"


def test_no_seed_is_refused():
    with pytest.raises(ValueError, match="seeds"):
        kill_all([])

"""Planted faults around the kernels: every mutant that is a changed input or a swapped stage is killed there too.

The rest of the library runs on the Triton kernels, in the interpreter without a GPU: one seed and the smallest laws.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import dsspark
from dsspark.testing.checks import CHECKS, Library
from dsspark.testing.mutants import MUTANTS, calibration, drafting, scheduling, verification

pytestmark = pytest.mark.exhaustive

SEED = 0
KERNELS = (
    "draft_block",
    "verify",
    "admit",
    "plan_budget",
    "schedule",
    "fit_sts",
    "survival",
    "expected_calibration_error",
)

INSIDE_THE_REFERENCE = {
    "residual from p": "rewrites the reference's residual",
    "residual subtracts q only at the drafted token": "rewrites how the reference reads q",
    "u <= p / q": "rewrites the reference's acceptance test",
    "epsilon-clamped q": "rewrites the reference's acceptance test",
    "residual threshold at 1e-8": "rewrites the reference's residual",
    "empty residual gives the last token": "rewrites the reference's residual",
    "a draw of 0 picks a token of no mass": "rewrites the reference's inverse CDF",
    "masked lanes of the last tile win": "rewrites the reference's inverse CDF",
    "top-k on the draw but not in q": "rewrites the softmax that the reference draws from, between correction and draw",
    "RNN state late by one": "rewrites the recurrence inside the reference's loop",
}
"""What would take another kernel source, and why."""

EXPRESSIBLE = [mutant for mutant in MUTANTS if mutant.name not in INSIDE_THE_REFERENCE]


@pytest.fixture
def kernels(monkeypatch) -> Library:
    """Return the library on the kernels, and let the mutants call them where they call the library."""
    on_kernels = {name: partial(getattr(dsspark, name), backend="triton") for name in KERNELS}
    monkeypatch.setattr(verification, "verify", on_kernels["verify"])
    monkeypatch.setattr(drafting, "draft_block", on_kernels["draft_block"])
    monkeypatch.setattr(scheduling, "dsspark", SimpleNamespace(**on_kernels))
    monkeypatch.setattr(calibration, "dsspark", SimpleNamespace(**on_kernels))
    return Library.on("triton", dtype=torch.float32, brief=True)


@pytest.mark.parametrize("mutant", EXPRESSIBLE, ids=lambda mutant: mutant.name)
def test_killed_with_the_kernels_around_it(kernels, mutant):
    assert mutant.complaint(SEED, kernels) is not None


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "RNG account"])
def test_the_kernels_pass_the_very_check(kernels, check):
    """Noise has no kernel of its own here; its check is the same for both bodies (tests/test_mutants.py)."""
    assert CHECKS[check](kernels, SEED) is None


def test_the_smallest_laws_still_pass_and_kill_on_the_reference():
    """What the kernels are held to is itself able to tell: the same checks on the reference."""
    base = Library(brief=True)
    assert [name for name, check in CHECKS.items() if check(base, SEED) is not None] == []
    assert [mutant.name for mutant in EXPRESSIBLE if mutant.complaint(SEED, base) is None] == []


def test_every_mutant_left_out_exists_and_every_kind_of_check_is_covered():
    assert {mutant.name for mutant in MUTANTS} >= set(INSIDE_THE_REFERENCE)
    assert {name for mutant in EXPRESSIBLE for name in mutant.checks} == set(CHECKS)

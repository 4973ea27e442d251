"""Wrong variants of every stage, each with the check that kills it: the test of the kit itself.

Every kind of fault that engines have shipped and that can be written down in a few lines. A mutant is a changed input or a swapped
stage of this library's own reference; `Library()` without a mutant passes every check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsspark.testing.checks import CHECKS, Library
from dsspark.testing.mutants.calibration import CALIBRATION_MUTANTS
from dsspark.testing.mutants.drafting import DRAFTING_MUTANTS
from dsspark.testing.mutants.mutant import Mutant
from dsspark.testing.mutants.noise import NOISE_MUTANTS
from dsspark.testing.mutants.scheduling import SCHEDULING_MUTANTS
from dsspark.testing.mutants.verification import VERIFICATION_MUTANTS

__all__ = ["MUTANTS", "Killing", "Mutant", "healthy_complaints", "kill_all"]

MUTANTS: tuple[Mutant, ...] = (
    *VERIFICATION_MUTANTS,
    *DRAFTING_MUTANTS,
    *NOISE_MUTANTS,
    *SCHEDULING_MUTANTS,
    *CALIBRATION_MUTANTS,
)


@dataclass(frozen=True, kw_only=True)
class Killing:
    """What became of a mutant.

    Attributes:
        mutant: which.
        killed: whether its check saw it under every seed.
        complaint: what the check said under the first seed.
    """

    mutant: Mutant
    killed: bool
    complaint: str


def kill_all(seeds: Sequence[int] = range(5), mutants: Sequence[Mutant] = MUTANTS) -> list[Killing]:
    """Run every mutant through its check, under every seed.

    Raises:
        ValueError: for no seeds.
    """
    if not seeds:
        raise ValueError("seeds: got none, expected at least one; a kill has to repeat")
    result = []
    for mutant in mutants:
        complaints = [mutant.complaint(seed) for seed in seeds]
        killed = all(complaint is not None for complaint in complaints)
        result.append(Killing(mutant=mutant, killed=killed, complaint=complaints[0] or "nothing"))
    return result


def healthy_complaints(seeds: Sequence[int] = range(5)) -> list[str]:
    """Return what the checks say of the library without a mutant; it must be nothing."""
    complaints = ((name, check(Library(), seed)) for name, check in CHECKS.items() for seed in seeds)
    return [f"{name}: {complaint}" for name, complaint in complaints if complaint is not None]

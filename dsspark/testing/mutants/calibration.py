"""Faults of calibration: per-position fits, forgotten bins. They change no law, so they need a check of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dsspark
from dsspark.testing.mutants.mutant import Mutant
from dsspark.types import STSFit


def fit_per_position(confidence_logits: Tensor, accepted: Tensor, **kwargs: Any) -> STSFit:
    """Fit every position on its own conditional acceptance."""
    fits = []
    for k in range(accepted.shape[1]):
        reached = accepted[:, k - 1] == 1 if k else torch.ones(len(accepted), dtype=torch.bool)
        fits.append(dsspark.fit_sts(confidence_logits[reached, k : k + 1], accepted[reached, k : k + 1], **kwargs))
    names = ("temperatures", "ece_before", "ece_after")
    return STSFit(**{name: torch.cat([getattr(fit, name) for fit in fits]) for name in names})


def fit_prefix_uncalibrated(confidence_logits: Tensor, accepted: Tensor, **kwargs: Any) -> STSFit:
    """Fit every position behind an uncalibrated prefix: the predecessors' temperatures are not held."""
    temperatures = []
    for k in range(accepted.shape[1]):
        fits = [(float(_ece_at(confidence_logits, accepted, k, t, kwargs["num_bins"])), t) for t in kwargs["grid"]]
        temperatures.append(min(fits)[1])
    fit = dsspark.fit_sts(confidence_logits, accepted, **kwargs)
    return STSFit(temperatures=torch.tensor(temperatures), ece_before=fit.ece_before, ece_after=fit.ece_after)


def _ece_at(logits: Tensor, accepted: Tensor, k: int, temperature: float, num_bins: int) -> Tensor:
    scale = torch.ones(k + 1)
    scale[k] = temperature
    survival = dsspark.survival(logits[:, : k + 1], scale)[:, k]
    return dsspark.expected_calibration_error(survival, accepted[:, k], num_bins=num_bins)


def ece_without_certainty(probabilities: Tensor, outcomes: Tensor, **kwargs: Any) -> Tensor:
    """Leave probabilities of exactly 0 or 1 outside of every bin."""
    inside = (probabilities > 0) & (probabilities < 1)
    if not bool(inside.any()):
        return torch.zeros(())
    return dsspark.expected_calibration_error(probabilities[inside], outcomes[inside], **kwargs)


def ece_without_the_last_bin(probabilities: Tensor, outcomes: Tensor, *, num_bins: int = 20) -> Tensor:
    """Stop one bin early."""
    inside = probabilities < (num_bins - 1) / num_bins
    return (
        dsspark.expected_calibration_error(probabilities[inside], outcomes[inside], num_bins=num_bins)
        * inside.float().mean()
    )


CALIBRATION_MUTANTS = (
    Mutant(
        name="per-position calibration",
        fault="each confidence is calibrated on its own, not the survival of the prefix",
        check="calibration",
        parts={"fit_sts": fit_per_position},
    ),
    Mutant(
        name="predecessors not held",
        fault="each position is fitted behind an uncalibrated prefix",
        check="calibration",
        parts={"fit_sts": fit_prefix_uncalibrated},
    ),
    Mutant(
        name="certain confidences fall outside of every bin",
        fault="half-open bins lose probabilities of exactly 0 and 1",
        check="calibration",
        parts={"expected_calibration_error": ece_without_certainty},
    ),
    Mutant(
        name="last bin skipped",
        fault="an off-by-one in the bin loop hides the most confident predictions",
        check="calibration",
        parts={"expected_calibration_error": ece_without_the_last_bin},
    ),
)

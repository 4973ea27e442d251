"""A statistical check for what cannot be enumerated, such as a real language model: used beside an exact check, never instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_THIN = 10.0
"""Expected counts below this are pooled: below it the chi-square approximation of the tail is poor."""


@dataclass(frozen=True, kw_only=True)
class GTest:
    """A G-test of counts against a law.

    Attributes:
        statistic: G = 2 sum O log(O / E); infinite if an outcome of probability 0 occurred.
        degrees: bins after pooling, minus one.
        p_value: chance of a statistic this large under the law.
        false_alarm: the rate that was asked for.
        passed: p_value >= false_alarm.
    """

    statistic: float
    degrees: int
    p_value: float
    false_alarm: float

    @property
    def passed(self) -> bool:
        """Whether the counts are compatible with the law."""
        return self.p_value >= self.false_alarm


def g_test(counts: Tensor | Sequence[int], law: Tensor | Sequence[float], *, false_alarm: float = 1e-6) -> GTest:
    r"""Test counts against a law: $G = 2 \sum_i O_i \ln(O_i / E_i)$, $E_i = n p_i$.

    Args:
        counts: [K] non-negative integers.
        law: [K] probabilities; they are compared as they are, never rescaled to the outcomes that occurred.
        false_alarm: how often a lossless sampler may fail, in (0, 1).

    Raises:
        ValueError: for shapes that differ, no counts, a law that does not sum to one, or a rate out of range.

    Numerics: float64. Bins with an expected count below 10 are pooled into one (with the next thinnest if it stays below).
    """
    observed = torch.as_tensor(counts, dtype=torch.float64).flatten()
    p = torch.as_tensor(law, dtype=torch.float64).flatten()
    if observed.shape != p.shape:
        raise ValueError(
            f"counts: got {len(observed)} outcomes, expected {len(p)} as in the law; count every outcome, zeros too"
        )
    total = float(observed.sum())
    if not bool((observed >= 0).all()) or total <= 0:
        raise ValueError("counts: got negative numbers or none at all, expected counts of at least one sample")
    if not bool((p >= 0).all()) or abs(float(p.sum()) - 1) > 1e-6:
        raise ValueError(
            f"law: got a sum of {float(p.sum())}, expected probabilities that sum to one over all outcomes"
        )
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm: got {false_alarm}, expected a rate in (0, 1)")
    if bool((observed[p == 0] > 0).any()):
        return GTest(statistic=float("inf"), degrees=len(p) - 1, p_value=0.0, false_alarm=false_alarm)

    expected, order = (total * p[p > 0]).sort()
    observed = observed[p > 0][order]
    thin = int((expected < _THIN).sum())
    while 0 < thin < len(expected) and float(expected[:thin].sum()) < _THIN:
        thin += 1
    if thin > 1:
        expected = torch.cat((expected[:thin].sum()[None], expected[thin:]))
        observed = torch.cat((observed[:thin].sum()[None], observed[thin:]))
    degrees = len(expected) - 1
    statistic = 2 * float(torch.xlogy(observed, observed / expected).sum())
    if degrees == 0:
        return GTest(statistic=0.0, degrees=0, p_value=1.0, false_alarm=false_alarm)
    half = torch.tensor([degrees / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    return GTest(statistic=statistic, degrees=degrees, p_value=p_value, false_alarm=false_alarm)

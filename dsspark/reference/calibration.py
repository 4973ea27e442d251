r"""Calibration: Sequential Temperature Scaling, and the figures that judge it (paper 3.2.1).

$$\mathrm{ECE} = \frac{1}{S} \sum_b \Big| \sum_{s : b(p_s) = b} (p_s - y_s) \Big|, \quad
b(p) = \min(\lfloor p n \rfloor, n - 1)$$

over n equal-width bins. It is what is usually written as the bin shares times the distance between mean
confidence and mean outcome: the counts cancel, so one sum a bin is all that a search needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsspark.contracts import (
    as_grid,
    check_bins,
    check_outcome_arguments,
    check_outcome_values,
    check_probability_values,
    check_sts_arguments,
    check_sts_values,
)
from dsspark.contracts import (
    default_grid as default_grid,
)
from dsspark.numerics import compute_dtype
from dsspark.reference.confidence import survival
from dsspark.types import STSFit

_CHUNK_CELLS = 1 << 17
"""Grid temperatures times samples evaluated at once: small enough for a processor cache."""


def fit_sts(
    confidence_logits: Tensor,
    accepted: Tensor,
    *,
    num_bins: int = 20,
    grid: Tensor | Sequence[float] | None = None,
) -> STSFit:
    r"""Fit Sequential Temperature Scaling (paper 3.2.1).

    For k = 1..gamma, left to right, with $T_1..T_{k-1}$ held:

    $T_k = \arg\min_T \mathrm{ECE}\big(a_{k-1} \sigma(z_k / T), [\text{drafts } 1..k \text{ all accepted}]\big)$

    Args:
        confidence_logits: z, [S, gamma] float, from rounds verified at full length.
        accepted: [S, gamma] bool, integer or float 0/1: [s, k] tells whether drafts 1..k were *all* accepted; it
            never rises along a row.
        num_bins: n, 1 or more.
        grid: the temperatures to try, positive, as a tensor or a sequence; `default_grid()` if None. On a tie the
            first wins.

    Returns:
        An `STSFit`. With 1 in the grid, no position is worse than at T_k = 1 with its predecessors held; against
        `ece_before`, where the predecessors are uncalibrated too, one may be.

    Raises:
        ValueError: for shapes or devices that do not belong together, no samples, a NaN logit, outcomes that are not
            0/1 or that rise along a row, a bad grid or num_bins.
        TypeError: for dtypes that are not listed.

    Numerics: a_k, and in the search its difference from the outcome, by the float32 arithmetic of `survival` (float64 for
        float64 logits); sums in float64. Deterministic on the CPU.
    Cost: one pass over the samples a position for the whole grid; four temporaries of 2**18 entries. Synchronises: it is
        no hot path.
    Source: paper 3.2.1.

    Example:
        >>> import torch
        >>> accepted = torch.tensor([[1], [1], [1], [0]])
        >>> fit = fit_sts(torch.full((4, 1), 2.1972246), accepted, grid=[1.0, 2.0, 4.0])  # sigmoid(2.197 / 2) = 0.75
        >>> fit.temperatures.tolist(), round(fit.ece_before.item(), 4), round(fit.ece_after.item(), 4)
        ([2.0], 0.15, 0.0)
    """
    check_sts_arguments(confidence_logits, accepted, num_bins)
    check_sts_values(confidence_logits, accepted)
    temperatures = as_grid(grid, confidence_logits.device, read=True)
    logits = confidence_logits.detach().to(compute_dtype(confidence_logits))
    outcomes = accepted.detach().t().to(torch.float64).contiguous()
    prefix = torch.ones_like(logits[:, 0])
    fitted = []
    for logits_k, outcomes_k in zip(logits.t().contiguous(), outcomes, strict=True):
        sums = _grid_bin_sums(prefix, logits_k, outcomes_k.to(logits.dtype), temperatures, num_bins)
        fitted.append(temperatures[sums.abs().sum(dim=1).argmin()])
        prefix = prefix * torch.sigmoid(logits_k / fitted[-1].to(logits.dtype))
    chosen = torch.stack(fitted)

    def errors(probabilities: Tensor) -> Tensor:
        pairs = zip(probabilities.t().contiguous(), outcomes, strict=True)
        return torch.stack([_calibration_error(p, y, num_bins) for p, y in pairs])

    return STSFit(
        temperatures=chosen,
        ece_before=errors(survival(logits)),
        ece_after=errors(survival(logits, chosen)),
    )


def _grid_bin_sums(prefix: Tensor, logits: Tensor, outcomes: Tensor, temperatures: Tensor, num_bins: int) -> Tensor:
    """Return the bins' sums of (probability - outcome) at one position for each temperature, [G, num_bins] float64."""
    num_samples, grid_size = logits.shape[0], temperatures.shape[0]
    sums = torch.zeros(grid_size, num_bins + 1, dtype=torch.float64, device=logits.device)
    scale = temperatures.to(logits.dtype)[:, None]
    step = min(num_samples, max(1, _CHUNK_CELLS // grid_size))
    # Allocated once: fresh memory for every chunk would cost a third of the time.
    room = [
        logits.new_empty(grid_size, step, dtype=kind) for kind in (logits.dtype, sums.dtype, torch.int32, torch.int64)
    ]
    for start in range(0, num_samples, step):
        part = slice(start, min(start + step, num_samples))
        probability, difference, small, bins = (buffer[:, : part.stop - start] for buffer in room)
        torch.div(logits[part], scale, out=probability).sigmoid_().mul_(prefix[part])
        torch.sub(probability, outcomes[part], out=difference)
        bins.copy_(small.copy_(probability.mul_(num_bins)))  # by way of int32, which is faster; towards zero
        sums.scatter_add_(1, bins, difference)
    sums[:, num_bins - 1] += sums[:, num_bins]  # a probability of exactly 1 belongs to the last bin
    return sums[:, :num_bins]


def expected_calibration_error(probabilities: Tensor, outcomes: Tensor, *, num_bins: int = 20) -> Tensor:
    r"""Return the expected calibration error over equal-width bins (paper 3.2.1).

    $\frac{1}{S} \sum_b |\sum_{s \in b} (p_s - y_s)|$

    Args:
        probabilities: p in [0, 1], any shape, float.
        outcomes: y, the same shape, bool, integer or float 0/1.
        num_bins: n, 1 or more; the bin of p is min(floor(p n), n - 1), so exactly 0 and exactly 1 count.

    Returns:
        A float32 scalar tensor.

    Raises:
        ValueError: for shapes or devices that differ, no samples, a probability outside [0, 1] or NaN, outcomes that
            are not 0/1.
        TypeError: for dtypes that are not listed.

    Numerics: p n in the dtype of p (float32 at least), sums in float64. Cost: one pass; synchronises for the checks.
    Source: Naeini et al. 2015; paper 3.2.1.

    Example:
        >>> import torch
        >>> expected_calibration_error(torch.tensor([0.0, 1.0, 1.0, 0.5]), torch.tensor([0, 1, 1, 1])).item()
        0.125
    """
    check_bins(num_bins)
    return _calibration_error(*_as_pairs(probabilities, outcomes), num_bins)


def _calibration_error(p: Tensor, y: Tensor, num_bins: int) -> Tensor:
    sums = _bin_sums(_bin_index(p, num_bins), p.to(torch.float64) - y, num_bins)
    return (sums.abs().sum() / p.shape[0]).to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class ReliabilityTable:
    """A reliability diagram in numbers (paper Fig. 6): one entry a bin of [0, 1], equal widths, left to right.

    Attributes:
        count: [num_bins] int64, samples in the bin.
        mean_probability: [num_bins] float32; NaN in an empty bin.
        mean_outcome: [num_bins] float32; NaN in an empty bin.
    """

    count: Tensor
    mean_probability: Tensor
    mean_outcome: Tensor


def reliability_table(probabilities: Tensor, outcomes: Tensor, *, num_bins: int = 20) -> ReliabilityTable:
    """Return the counts and means of every bin: what a reliability diagram draws (paper Fig. 6).

    The mean distance of mean_probability and mean_outcome, weighted by count, is the expected calibration error.

    Args:
        probabilities, outcomes, num_bins: as `expected_calibration_error`.

    Returns:
        A `ReliabilityTable`, its fields [num_bins].

    Raises:
        ValueError, TypeError: as `expected_calibration_error`.

    Numerics: sums in float64.
    Source: paper Fig. 6.

    Example:
        >>> import torch
        >>> table = reliability_table(torch.tensor([0.25, 0.25, 1.0]), torch.tensor([0, 1, 1]), num_bins=2)
        >>> table.count.tolist(), table.mean_probability.tolist(), table.mean_outcome.tolist()
        ([2, 1], [0.25, 1.0], [0.5, 1.0])
    """
    check_bins(num_bins)
    p, y = _as_pairs(probabilities, outcomes)
    index = _bin_index(p, num_bins)
    count = _bin_sums(index, torch.ones_like(y), num_bins)
    return ReliabilityTable(
        count=count.to(torch.int64),
        mean_probability=(_bin_sums(index, p.to(torch.float64), num_bins) / count).to(torch.float32),
        mean_outcome=(_bin_sums(index, y, num_bins) / count).to(torch.float32),
    )


def brier_score(probabilities: Tensor, outcomes: Tensor) -> Tensor:
    r"""Return the mean squared error of the probabilities, $\frac{1}{S} \sum_s (p_s - y_s)^2$, a float32 scalar tensor.

    Args:
        probabilities, outcomes: as `expected_calibration_error`.

    Raises:
        ValueError, TypeError: as `expected_calibration_error`.

    Numerics: float64 inside.
    Source: Brier 1950.

    Example:
        >>> import torch
        >>> brier_score(torch.tensor([0.5, 1.0]), torch.tensor([1, 1])).item()
        0.125
    """
    p, y = _as_pairs(probabilities, outcomes)
    return (p.to(torch.float64) - y).square().mean().to(torch.float32)


def auroc(scores: Tensor, outcomes: Tensor) -> Tensor:
    r"""Return the area under the ROC curve: the chance that a random 1 scores above a random 0, ties counting half.

    $(\sum_{s : y_s = 1} \mathrm{rank}_s - n_1 (n_1 + 1) / 2) / (n_1 n_0)$, tied scores sharing their mean rank.

    Args:
        scores: any shape, float: probabilities or logits, for only their order counts.
        outcomes: y, the same shape, bool, integer or float 0/1.

    Returns:
        A float32 scalar tensor; NaN where all outcomes are equal and nothing can be ranked.

    Raises:
        ValueError: for shapes or devices that differ, no samples, a NaN score, outcomes that are not 0/1.
        TypeError: for dtypes that are not listed.

    Numerics: ranks are half-integers, exact in float64.
    Cost: one sort.
    Source: Mann and Whitney 1947; paper 4.

    Example:
        >>> import torch
        >>> auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
        0.875
    """
    x, y = _as_samples("scores", scores, outcomes)
    if bool(x.isnan().any()):
        raise ValueError("scores: got NaN, expected numbers that can be ordered; drop the rows without a score")
    x = x.contiguous()  # searchsorted warns of strided input
    ordered = x.sort().values
    below, not_above = torch.searchsorted(ordered, x), torch.searchsorted(ordered, x, right=True)
    mean_rank = (below + not_above + 1).to(torch.float64) / 2
    positives = y.sum()
    wins = (mean_rank * y).sum() - positives * (positives + 1) / 2
    return (wins / (positives * (x.shape[0] - positives))).to(torch.float32)


def _bin_index(probabilities: Tensor, num_bins: int) -> Tensor:
    # float32 to int32 to int64 is twice as fast as the direct conversion.
    return (probabilities * num_bins).to(torch.int32).clamp_(max=num_bins - 1).to(torch.int64)


def _bin_sums(index: Tensor, values: Tensor, num_bins: int) -> Tensor:
    """Return the sum of `values` (float64) in each bin, [num_bins]."""
    return torch.zeros(num_bins, dtype=torch.float64, device=index.device).scatter_add_(0, index, values)


def _as_samples(name: str, values: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
    """Return both flattened, the outcomes in float64, or raise."""
    check_outcome_arguments(name, values, outcomes)
    check_outcome_values(outcomes)
    values = values.detach().flatten()
    return values.to(compute_dtype(values)), outcomes.detach().flatten().to(torch.float64)


def _as_pairs(probabilities: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
    p, y = _as_samples("probabilities", probabilities, outcomes)
    check_probability_values(p)
    return p, y

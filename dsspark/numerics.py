"""The law of a row of logits, computed once and the same way everywhere.

A row x at temperature T stands for the law w / sum(w) with w_i = exp((x_i - max x) / T). The maximum is subtracted *before* the
division, so neither a large common offset nor a small temperature costs precision or overflows. Drafting, the acceptance test and
the residual all read this one w and this one sum: the q of the ratio is the q that was sampled (paper eq. 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

CELL = 256
"""Tokens in a cell of the two-level inverse CDF. Independent of any launch configuration."""

_CACHE_ENTRIES = 1 << 21
"""Weights that are computed at once on a CPU: few enough for a processor's last cache, enough that an operation is worth its start."""


def rows_at_once(logits: Tensor) -> int:
    """Return how many rows of `logits` [..., V] to take at once: as many as a processor's cache holds, on a GPU all of them."""
    if logits.device.type == "cpu":
        return max(1, _CACHE_ENTRIES // max(1, logits.shape[-1]))
    return max(1, logits.shape[0])


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype laws are computed in: float32, or float64 for float64 logits (the tests' oracle)."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_weights(logits: Tensor, temperature: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the unnormalised law of each row, its maximum logit and its total weight.

    $w_i = e^{(x_i - m) / T}$, $m = \max_i x_i$, $s = \sum_i w_i$. A row that is no distribution (a NaN, +inf, or all -inf), and a
    temperature that is negative, infinite or NaN, give s = NaN.

    Args:
        logits: x, [N, V], any float dtype.
        temperature: T of each row, [N], float32 (float64 for float64 logits). 0 is the one-hot of the argmax, the lowest
            index on ties.
        overwrite: whether w may take the place of the logits, which saves a pass over memory; for callers who own them.

    Returns:
        w [N, V], m [N] and s [N], float32 (float64 for float64 logits). At T = 0, w is one-hot and s = 1.
    """
    x = logits.to(compute_dtype(logits))
    row_max = x.amax(dim=-1)
    valid = torch.isfinite(row_max)
    if bool((temperature == 1).all()):
        weights = (x.sub_(row_max[:, None]) if overwrite else x - row_max[:, None]).exp_()
        return weights, row_max, torch.where(valid, weights.sum(dim=-1), torch.nan)
    temperature = temperature.to(x.dtype)
    greedy = temperature == 0
    weights = (x - row_max[:, None]).div_(torch.where(greedy, 1.0, temperature)[:, None]).exp_()
    if bool(greedy.any()):
        one_hot = torch.zeros_like(weights).scatter_(1, x.argmax(dim=-1, keepdim=True), 1.0)
        weights = torch.where(greedy[:, None], one_hot, weights)
    valid = valid & torch.isfinite(temperature) & (temperature >= 0)
    return weights, row_max, torch.where(valid, weights.sum(dim=-1), torch.nan)

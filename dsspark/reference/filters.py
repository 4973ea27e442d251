"""Top-k, top-p and min-p on the target's law, and the law of a target row (temperature first, then top-k, top-p, min-p)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dsspark.numerics import row_weights
from dsspark.types import Filters


def target_weights(
    logits: Tensor, temperature: Tensor, filters: Filters | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    r"""Return the unnormalised law of target rows and its total: p = w / s.

    Args:
        logits: [N, V], any float dtype.
        temperature: T of each row, [N].
        filters: one entry a row ([N] tensors) or scalars; None keeps all.
        overwrite: whether w may take the place of the logits.

    Returns:
        w [N, V] and s [N], float32 (float64 for float64 logits); w is 0 where a filter removed the token. s is NaN for a row
        that is no distribution, and where a temperature or a filter's tensor entry is out of range.

    Source: paper 2.1 takes p as given; the order temperature, top-k, top-p, min-p is that of the public engines.
    """
    unfiltered = filters is None or all(getattr(filters, field.name) is None for field in fields(filters))
    weights, _, row_sum = row_weights(logits, temperature, overwrite=overwrite and unfiltered)
    if filters is None or unfiltered:
        return weights, row_sum
    weights, in_range = filter_weights(logits, weights, filters)
    return weights, torch.where(in_range & ~row_sum.isnan(), weights.sum(dim=-1), torch.nan)


def filter_weights(logits: Tensor, weights: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Set the weights of the tokens that a filter removes to 0.

    Args:
        logits: [N, V]: the order, (probability descending, id ascending), is read from them, for they are exact where
            probabilities are rounded.
        weights: [N, V], $e^{(x - m) / T}$: the largest is 1.
        filters: one entry a row ([N] tensors) or scalars.

    Returns:
        The filtered weights [N, V], and [N] bool: whether the row's entries are in range.

    Numerics: running masses in float64. Deterministic.
    Cost: one stable sort of each row.
    Source: top-k, Fan et al. 2018; top-p, Holtzman et al. 2020; min-p, Nguyen et al. 2024.
    """
    num_rows, vocab_size = weights.shape
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    sorted_weights = weights.gather(1, order).to(torch.float64)
    in_range = torch.ones(num_rows, dtype=torch.bool, device=weights.device)

    if filters.top_k is not None:
        top_k = as_column(filters.top_k, weights)
        in_range &= (top_k >= 0)[:, 0]
        rank = torch.arange(vocab_size, device=weights.device)
        sorted_weights = torch.where((top_k == 0) | (rank < top_k), sorted_weights, 0.0)
    if filters.top_p is not None:
        top_p = as_column(filters.top_p, weights)
        in_range &= ((top_p > 0) & (top_p <= 1))[:, 0]
        running = sorted_weights.cumsum(dim=-1)
        mass_before = running - sorted_weights
        sorted_weights = torch.where((top_p == 1) | (mass_before < top_p * running[:, -1:]), sorted_weights, 0.0)
    if filters.min_p is not None:
        min_p = as_column(filters.min_p, weights)
        in_range &= ((min_p >= 0) & (min_p <= 1))[:, 0]
        sorted_weights = torch.where(sorted_weights >= min_p, sorted_weights, 0.0)
    filtered = torch.zeros_like(weights).scatter_(1, order, sorted_weights.to(weights.dtype))
    return filtered, in_range


def as_column(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a filter's value for each row of `like`, [N, 1] float64.

    Args:
        value: a scalar, or a tensor that expands to [N].
        like: [N, V], for its rows and its device.

    Source: design choice of this library.
    """
    if not isinstance(value, Tensor):
        return torch.full((like.shape[0], 1), value, device=like.device, dtype=torch.float64)
    return value.to(torch.float64).expand(like.shape[0])[:, None]


def select_requests(filters: Filters | None, requests: Tensor) -> Filters | None:
    """Return the filters of some requests: [R] tensors indexed by `requests`, scalars as they are; None stays None.

    Args:
        filters: of all requests.
        requests: [M] int64, which of them.

    Source: design choice of this library.
    """
    if filters is None:
        return None

    def pick(value: Any) -> Any:
        return value[requests] if isinstance(value, Tensor) and value.dim() > 0 else value

    return Filters(top_k=pick(filters.top_k), top_p=pick(filters.top_p), min_p=pick(filters.min_p))

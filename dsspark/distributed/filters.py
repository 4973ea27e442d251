"""Top-k, top-p and min-p over a sharded vocabulary: the threshold is searched digit by digit on exchanged histograms.

The kept tokens of a row are those before a threshold in the order (logit descending, id ascending). A pass looks at eight bits of the
logits' order keys: each rank sums what its columns hold for each of the 256 values, the histograms are added over ranks, and the
digit in which the quota is used up is fixed. Two passes find the threshold of bfloat16 and float16 logits, four that of float32. The
amounts are integers (counts for top-k, fixed-point masses for top-p), so ranks agree and the number of ranks changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsspark.distributed.collectives import all_gather, all_reduce
from dsspark.distributed.exact import order_key, to_fixed
from dsspark.distributed.laws import Cut, TargetRows
from dsspark.distributed.partition import VocabularyShard
from dsspark.types import Filters

DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS


def apply_filters(rows: TargetRows, filters: Filters, shard: VocabularyShard) -> tuple[TargetRows, Tensor]:
    """Return the rows with their filters, and whether each row's entries are in range, [N] bool.

    Args:
        rows: the target's rows, unfiltered.
        filters: one entry a row ([N] tensors) or scalars, as `select_requests` gives.
        shard: of the target vocabulary.
    """
    in_range = torch.ones_like(rows.best, dtype=torch.bool)
    if filters.top_k is not None:
        top_k = _column(filters.top_k, rows)
        in_range &= top_k >= 0
        cut = find_cut(rows, top_k.to(torch.int64), top_k == 0, shard, of_mass=False)
        rows = replace(rows, cuts=[*rows.cuts, cut])
    if filters.top_p is not None:
        top_p = _column(filters.top_p, rows)
        in_range &= (top_p > 0) & (top_p <= 1)
        cut = find_cut(rows, top_p.nan_to_num(nan=1.0), top_p == 1, shard, of_mass=True)
        rows = replace(rows, cuts=[*rows.cuts, cut])
    if filters.min_p is not None:
        min_p = _column(filters.min_p, rows)
        in_range &= (min_p >= 0) & (min_p <= 1)
        rows = replace(rows, min_p=min_p)
    return rows, in_range


def find_cut(rows: TargetRows, amount: Tensor, everything: Tensor, shard: VocabularyShard, *, of_mass: bool) -> Cut:
    """Return the cut that keeps, in order, every token before which less than the quota has been used.

    Args:
        rows: the rows, with the cuts that come first.
        amount: the quota: tokens, [N] int64, or with `of_mass` a share of the row's remaining mass, [N] float64.
        everything: [N] bool, rows to leave alone.
        shard: of the target vocabulary.
        of_mass: whether a token takes its mass of the quota, or 1.

    Numerics: a token's mass is rounded to 2 ** -42 of the largest's.
    Cost: (bits of a logit) / 8 histograms of 256 int64 a row, and two int64 a row and rank for the ties.
    """
    bits = 32 if rows.logits.dtype == torch.float32 else 16
    quota = amount
    prefix = torch.zeros_like(rows.best)
    used = torch.zeros_like(rows.best)
    for shift in range(bits - DIGIT_BITS, -1, -DIGIT_BITS):
        local = _histogram(rows, prefix, shift, bits, of_mass=of_mass)
        histogram = all_reduce(local, shard, "sum", "verify: filter histograms")
        from_top = histogram.flip(1).cumsum(dim=1).flip(1)
        if shift == bits - DIGIT_BITS:
            if of_mass:
                quota = (amount * from_top[:, 0].to(torch.float64)).ceil().to(torch.int64)
            everything = everything | (from_top[:, 0] < quota)  # a quota that the row cannot use up cuts nothing
        digit = ((used[:, None] + from_top) >= quota[:, None]).sum(dim=1).clamp(min=1) - 1
        used = used + (from_top - histogram).gather(1, digit[:, None])[:, 0]
        prefix = (prefix << DIGIT_BITS) | digit
    key = prefix - (1 << (bits - 1))
    ties = _ties(rows, prefix, quota - used, bits, shard, of_mass=of_mass)
    return Cut(key=key, ties=ties, everything=everything)


def _histogram(rows: TargetRows, prefix: Tensor, shift: int, bits: int, *, of_mass: bool) -> Tensor:
    """Return what this rank's tokens with the digits found so far take of the quota, by their next digit, [N, 256] int64."""
    histogram = prefix.new_zeros(prefix.shape[0], BINS)
    for chunk in rows.chunks():
        keys, amounts = _amounts(rows, chunk, bits, of_mass=of_mass)
        active = (keys >> (shift + DIGIT_BITS)) == prefix[chunk, None]
        part = histogram.new_zeros(len(chunk), BINS)
        histogram[chunk] = part.scatter_add_(1, (keys >> shift) & (BINS - 1), amounts.masked_fill_(~active, 0))
    return histogram


def _amounts(rows: TargetRows, chunk: Tensor, bits: int, *, of_mass: bool) -> tuple[Tensor, Tensor]:
    """Return order keys shifted to be non-negative, and what each token takes of a quota: 1, or its mass."""
    weights = rows.weights(chunk)
    keys = order_key(rows.logits[chunk]) + (1 << (bits - 1))
    return keys, to_fixed(weights) if of_mass else torch.ones_like(keys)


def _ties(
    rows: TargetRows, key: Tensor, remaining: Tensor, bits: int, shard: VocabularyShard, *, of_mass: bool
) -> Tensor:
    """Return how many of this rank's tokens with the threshold's logit are kept: lowest ids first, so lower ranks first."""
    count = torch.zeros_like(key)
    unit = torch.zeros_like(key)
    for chunk in rows.chunks():
        keys, amounts = _amounts(rows, chunk, bits, of_mass=of_mass)
        at = keys == key[chunk, None]
        count[chunk] = at.sum(dim=1)
        unit[chunk] = torch.where(at, amounts, 0).amax(dim=1)  # equal logits have equal masses
    everyone = all_gather(torch.stack((count, unit), dim=1), shard, "verify: filter ties")
    unit = everyone[:, :, 1].amax(dim=0).clamp(min=1)
    kept = (remaining + unit - 1) // unit
    before = everyone[: shard.rank, :, 0].sum(dim=0)
    return (kept - before).clamp(min=0)


def _column(value: float | Tensor, rows: TargetRows) -> Tensor:
    """Return a filter's value for each row, [N] float64."""
    num_rows = rows.best.shape[0]
    if not isinstance(value, Tensor):
        return torch.full((num_rows,), value, dtype=torch.float64, device=rows.best.device)
    return value.to(torch.float64).expand(num_rows)

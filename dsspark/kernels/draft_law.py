r"""The draft's law q over a tile of the target's vocabulary: $q(v) = e^{(y_v - m) / T} / s$, 0 where the draft has no such token.

A drafter with a vocabulary of its own maps its ids to target ids, in order. A tile of target ids is then met by a range of draft
ids: `tile_draft_ids` finds where it starts and counts from there, reading of the map only that range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.elementwise import divide
from dsspark.kernels.sampling import chunk_of, weight

POINT = tl.constexpr(0)
STORED = tl.constexpr(1)
RECOMPUTED = tl.constexpr(2)
"""Where q comes from: one-hot at the drafted token; logits that were kept; the product that drew it."""

_PROBES = tl.constexpr(32)


@triton.jit
def _lower_bound(map_ptr, target, size, stride_map):
    """Return the index of the first draft id that maps to `target`, a scalar, or beyond."""
    # 32 probes at a time: three or four loads that wait for one another instead of seventeen.
    probes = tl.arange(0, _PROBES).to(tl.int64)
    low = target.to(tl.int64) * 0
    high = low + size
    while high > low:
        step = (high - low + _PROBES - 1) // _PROBES
        index = low + probes * step
        mask = index < high
        below = mask & (tl.load(map_ptr + index * stride_map, mask=mask, other=0) < target)
        count = tl.sum(below.to(tl.int64), axis=0)
        high = tl.minimum(high, low + count * step)
        low = tl.where(count > 0, low + (count - 1) * step + 1, low)
    return low


@triton.jit
def tile_draft_ids(
    map_ptr,
    tile,
    draft_vocab,
    stride_map,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    PER: tl.constexpr,
):
    """Return the draft id of each token of a tile, [PER * LANES] int64, and which tokens the draft has."""
    PARTS: tl.constexpr = (CELL + CHUNK - 1) // CHUNK
    SIZE: tl.constexpr = PER * LANES
    first_chunk = tile * PER
    first = (first_chunk // PARTS) * CELL + (first_chunk % PARTS) * CHUNK
    start = _lower_bound(map_ptr, first, draft_vocab, stride_map)
    index = start + tl.arange(0, SIZE)
    target = tl.load(map_ptr + index * stride_map, mask=index < draft_vocab, other=-1)
    lane = (chunk_of(target, CELL, CHUNK) - first_chunk) * LANES + (target % CELL) % CHUNK
    mapped = (target >= first) & (lane < SIZE)
    # Mapped tokens are counted per lane, so that a running count gives each its place in the range; no id occurs twice.
    present = tl.histogram(tl.where(mapped, lane, 0).to(tl.int32), SIZE, mask=mapped)
    return start + tl.cumsum(present, axis=0) - present, present > 0


@triton.jit
def find_draft_ids(map_ptr, token, mask, draft_vocab, stride_map):
    """Return the draft ids of any tokens, int64, and which tokens the draft has: a binary search each."""
    low = token.to(tl.int64) * 0
    high = low + draft_vocab
    rounds = draft_vocab
    while rounds > 0:
        open_ = mask & (low < high)
        middle = (low + high) // 2
        below = tl.load(map_ptr + middle * stride_map, mask=open_, other=0) < token
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
        rounds = rounds // 2
    mask = mask & (low < draft_vocab)
    return low, mask & (tl.load(map_ptr + low * stride_map, mask=mask, other=-1) == token)


@triton.jit
def draft_probs(y, present, token, drafted, point, top, total, rate):
    """Return q of a tile of draft logits, which counts where `present`; what is one number a row is [ROWS, 1]."""
    w = weight(y, top, rate)
    q = tl.where(present, divide(w, tl.broadcast_to(total, w.shape)), 0.0)
    return tl.where(point & (token == drafted), 1.0, q)

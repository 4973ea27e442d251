"""What several kernels share: arithmetic rounded as in the references, and a tile size."""

from __future__ import annotations

import triton
import triton.language as tl

POSITIONS_TILES = (8, 32)
"""Tile sizes along the positions: a block of gamma drafts takes the first that holds it."""

# Below these, exp(-x) overflows and the sigmoid is 0, as in torch; the clamp only keeps the overflow itself from happening.
_LOWEST_FP32 = tl.constexpr(-88.72)
_LOWEST_FP64 = tl.constexpr(-709.78)


def positions_tile(block_size: int) -> int:
    """Return the tile size along the positions for blocks of gamma drafts."""
    return next(size for size in POSITIONS_TILES if block_size <= size)


@triton.jit
def divide(x, y):
    """Return x / y rounded to nearest; the plain operator of float32 is two ulps off on NVIDIA hardware."""
    if x.dtype == tl.float64:
        quotient = x / y
    else:
        quotient = tl.div_rn(x, y)
    return quotient


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of a float32 or float64 tile, in [0, 1]; NaN stays NaN."""
    if x.dtype == tl.float64:
        lowest = _LOWEST_FP64
    else:
        lowest = _LOWEST_FP32
    # A comparison, for tl.maximum would drop a NaN.
    vanishes = x < lowest
    denominator = 1.0 + tl.exp(-tl.where(vanishes, lowest, x))
    return tl.where(vanishes, 0.0, divide(tl.zeros_like(denominator) + 1.0, denominator))

r"""The logits of a draft position, recomputed wherever they are needed: $x = U_k + L W_2^\top$, a tile at a time.

One definition serves the draft's statistics, its pick and the rejected rows of the verification. An element depends on its row of L,
its row of W2 and the order of its sum alone, and the order is ascending rank whatever the tile: a row recomputed elsewhere is, bit for
bit, the row the draft drew from. Two conditions: at least `PRODUCT_ROWS` rows a tile (mask those there are not; below, another matrix
instruction would do), at most `MOST_PRODUCT_ROWS` (from 64 on, Hopper's and Blackwell's larger ones), and RANK and BLOCK_K from
`product_shape`.

Halves of one dtype go to the matrix units and accumulate in float32; every other pair is multiplied in IEEE float32, never tf32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PRODUCT_ROWS = 16
"""Rows of a product, at least."""

MOST_PRODUCT_ROWS = 32
"""Rows of a product, at most."""

STEP_FLOAT32 = 32
"""Factors of float32 that are multiplied at once."""

_WHOLE_RANK = 256
_STEP_HALF = 64


def product_shape(rank: int, latent_dtype: torch.dtype, w2_dtype: torch.dtype) -> dict[str, int]:
    """Return the constexprs of a product: RANK, the lanes of a vector, and BLOCK_K, how many of them are multiplied at once."""
    lanes = max(16, int(triton.next_power_of_2(rank)))
    if latent_dtype != w2_dtype or w2_dtype == torch.float32:
        step = min(lanes, STEP_FLOAT32)  # operands of a float32 product lie in registers
    else:
        step = lanes if lanes <= _WHOLE_RANK else _STEP_HALF
    return {"RANK": lanes, "BLOCK_K": step}


@triton.jit
def load_vectors(matrix_ptr, offs_row, mask_row, stride_e, rank, start, WIDTH: tl.constexpr):
    """Return entries start .. start + WIDTH of vectors of the rank, [ROWS, WIDTH], zeros beyond it.

    offs_row is int64 [ROWS], where each vector starts, in elements from matrix_ptr.
    """
    offs_e = start + tl.arange(0, WIDTH)
    return tl.load(
        matrix_ptr + offs_row[:, None] + offs_e[None, :].to(tl.int64) * stride_e,
        mask=mask_row[:, None] & (offs_e < rank)[None, :],
        other=0.0,
    )


@triton.jit
def add_product(total, left, right, INTERPRETED: tl.constexpr):
    """Return total + left right^T, float32 [ROWS, COLUMNS], of tiles [ROWS, WIDTH] and [COLUMNS, WIDTH]."""
    # The interpreter multiplies bfloat16 as raw bits.
    if INTERPRETED or left.dtype != right.dtype or right.dtype == tl.float32:
        total = tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), total, input_precision="ieee")
    else:
        total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit
def corrected_tile(
    base,  # [ROWS, BLOCK_V] float32: U, 0 where masked
    latent_ptr,
    offs_latent,  # [ROWS] int64: where the latent of each row starts
    mask_row,  # [ROWS]
    stride_le,
    w2_ptr,
    offs_w2,  # [BLOCK_V] int64: where the row of W2 of each token starts
    mask_v,  # [BLOCK_V]
    stride_we,
    rank,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return U + latent W2^T, float32 [ROWS, BLOCK_V], PRODUCT_ROWS <= ROWS <= MOST_PRODUCT_ROWS.

    A draft that kept its logits rounded them after this sum, in the dtype of U: read those instead.
    """
    total = tl.zeros_like(base)
    for start in range(0, RANK, BLOCK_K):
        latent = load_vectors(latent_ptr, offs_latent, mask_row, stride_le, rank, start, BLOCK_K)
        w2 = load_vectors(w2_ptr, offs_w2, mask_v, stride_we, rank, start, BLOCK_K)
        total = add_product(total, latent, w2, INTERPRETED)
    return base + total

r"""The vector that multiplies W2 at a position, for all requests in one launch (paper eq. 5-6).

With $e = W_1[x_{k-1}]$: vanilla, $e$; gated, $\sigma(W_g [h_k ; e] + b_g) \odot e$; rnn, $(g, c, o) = W [s_{k-1} ; e ; h_k] + b$,
$s_k = \sigma(g) s_{k-1} + (1 - \sigma(g)) \tanh c$ and $\tanh o$. Sums in float32: on the matrix units where both factors have one
half-precision dtype, in IEEE float32 otherwise. The result is rounded to W1's dtype.

Bytes moved: a program owns BLOCK_J entries of the result for BLOCK_R requests and reads their rows of the matrix once; h, e and s are
small. The state of an RNN head is read from one buffer and written to another, so that no program reads what its neighbours write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.drafting import embed
from dsspark.kernels.elementwise import divide, sigmoid
from dsspark.kernels.product import add_product, load_vectors
from dsspark.kernels.sampling import rounded

LATENT_VALUES = ("num_requests", "position", "block_size", "num_ids")
"""Integers whose value the compiler must not look at."""

LATENT_POINTERS = ("previous_ptr",)
"""Pointers whose alignment it must not look at: a column of the tokens is aligned or not by its position."""

_SERIES = tl.constexpr(0.25)


@triton.jit
def tanh(x):
    """Return tanh of a float32 tile; NaN stays NaN."""
    decay = tl.exp(-2.0 * tl.abs(x))
    far = divide(1.0 - decay, 1.0 + decay)
    square = x * x  # 1 - decay cancels near 0: the series up to x**9 there
    near = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    return tl.where(tl.abs(x) < _SERIES, x * near, tl.where(x < 0, -far, far))


@triton.jit
def _add_vectors(
    total, x_ptr, offs_x, mask_row, stride_x, matrix_ptr, offs_m, mask_j, stride_m, first, size,
    BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return total + x M^T, [BLOCK_R, BLOCK_J], with columns first .. first + size of M."""
    for start in range(0, size, BLOCK_K):
        x = load_vectors(x_ptr, offs_x, mask_row, stride_x, size, start, BLOCK_K)
        matrix = load_vectors(matrix_ptr, offs_m, mask_j, stride_m, first + size, first + start, BLOCK_K)
        total = add_product(total, x, matrix, INTERPRETED)
    return total


@triton.jit
def _project(
    which, state_ptr, hidden_ptr, w1_ptr, matrix_ptr, bias_ptr, token, offs_state, offs_hidden, mask_row, offs_j, mask_j,
    stride_hd, stride_ev, stride_ee, stride_mj, stride_mk, stride_bias, num_ids, hidden_size, rank,
    RNN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, STATE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return rows which * r + j of W [s ; e ; h] + b (rnn) or W [h ; e] + b (gated), float32 [BLOCK_R, BLOCK_J]."""
    offs_row = which * rank + offs_j
    offs_m = offs_row.to(tl.int64) * stride_mj
    if RNN:
        before_e = rank
        before_h = 2 * rank
    else:
        before_e = hidden_size
        before_h = 0
    total = tl.zeros((BLOCK_R, BLOCK_J), tl.float32)
    if state_ptr is not None:  # s_0 = 0
        total = _add_vectors(
            total, state_ptr, offs_state, mask_row, 1, matrix_ptr, offs_m, mask_j, stride_mk, 0, rank, STATE_K, INTERPRETED
        )  # fmt: skip
    for start in range(0, rank, BLOCK_K):
        e = embed(w1_ptr, token, mask_row, stride_ev, stride_ee, num_ids, rank, start, BLOCK_K)
        matrix = load_vectors(matrix_ptr, offs_m, mask_j, stride_mk, before_e + rank, before_e + start, BLOCK_K)
        total = add_product(total, e, matrix, INTERPRETED)
    total = _add_vectors(
        total, hidden_ptr, offs_hidden, mask_row, stride_hd,
        matrix_ptr, offs_m, mask_j, stride_mk, before_h, hidden_size, BLOCK_K, INTERPRETED,
    )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_row.to(tl.int64) * stride_bias, mask=mask_j, other=0.0)
        total += bias.to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=list(LATENT_VALUES), do_not_specialize_on_alignment=list(LATENT_POINTERS))
def latent_kernel(
    previous_ptr,  # [R], x_{k-1}: the anchors, or a column of the tokens
    w1_ptr,  # [V_target, r]
    hidden_ptr,  # [R, gamma, d], or None for a vanilla head
    matrix_ptr,  # [r, d + r], [3 r, 2 r + d], or None
    bias_ptr,  # [r], [3 r], or None
    state_ptr,  # s_{k-1}, [R, r] contiguous float32, or None where it is 0 or there is none
    next_state_ptr,  # s_k, [R, r] contiguous float32, or None: the head is no rnn
    latent_ptr,  # [R, gamma, r] contiguous
    stride_p,
    stride_ev,
    stride_ee,
    stride_hr,
    stride_hk,
    stride_hd,
    stride_mj,
    stride_mk,
    stride_bias,
    num_requests,
    position,
    block_size,
    num_ids,
    hidden_size,
    rank,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STATE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write BLOCK_J entries of the latent, and of the next state, of BLOCK_R requests at one position."""
    RNN: tl.constexpr = next_state_ptr is not None
    request = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_row = request < num_requests
    offs_j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    mask_j = offs_j < rank
    token = tl.load(previous_ptr + request * stride_p, mask=mask_row, other=0).to(tl.int64)
    e = embed(w1_ptr, token, mask_row, stride_ev, stride_ee, num_ids, rank, tl.program_id(1) * BLOCK_J, BLOCK_J)
    latent = e.to(tl.float32)
    offs_state = request * rank
    mask = mask_row[:, None] & mask_j[None, :]
    if matrix_ptr is not None:
        offs_hidden = request * stride_hr + position.to(tl.int64) * stride_hk
        for which in tl.static_range(3 if RNN else 1):
            projected = _project(
                which, state_ptr, hidden_ptr, w1_ptr, matrix_ptr, bias_ptr, token, offs_state, offs_hidden, mask_row, offs_j, mask_j,
                stride_hd, stride_ev, stride_ee, stride_mj, stride_mk, stride_bias, num_ids, hidden_size, rank,
                RNN, BLOCK_R, BLOCK_J, BLOCK_K, STATE_K, INTERPRETED,
            )  # fmt: skip
            if which == 0:
                gate = sigmoid(projected)
                latent *= gate
            elif which == 1:
                state = (1.0 - gate) * tanh(projected)
                offs_entry = offs_state[:, None] + offs_j[None, :]
                if state_ptr is not None:
                    state += gate * tl.load(state_ptr + offs_entry, mask=mask, other=0.0)
                tl.store(next_state_ptr + offs_entry, state, mask=mask)
            else:
                latent = tanh(projected)
    dtype = latent_ptr.dtype.element_ty
    offs_out = ((request * block_size + position) * rank)[:, None] + offs_j[None, :]
    tl.store(latent_ptr + offs_out, rounded(latent, dtype, INTERPRETED).to(dtype), mask=mask)

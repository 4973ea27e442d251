"""What the two halves of `verify` share: what the first tells the second about each request, and the results both write.

`accept_kernel` leaves eight integers and eight numbers a request: a plan, the row of the target and the row of the draft that it needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
BONUS = tl.constexpr(2)
"""The plan: the request has all its tokens; draw from the residual of its rejected row; draw from its bonus row."""


@triton.jit
def store_row(
    ids_ptr, numbers_ptr, request, mask_r, plan, row, last_id, temperature, top, total, threshold, min_weight
):
    """Tell `resample_kernel` and `pick_kernel` what to do, and the target's row to do it with; read by `load_target`."""
    ids, numbers = ids_ptr + request * 8, numbers_ptr + request * 8
    tl.store(ids, plan.to(tl.int64), mask=mask_r)
    tl.store(ids + 1, row, mask=mask_r)
    tl.store(ids + 4, last_id.to(tl.int64), mask=mask_r)
    tl.store(numbers, temperature, mask=mask_r)
    tl.store(numbers + 1, top, mask=mask_r)
    tl.store(numbers + 2, total, mask=mask_r)
    tl.store(numbers + 6, threshold, mask=mask_r)
    tl.store(numbers + 7, min_weight, mask=mask_r)


@triton.jit
def load_target(ids_ptr, numbers_ptr, request, mask):
    """Return of some requests the plan, the target's row, T, its maximum and total, and what `kept` needs of it, each [ROWS]."""
    ids, numbers = ids_ptr + request * 8, numbers_ptr + request * 8
    plan = tl.load(ids, mask=mask, other=NOTHING)
    mask = mask & (plan != NOTHING)
    row = tl.load(ids + 1, mask=mask, other=0)
    temperature = tl.load(numbers, mask=mask, other=1.0)
    top = tl.load(numbers + 1, mask=mask, other=0.0)
    total = tl.load(numbers + 2, mask=mask, other=1.0)
    last_id = tl.load(ids + 4, mask=mask, other=0)
    threshold = tl.load(numbers + 6, mask=mask, other=0.0)
    min_weight = tl.load(numbers + 7, mask=mask, other=0.0)
    return plan, row, temperature, top, total, threshold, last_id, min_weight


@triton.jit
def store_draft(ids_ptr, numbers_ptr, request, mask_r, position, token, temperature, top, total):
    """Tell them the draft's row; read by `load_draft`."""
    ids, numbers = ids_ptr + request * 8, numbers_ptr + request * 8
    tl.store(ids + 2, position, mask=mask_r)
    tl.store(ids + 3, token, mask=mask_r)
    tl.store(numbers + 3, temperature, mask=mask_r)
    tl.store(numbers + 4, top, mask=mask_r)
    tl.store(numbers + 5, total, mask=mask_r)


@triton.jit
def load_draft(ids_ptr, numbers_ptr, request, mask):
    """Return of some requests the position, the drafted token, T of the draft, its row's maximum and total, each [ROWS]."""
    ids, numbers = ids_ptr + request * 8, numbers_ptr + request * 8
    position = tl.load(ids + 2, mask=mask, other=0)
    drafted = tl.load(ids + 3, mask=mask, other=-1)
    temperature = tl.load(numbers + 3, mask=mask, other=1.0)
    top = tl.load(numbers + 4, mask=mask, other=0.0)
    return position, drafted, temperature, top, tl.load(numbers + 5, mask=mask, other=1.0)


@triton.jit
def store_results(
    num_accepted_ptr,
    num_emitted_ptr,
    valid_ptr,
    tokens_ptr,
    logprobs_ptr,
    request,
    mask_r,
    offs_k,
    block_size,
    count,
    valid,
    certain,
    token,
    p,
    best,
    BLOCK_R: tl.constexpr,
):
    """Write the accepted tokens and, where it is certain, the last one; every entry of the results is written."""
    tl.store(num_accepted_ptr + request, count.to(tl.int32), mask=mask_r)
    tl.store(num_emitted_ptr + request, tl.where(valid, count + 1, 0).to(tl.int32), mask=mask_r)
    tl.store(valid_ptr + request, valid, mask=mask_r)
    keep = valid[:, None] & (offs_k < count[:, None])
    final = certain[:, None] & (offs_k == count[:, None])
    out = request * (block_size + 1)
    mask = mask_r[:, None] & (offs_k < block_size)
    emitted = tl.where(keep, token, tl.where(final, best[:, None], -1))
    tl.store(tokens_ptr + out[:, None] + offs_k, emitted, mask=mask)
    tl.store(logprobs_ptr + out[:, None] + offs_k, tl.log(tl.where(keep, p, 1.0)), mask=mask)
    last = tl.where(certain & (count == block_size), best, -1)
    tl.store(tokens_ptr + out + block_size, last, mask=mask_r)
    tl.store(logprobs_ptr + out + block_size, tl.zeros((BLOCK_R,), tl.float32), mask=mask_r)


@triton.jit
def store_draw(
    num_accepted_ptr,
    num_emitted_ptr,
    valid_ptr,
    tokens_ptr,
    logprobs_ptr,
    request,
    position,
    needed,
    lawful,
    token,
    logprob,
    block_size,
    POSITIONS: tl.constexpr,
):
    """Write the drawn token of each lawful request after its accepted ones, and take the others back."""
    out = request * (block_size + 1)
    tl.store(tokens_ptr + out + position, token.to(tl.int64), mask=lawful)
    tl.store(logprobs_ptr + out + position, logprob, mask=lawful)
    broken = needed & (lawful == 0)
    nothing = tl.zeros_like(request).to(tl.int32)
    tl.store(num_accepted_ptr + request, nothing, mask=broken)
    tl.store(num_emitted_ptr + request, nothing, mask=broken)
    tl.store(valid_ptr + request, lawful, mask=broken)
    offs_k = tl.arange(0, POSITIONS)
    offs = out[:, None] + offs_k[None, :]
    mask = broken[:, None] & (offs_k < block_size)[None, :]  # the last place is empty already
    tl.store(tokens_ptr + offs, tl.full(offs.shape, -1, tl.int64), mask=mask)
    tl.store(logprobs_ptr + offs, tl.zeros(offs.shape, tl.float32), mask=mask)

r"""The first half of `verify`: statistics of the drafted target rows, and what the acceptance test makes of them (paper 2.1).

$x_k$ is accepted iff $u\, q(x_k) < p(x_k)$, or $p(x_k) \ge q(x_k) > 0$. `statistics_kernel` reads each row once and leaves eight bytes a
chunk, `rows_kernel` makes a row's maximum and total of them, `accept_kernel` reads one logit a draft and finds the first rejection.

Rows are found by `cu_seqlens` alone. A request without a length, or of a batch that has overflowed, has no rows: nothing of it is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.elementwise import divide
from dsspark.kernels.filters import kept
from dsspark.kernels.handover import BONUS, NOTHING, RESIDUAL, store_draft, store_results, store_row
from dsspark.kernels.sampling import (
    chunk_statistics,
    chunk_tokens,
    row_statistics,
    summary_chunks,
    temperature_terms,
    tile_tokens,
    weight,
)


@triton.jit
def request_rows(cu_ptr, num_tokens_ptr, request, mask, stride_cu, num_rows, block_size):
    """Return the first row of requests, int64, their lengths, and whether their rows are there."""
    first = tl.load(cu_ptr + request * stride_cu, mask=mask, other=0).to(tl.int64)
    end = tl.load(cu_ptr + (request + 1) * stride_cu, mask=mask, other=0).to(tl.int64)
    length = end - first - 1
    there = (first >= 0) & (end <= num_rows) & (length >= 0) & (length <= block_size)
    fits = tl.load(num_tokens_ptr + request * 0, mask=mask, other=0) <= num_rows
    return first, length, mask & there & fits


@triton.jit
def program_rows(
    cu_ptr,
    num_tokens_ptr,
    stride_cu,
    num_requests,
    num_rows,
    block_size,
    ROWS: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Return a program's rows, the requests they belong to, and which there are: the drafted rows, with filters the bonus rows too."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if FILTERED:
        per_request = block_size + 1
    else:
        per_request = block_size
    request, position = slot // per_request, slot % per_request
    mask = request < num_requests
    start, length, there = request_rows(cu_ptr, num_tokens_ptr, request, mask, stride_cu, num_rows, block_size)
    return start + position, request, there & (position < length + per_request - block_size)


@triton.jit
def any_row(mask):
    """Return whether a program has anything to do."""
    return tl.max(mask.to(tl.int32), axis=0) > 0


@triton.jit(
    do_not_specialize=["num_requests", "block_size", "num_rows", "num_chunks", "stride_temperature", "stride_cu"],
    do_not_specialize_on_alignment=["temperature_ptr", "cu_ptr", "num_tokens_ptr", "tops_ptr", "totals_ptr"],
)
def statistics_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [R]
    cu_ptr,  # [R + 1]
    num_tokens_ptr,  # scalar
    tops_ptr,  # [N, chunks] contiguous
    totals_ptr,  # [N, chunks] contiguous
    num_requests,
    block_size,
    num_rows,
    vocab_size,
    num_chunks,
    stride_tn,
    stride_tv,
    stride_temperature,
    stride_cu,
    FILTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    PER: tl.constexpr,
):
    """Write the maximum and the weight sum of each chunk of a tile of ROWS rows."""
    row, request, mask_r = program_rows(
        cu_ptr, num_tokens_ptr, stride_cu, num_requests, num_rows, block_size, ROWS, FILTERED
    )
    if any_row(mask_r):
        tile = tl.program_id(1)
        temperature = tl.load(temperature_ptr + request * stride_temperature, mask=mask_r, other=1.0)
        rate, _, _ = temperature_terms(temperature)
        token, inside = tile_tokens(tile, vocab_size, CELL, CHUNK, LANES, PER)
        mask = mask_r[:, None] & inside[None, :]
        x_ptr = logits_ptr + (row * stride_tn)[:, None] + token[None, :].to(tl.int64) * stride_tv
        x = tl.load(x_ptr, mask=mask, other=float("-inf")).to(tl.float32)
        top, total = chunk_statistics(x, mask, rate, ROWS, PER, LANES)
        chunk = tile * PER + tl.arange(0, PER)
        offs = (row * num_chunks)[:, None] + chunk[None, :]
        mask_c = mask_r[:, None] & (chunk < num_chunks)[None, :]
        tl.store(tops_ptr + offs, top, mask=mask_c)
        tl.store(totals_ptr + offs, total, mask=mask_c)


@triton.jit
def summary_tile(
    tops_ptr,
    totals_ptr,
    row,
    mask_r,
    num_chunks,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    CELLS: tl.constexpr,
    SUBS: tl.constexpr,
):
    """Return the two numbers of every chunk of some rows, [ROWS, CELLS * SUBS], padded with -inf and 0."""
    chunk, there = summary_chunks(CELL, CHUNK, CELLS, SUBS, num_chunks)
    offs = (row * num_chunks)[:, None] + chunk[None, :]
    mask = mask_r[:, None] & there[None, :]
    tops = tl.load(tops_ptr + offs, mask=mask, other=float("-inf"))
    return tops, tl.load(totals_ptr + offs, mask=mask, other=0.0)


_ROWS_INTEGERS = (
    *("num_requests", "block_size", "num_rows", "vocab_size", "num_chunks"),
    *("stride_tn", "stride_tv", "stride_temperature", "stride_cu"),
)
_ROWS_POINTERS = (
    *("logits_ptr", "temperature_ptr", "cu_ptr", "num_tokens_ptr", "tops_ptr", "totals_ptr"),
    *("row_max_ptr", "row_sum_ptr", "best_ptr"),
)


@triton.jit(do_not_specialize=_ROWS_INTEGERS, do_not_specialize_on_alignment=_ROWS_POINTERS)
def rows_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [R]
    cu_ptr,  # [R + 1]
    num_tokens_ptr,  # scalar
    tops_ptr,  # [N, chunks] contiguous
    totals_ptr,  # [N, chunks] contiguous
    row_max_ptr,  # [N] contiguous
    row_sum_ptr,  # [N] contiguous
    best_ptr,  # [N] contiguous
    num_requests,
    block_size,
    num_rows,
    vocab_size,
    num_chunks,
    stride_tn,
    stride_tv,
    stride_temperature,
    stride_cu,
    FILTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    CELLS: tl.constexpr,
    SUBS: tl.constexpr,
):
    """Write a row's maximum and its total, NaN if it is no distribution; of a greedy row total 1 and the argmax, elsewhere -1."""
    row, request, mask_r = program_rows(
        cu_ptr, num_tokens_ptr, stride_cu, num_requests, num_rows, block_size, ROWS, FILTERED
    )
    if any_row(mask_r):
        temperature = tl.load(temperature_ptr + request * stride_temperature, mask=mask_r, other=1.0)
        rate, greedy, usable = temperature_terms(temperature)
        tops, totals = summary_tile(tops_ptr, totals_ptr, row, mask_r, num_chunks, CELL, CHUNK, CELLS, SUBS)
        top, total, _ = row_statistics(tops, totals, rate, usable)
        greedy = mask_r & greedy & (total == total)
        best = tl.full((ROWS,), -1, tl.int32)
        if any_row(greedy):
            PARTS: tl.constexpr = (CELL + CHUNK - 1) // CHUNK
            offs = tl.arange(0, CELLS * SUBS)[None, :]
            # The chunks are in order of their tokens, so the first that holds the maximum holds its lowest id.
            index = tl.min(tl.where(tops == top[:, None], offs, CELLS * SUBS - 1), axis=1)
            chunk = (index // SUBS) * PARTS + index % SUBS
            token, inside = chunk_tokens(chunk[:, None], tl.arange(0, LANES)[None, :], CELL, CHUNK)
            mask = greedy[:, None] & inside & (token < vocab_size)
            x_ptr = logits_ptr + (row * stride_tn)[:, None] + token.to(tl.int64) * stride_tv
            x = tl.load(x_ptr, mask=mask, other=float("-inf")).to(tl.float32)
            first = tl.min(tl.where(mask & (x == top[:, None]), token, vocab_size), axis=1)
            best = tl.where(greedy, first, -1).to(tl.int32)
        tl.store(row_max_ptr + row, top, mask=mask_r)
        tl.store(row_sum_ptr + row, tl.where(greedy, 1.0, total), mask=mask_r)
        tl.store(best_ptr + row, best, mask=mask_r)


@triton.jit
def load_row(
    row_max_ptr, row_sum_ptr, best_ptr, threshold_ptr, last_id_ptr, min_weight_ptr, row, mask, FILTERED: tl.constexpr
):
    """Return what is known of some rows: maximum, total, argmax of a greedy one, and what `kept` needs."""
    top = tl.load(row_max_ptr + row, mask=mask, other=0.0)
    total = tl.load(row_sum_ptr + row, mask=mask, other=1.0)
    best = tl.load(best_ptr + row, mask=mask, other=-1)
    if FILTERED:
        threshold = tl.load(threshold_ptr + row, mask=mask, other=0.0)
        last_id = tl.load(last_id_ptr + row, mask=mask, other=0)
        min_weight = tl.load(min_weight_ptr + row, mask=mask, other=0.0)
    else:
        threshold, last_id, min_weight = tl.zeros_like(top), tl.zeros_like(best), tl.zeros_like(top)
    return top, total, best, threshold, last_id, min_weight


@triton.jit
def drafts_of(ptr, request, position, stride_r, stride_k, mask, other):
    """Return what an [R, gamma] tensor holds for some requests and positions."""
    return tl.load(ptr + request * stride_r + position * stride_k, mask=mask, other=other)


_ACCEPT_INTEGERS = (
    *("num_requests", "block_size", "num_rows", "vocab_size", "stride_tn", "stride_tv", "stride_temperature"),
    *("stride_cu", "stride_xr", "stride_xk", "stride_qr", "stride_qk", "stride_draft_temperature"),
    *("stride_mr", "stride_mk", "stride_sr", "stride_sk", "stride_ur", "stride_uk"),
)
_ACCEPT_POINTERS = (
    *("logits_ptr", "temperature_ptr", "cu_ptr", "num_tokens_ptr", "drafted_ptr", "draft_probs_ptr"),
    *("draft_temperature_ptr", "draft_max_ptr", "draft_sum_ptr", "uniforms_ptr", "row_max_ptr", "row_sum_ptr"),
    *("best_ptr", "threshold_ptr", "last_id_ptr", "min_weight_ptr", "num_accepted_ptr", "num_emitted_ptr"),
    *("valid_ptr", "tokens_ptr", "logprobs_ptr", "ids_ptr", "numbers_ptr"),
)


@triton.jit(do_not_specialize=_ACCEPT_INTEGERS, do_not_specialize_on_alignment=_ACCEPT_POINTERS)
def accept_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [R]
    cu_ptr,  # [R + 1]
    num_tokens_ptr,  # scalar
    drafted_ptr,  # [R, gamma] tokens
    draft_probs_ptr,  # [R, gamma] q of them
    draft_temperature_ptr,  # [R]
    draft_max_ptr,  # [R, gamma]
    draft_sum_ptr,  # [R, gamma]
    uniforms_ptr,  # [R, gamma]
    row_max_ptr,  # [N] contiguous
    row_sum_ptr,  # [N] contiguous; with filters, of what is kept
    best_ptr,  # [N] contiguous
    threshold_ptr,  # [N] contiguous, or None without filters, as the two that follow
    last_id_ptr,
    min_weight_ptr,
    num_accepted_ptr,  # [R] contiguous, as all results
    num_emitted_ptr,  # [R]
    valid_ptr,  # [R]
    tokens_ptr,  # [R, gamma + 1]
    logprobs_ptr,  # [R, gamma + 1]
    ids_ptr,  # [R, 8] plan, target row, position, drafted token, last id kept
    numbers_ptr,  # [R, 8] T, maximum and total of the target's row, of the draft's; least logit and weight kept
    num_requests,
    block_size,
    num_rows,
    vocab_size,
    stride_tn,
    stride_tv,
    stride_temperature,
    stride_cu,
    stride_xr,
    stride_xk,
    stride_qr,
    stride_qk,
    stride_draft_temperature,
    stride_mr,
    stride_mk,
    stride_sr,
    stride_sk,
    stride_ur,
    stride_uk,
    FILTERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the results of BLOCK_R requests but for a token that is still to be drawn, and what it is to be drawn from."""
    request = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = request < num_requests
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
    start, length, there = request_rows(cu_ptr, num_tokens_ptr, request, mask_r, stride_cu, num_rows, block_size)
    drafted = there[:, None] & (offs_k < length[:, None])
    row = start[:, None] + offs_k

    token = drafts_of(drafted_ptr, request[:, None], offs_k, stride_xr, stride_xk, drafted, -1).to(tl.int64)
    known = drafted & (token >= 0) & (token < vocab_size)
    logit = tl.load(logits_ptr + row * stride_tn + token * stride_tv, mask=known, other=float("-inf")).to(tl.float32)
    top, total, best, threshold, last_id, min_weight = load_row(
        *(row_max_ptr, row_sum_ptr, best_ptr, threshold_ptr, last_id_ptr, min_weight_ptr, row, drafted, FILTERED)
    )
    temperature = tl.load(temperature_ptr + request * stride_temperature, mask=mask_r, other=1.0)
    rate, greedy, _ = temperature_terms(temperature)
    w = weight(logit, top, rate[:, None])
    if FILTERED:
        w = tl.where(kept(logit, token, w, threshold, last_id, min_weight), w, 0.0)
    p = tl.where(greedy[:, None], tl.where(token == best, 1.0, 0.0), divide(w, total))
    p = tl.where(known & (total == total), p, 0.0)
    q = drafts_of(draft_probs_ptr, request[:, None], offs_k, stride_qr, stride_qk, drafted, 0.0)
    u = drafts_of(uniforms_ptr, request[:, None], offs_k, stride_ur, stride_uk, drafted, 0.0)
    lawful = (total == total) & (q == q)
    accepted = lawful & ((u * q < p) | ((p >= q) & (p > 0)))

    count = tl.min(tl.where(drafted & (accepted == 0), offs_k, length[:, None]), axis=1)
    here = drafted & (offs_k == count[:, None])
    valid = there & (tl.max((here & (lawful == 0)).to(tl.int32), axis=1) == 0)
    rejected = valid & (count < length)
    row = start + count
    top, total, best, threshold, last_id, min_weight = load_row(
        *(row_max_ptr, row_sum_ptr, best_ptr, threshold_ptr, last_id_ptr, min_weight_ptr, row),
        *(rejected | (valid & FILTERED), FILTERED),
    )
    valid = valid & (total == total)  # with filters, the bonus row is known too
    certain = valid & (best >= 0)  # a greedy row needs no draw
    plan = tl.where(valid & (best < 0), tl.where(rejected, RESIDUAL, BONUS), NOTHING)
    token_here = tl.max(tl.where(here, token, -1), axis=1)
    store_row(ids_ptr, numbers_ptr, request, mask_r, plan, row, last_id, temperature, top, total, threshold, min_weight)
    draft_t = tl.load(draft_temperature_ptr + request * stride_draft_temperature, mask=mask_r, other=1.0)
    draft_top = drafts_of(draft_max_ptr, request, count, stride_mr, stride_mk, rejected, 0.0)
    draft_total = drafts_of(draft_sum_ptr, request, count, stride_sr, stride_sk, rejected, 1.0)
    store_draft(ids_ptr, numbers_ptr, request, mask_r, count, token_here, draft_t, draft_top, draft_total)
    store_results(
        *(num_accepted_ptr, num_emitted_ptr, valid_ptr, tokens_ptr, logprobs_ptr, request, mask_r, offs_k, block_size),
        *(tl.where(valid, count, 0), valid, certain, token, p, best.to(tl.int64), BLOCK_R),
    )

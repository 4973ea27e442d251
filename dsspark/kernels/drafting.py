r"""The two kernels of a draft position: statistics of the corrected row, and the draw from them (paper eq. 4-6).

`statistics_kernel` owns a tile of the vocabulary: it reads its rows of W2 once, keeps them, and passes over all requests, 16 or 32 at
a time; of $x = U_k + L W_2^\top$ it leaves the maximum and the weight sum of each chunk, and x itself only if asked. `pick_kernel`
owns requests: it finds the chunk by the sums, reads or recomputes that chunk alone, and picks the token. The boundary between the two
launches is the only barrier.

A row of work is one position of one request: row = request * positions + (position - first_position). A Markov head needs one
position a launch; a parallel-only draft takes all at once. Where W2 does not fit (float32, or a rank above 256) a program reads its
rows of W2 again, from cache, for each further tile of requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.elementwise import divide
from dsspark.kernels.product import add_product, corrected_tile, load_vectors
from dsspark.kernels.sampling import (
    at_lane,
    choose_chunk,
    choose_lane,
    chunk_statistics,
    chunk_tokens,
    rounded,
    row_statistics,
    summary_chunks,
    temperature_terms,
    tile_tokens,
    weight,
)

STATISTICS_VALUES = ("num_rows", "positions", "first_position", "block_size", "num_chunks")
PICK_VALUES = (*STATISTICS_VALUES, "num_ids")
"""Integers whose value the compiler must not look at."""


@triton.jit
def embed(w1_ptr, token, mask_row, stride_ev, stride_ee, num_ids, rank, start, WIDTH: tl.constexpr):
    """Return entries start .. start + WIDTH of the rows of W1, [ROWS, WIDTH]; NaN for an id that W1 lacks, 0 where masked."""
    known = (token >= 0) & (token < num_ids)
    offs_row = tl.where(known, token, 0).to(tl.int64) * stride_ev
    e = load_vectors(w1_ptr, offs_row, mask_row & known, stride_ee, rank, start, WIDTH)
    return tl.where((mask_row & (known == 0))[:, None], float("nan"), e)


@triton.jit
def locate(row, positions, first_position):
    """Return request and position of a row of work, int64."""
    return row // positions, first_position + row % positions


@triton.jit(do_not_specialize=list(STATISTICS_VALUES))
def statistics_kernel(
    base_ptr,  # [R, gamma, V]
    latent_ptr,  # [R, gamma, r] contiguous or None
    w2_ptr,  # [V, r] or None
    temperature_ptr,  # [R]
    logits_ptr,  # [R, gamma, V] contiguous or None
    tops_ptr,  # [rows, chunks] contiguous
    totals_ptr,  # [rows, chunks] contiguous
    stride_br,
    stride_bk,
    stride_bv,
    stride_wv,
    stride_we,
    stride_t,
    num_rows,
    positions,
    first_position,
    block_size,
    vocab_size,
    rank,
    num_chunks,
    BLOCK_R: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    PER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Leave the statistics of one tile of the vocabulary, for every num_programs(1)-th tile of rows."""
    tile = tl.program_id(0)
    token, inside = tile_tokens(tile, vocab_size, CELL, CHUNK, LANES, PER)
    offs_v = token.to(tl.int64)
    offs_chunk = tile * PER + tl.arange(0, PER)
    if w2_ptr is not None:
        offs_w2 = offs_v * stride_wv
        if BLOCK_K == RANK:
            w2 = load_vectors(w2_ptr, offs_w2, inside, stride_we, rank, 0, RANK)

    for first in range(tl.program_id(1) * BLOCK_R, num_rows, tl.num_programs(1) * BLOCK_R):
        row = first + tl.arange(0, BLOCK_R).to(tl.int64)
        mask_row = row < num_rows
        request, position = locate(row, positions, first_position)
        offs_out = request * block_size + position
        mask = mask_row[:, None] & inside[None, :]
        base = tl.load(
            base_ptr + (request * stride_br + position * stride_bk)[:, None] + offs_v[None, :] * stride_bv,
            mask=mask,
            other=0.0,
        )
        x = base.to(tl.float32)
        if w2_ptr is not None:
            offs_latent = offs_out * rank
            if BLOCK_K == RANK:  # the sum of corrected_tile, in its one step
                latent = load_vectors(latent_ptr, offs_latent, mask_row, 1, rank, 0, RANK)
                x += add_product(tl.zeros_like(x), latent, w2, INTERPRETED)
            else:
                x = corrected_tile(
                    x, latent_ptr, offs_latent, mask_row, 1, w2_ptr, offs_w2, inside, stride_we, rank, RANK, BLOCK_K, INTERPRETED
                )  # fmt: skip
        if logits_ptr is not None:
            x = rounded(x, logits_ptr.dtype.element_ty, INTERPRETED)
            offs_x = (offs_out * vocab_size)[:, None] + offs_v[None, :]
            tl.store(logits_ptr + offs_x, x.to(logits_ptr.dtype.element_ty), mask=mask)

        temperature = tl.load(temperature_ptr + request * stride_t, mask=mask_row, other=1.0)
        rate, _, _ = temperature_terms(temperature)
        top, total = chunk_statistics(x, mask, rate, BLOCK_R, PER, LANES)
        offs_s = row[:, None] * num_chunks + offs_chunk[None, :]
        mask_s = mask_row[:, None] & (offs_chunk < num_chunks)[None, :]
        tl.store(tops_ptr + offs_s, top, mask=mask_s)
        tl.store(totals_ptr + offs_s, total, mask=mask_s)


@triton.jit
def _recomputed_chunks(
    base,  # [BLOCK_R, LANES] float32
    latent_ptr,
    first_row,
    num_rows,
    positions,
    first_position,
    block_size,
    w2_ptr,
    offs_w2,  # [BLOCK_R, LANES]
    inside,
    stride_we,
    rank,
    BLOCK_R: tl.constexpr,
    LANES: tl.constexpr,
    PRODUCT_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return base + latent W2^T where each row has tokens of its own: of the product of all with all, the diagonal."""
    offs_p = tl.arange(0, PRODUCT_ROWS)
    row = first_row + offs_p
    request, position = locate(row, positions, first_position)
    corrections = corrected_tile(
        tl.zeros((PRODUCT_ROWS, BLOCK_R * LANES), tl.float32),
        latent_ptr,
        (request * block_size + position) * rank,
        (offs_p < BLOCK_R) & (row < num_rows),
        1,
        w2_ptr,
        tl.reshape(offs_w2, (BLOCK_R * LANES,)),
        tl.reshape(inside, (BLOCK_R * LANES,)),
        stride_we,
        rank,
        RANK,
        BLOCK_K,
        INTERPRETED,
    )
    corrections = tl.reshape(corrections, (PRODUCT_ROWS, BLOCK_R, LANES))
    own = offs_p[:, None, None] == tl.arange(0, BLOCK_R)[None, :, None]
    return base + tl.sum(tl.where(own, corrections, 0.0), axis=0)


@triton.jit
def _pick_lane(x, inside, top, rate, greedy, token_uniform, remaining, LANES: tl.constexpr, SUBS: tl.constexpr):
    """Return the lane of a chunk that is drawn, of a greedy row the first of its maximum, and the weights of the chunk."""
    lanes = tl.arange(0, LANES)[None, :]
    usual = inside & (x < float("inf"))
    weights = tl.where(usual, weight(x, top[:, None], rate[:, None]), 0.0)
    drawn = choose_lane(weights, token_uniform, remaining, LANES, SUBS)
    x = tl.where(usual, x, float("-inf"))
    first = tl.min(tl.where(inside & (x == tl.max(x, axis=1)[:, None]), lanes, LANES), axis=1)
    return tl.where(greedy, tl.where(first < LANES, first, 0), drawn), weights


@triton.jit(do_not_specialize=list(PICK_VALUES))
def pick_kernel(
    base_ptr,  # [R, gamma, V]: U, or the corrected logits if they are stored
    latent_ptr,  # [R, gamma, r] contiguous or None
    w2_ptr,  # [V, r], or None where base_ptr needs no correction
    w1_ptr,  # [V_target, r], or None where another kernel forms the next latent
    temperature_ptr,  # [R]
    uniforms_ptr,  # [R, gamma, 2]
    map_ptr,  # [V] target ids or None
    tops_ptr,  # [rows, chunks] contiguous
    totals_ptr,  # [rows, chunks] contiguous
    tokens_ptr,  # [R, gamma] contiguous, as the three below
    probs_ptr,
    max_ptr,
    sum_ptr,
    stride_br,
    stride_bk,
    stride_bv,
    stride_wv,
    stride_we,
    stride_ev,
    stride_ee,
    stride_t,
    stride_ur,
    stride_uk,
    stride_ui,
    stride_m,
    num_rows,
    positions,
    first_position,
    block_size,
    vocab_size,
    rank,
    num_chunks,
    num_ids,
    BLOCK_R: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRODUCT_ROWS: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    CELLS: tl.constexpr,
    SUBS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Draw the tokens of BLOCK_R rows from their statistics; write the law's fields and, for a vanilla head, the next latent."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_R
    row = first_row + tl.arange(0, BLOCK_R)
    mask_row = row < num_rows
    request, position = locate(row, positions, first_position)
    offs_out = request * block_size + position
    temperature = tl.load(temperature_ptr + request * stride_t, mask=mask_row, other=1.0)
    rate, greedy, usable = temperature_terms(temperature)

    summary, present = summary_chunks(CELL, CHUNK, CELLS, SUBS, num_chunks)
    offs_s = row[:, None] * num_chunks + summary[None, :]
    mask_s = mask_row[:, None] & present[None, :]
    tops = tl.load(tops_ptr + offs_s, mask=mask_s, other=float("-inf"))
    totals = tl.load(totals_ptr + offs_s, mask=mask_s, other=0.0)
    top, total, mass = row_statistics(tops, totals, rate, usable)

    offs_u = request * stride_ur + position * stride_uk
    cell_uniform = tl.load(uniforms_ptr + offs_u, mask=mask_row, other=0.0)
    token_uniform = tl.load(uniforms_ptr + offs_u + stride_ui, mask=mask_row, other=0.0)
    chunk, remaining = choose_chunk(mass, cell_uniform, token_uniform, BLOCK_R, CELL, CHUNK, CELLS, SUBS)
    highest = tl.min(tl.where(mask_s & (tops == top[:, None]), summary[None, :], num_chunks), axis=1)
    chunk = tl.where(greedy, highest, chunk)
    chunk = tl.where(chunk < num_chunks, chunk, 0)  # a row that is no distribution may have no highest chunk

    token, inside = chunk_tokens(chunk[:, None], tl.arange(0, LANES)[None, :], CELL, CHUNK)
    inside = inside & (token < vocab_size) & mask_row[:, None]
    offs_v = token.to(tl.int64)
    offs_x = (request * stride_br + position * stride_bk)[:, None] + offs_v * stride_bv
    x = tl.load(base_ptr + offs_x, mask=inside, other=0.0).to(tl.float32)
    if w2_ptr is not None:
        x = _recomputed_chunks(
            x, latent_ptr, first_row, num_rows, positions, first_position, block_size, w2_ptr, offs_v * stride_wv, inside,
            stride_we, rank, BLOCK_R, LANES, PRODUCT_ROWS, RANK, BLOCK_K, INTERPRETED,
        )  # fmt: skip
    lane, weights = _pick_lane(x, inside, top, rate, greedy, token_uniform, remaining, LANES, SUBS)

    valid = total == total
    probability = tl.where(greedy, 1.0, divide(at_lane(weights, lane, LANES), total))
    token, _ = chunk_tokens(chunk, lane, CELL, CHUNK)
    token = tl.where(valid & (token < vocab_size), token, 0).to(tl.int64)
    if map_ptr is not None:
        token = tl.load(map_ptr + token * stride_m, mask=mask_row, other=0)
    token = tl.where(valid, token, 0)
    tl.store(tokens_ptr + offs_out, token, mask=mask_row)
    tl.store(probs_ptr + offs_out, tl.where(valid, probability, float("nan")), mask=mask_row)
    tl.store(max_ptr + offs_out, top, mask=mask_row)
    tl.store(sum_ptr + offs_out, tl.where(valid & greedy, 1.0, total), mask=mask_row)

    if w1_ptr is not None:
        more = mask_row & (position + 1 < block_size)
        offs_e = tl.arange(0, RANK)
        e = embed(w1_ptr, token, more, stride_ev, stride_ee, num_ids, rank, 0, RANK)
        offs_next = ((offs_out + 1) * rank)[:, None] + offs_e[None, :]
        tl.store(latent_ptr + offs_next, e, mask=more[:, None] & (offs_e < rank)[None, :])

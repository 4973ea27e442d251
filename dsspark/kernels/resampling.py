r"""The second half of `verify`: the residual or the bonus row of each request, and the token drawn from it (paper 2.1).

$$r(v) = \max(0, p(v) - q(v)), \qquad p(v) = e^{(x_v - m) / T} / s$$

with the very p and q of the acceptance test. `resample_kernel` reads, of every request that is still to draw a token, one row of p and,
after a rejection, one of q, and leaves two numbers a chunk: the sums of the residual and of p, for rounding can leave a residual
empty; or the statistics of an unfiltered bonus row, of which nothing is known yet. `pick_kernel` draws a chunk from them, reads it
again and draws the token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.acceptance import any_row, summary_tile
from dsspark.kernels.draft_law import POINT, RECOMPUTED, draft_probs, find_draft_ids, tile_draft_ids
from dsspark.kernels.elementwise import divide
from dsspark.kernels.filters import kept
from dsspark.kernels.handover import BONUS, NOTHING, RESIDUAL, load_draft, load_target, store_draw
from dsspark.kernels.product import PRODUCT_ROWS, add_product, corrected_tile, load_vectors
from dsspark.kernels.sampling import (
    at_lane,
    choose_chunk,
    choose_lane,
    chunk_statistics,
    chunk_tokens,
    row_statistics,
    temperature_terms,
    tile_tokens,
    weight,
)

_PRODUCT_ROWS = tl.constexpr(PRODUCT_ROWS)


@triton.jit
def target_weights(x, token, top, rate, threshold, last_id, min_weight, FILTERED: tl.constexpr):
    """Return the weights of a tile of target logits [ROWS, lanes], 0 where a filter removed the token; the terms are [ROWS]."""
    w = weight(x, top[:, None], rate[:, None])
    if FILTERED:
        w = tl.where(kept(x, token, w, threshold[:, None], last_id[:, None], min_weight[:, None]), w, 0.0)
    return w


@triton.jit(
    do_not_specialize=["num_requests", "num_chunks", "stride_map"],
    do_not_specialize_on_alignment=["ids_ptr", "numbers_ptr", "map_ptr", "first_ptr", "second_ptr"],
)
def resample_kernel(
    logits_ptr,  # [N, V]
    ids_ptr,  # [R, 8] of `accept_kernel`
    numbers_ptr,  # [R, 8] likewise
    draft_logits_ptr,  # [R, gamma, V_draft] corrected logits; U where they are recomputed; None for a point
    latent_ptr,  # [R, gamma, r], or None
    w2_ptr,  # [V_draft, r], or None
    map_ptr,  # [V_draft] target ids, or None where the ids are the same
    first_ptr,  # [R, chunks] contiguous: residual sums, or maxima
    second_ptr,  # [R, chunks] contiguous: sums of p, or weight sums
    num_requests,
    vocab_size,
    draft_vocab,
    rank,
    num_chunks,
    stride_tn,
    stride_tv,
    stride_dr,
    stride_dk,
    stride_dv,
    stride_lr,
    stride_lk,
    stride_le,
    stride_wv,
    stride_we,
    stride_map,
    SOURCE: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    PER: tl.constexpr,
):
    """Write two numbers of each chunk of a tile, ROWS requests at a time; W2's tile is read once for all of a program's requests."""
    tile = tl.program_id(1)
    token, inside = tile_tokens(tile, vocab_size, CELL, CHUNK, LANES, PER)
    chunk = tile * PER + tl.arange(0, PER)
    if map_ptr is None:
        draft_id, in_draft = token.to(tl.int64), inside & (token < draft_vocab)
    else:
        draft_id, in_draft = tile_draft_ids(map_ptr, tile, draft_vocab, stride_map, CELL, CHUNK, LANES, PER)
        in_draft = inside & in_draft
    if SOURCE == RECOMPUTED and BLOCK_K == RANK:
        w2 = load_vectors(w2_ptr, draft_id * stride_wv, in_draft, stride_we, rank, 0, RANK)
    for start in range(tl.program_id(0) * ROWS, num_requests, tl.num_programs(0) * ROWS):
        request = start + tl.arange(0, ROWS).to(tl.int64)
        plan, row, temperature, top, total, threshold, last_id, min_weight = load_target(
            ids_ptr, numbers_ptr, request, request < num_requests
        )
        needed = plan != NOTHING
        if any_row(needed):
            rate, _, _ = temperature_terms(temperature)
            x_ptr = logits_ptr + (row * stride_tn)[:, None] + token[None, :].to(tl.int64) * stride_tv
            mask = needed[:, None] & inside[None, :]
            x = tl.load(x_ptr, mask=mask, other=float("-inf")).to(tl.float32)
            w = target_weights(x, token[None, :], top, rate, threshold, last_id, min_weight, FILTERED)
            p = tl.where(mask, divide(w, tl.broadcast_to(total[:, None], w.shape)), 0.0)

            rejected = plan == RESIDUAL
            position, drafted, temperature, top, total = load_draft(ids_ptr, numbers_ptr, request, rejected)
            draft_rate, point, _ = temperature_terms(temperature)
            point = rejected & point
            mask = (rejected & (point == 0))[:, None] & in_draft[None, :] & (SOURCE != POINT)
            y = tl.full(p.shape, float("-inf"), tl.float32)
            if SOURCE != POINT:
                y_ptr = draft_logits_ptr + (request * stride_dr + position * stride_dk)[:, None]
                y = tl.load(y_ptr + draft_id[None, :] * stride_dv, mask=mask, other=float("-inf")).to(tl.float32)
            if SOURCE == RECOMPUTED:
                offs_l, mask_l = request * stride_lr + position * stride_lk, rejected & (point == 0)
                if BLOCK_K == RANK:
                    latent = load_vectors(latent_ptr, offs_l, mask_l, stride_le, rank, 0, RANK)
                    y += add_product(tl.zeros_like(y), latent, w2, INTERPRETED)
                else:
                    y = corrected_tile(
                        *(y, latent_ptr, offs_l, mask_l, stride_le, w2_ptr, draft_id * stride_wv, in_draft, stride_we),
                        *(rank, RANK, BLOCK_K, INTERPRETED),
                    )
            q = draft_probs(
                *(y, mask, token[None, :], drafted[:, None], point[:, None]),
                *(top[:, None], total[:, None], draft_rate[:, None]),
            )
            first = tl.sum(tl.reshape(tl.where(p > q, p - q, 0.0), [ROWS, PER, LANES]), axis=2)
            second = tl.sum(tl.reshape(p, [ROWS, PER, LANES]), axis=2)
            if not FILTERED:
                bonus = plan == BONUS
                tops, totals = chunk_statistics(x, bonus[:, None] & inside[None, :], rate, ROWS, PER, LANES)
                first = tl.where(bonus[:, None], tops, first)
                second = tl.where(bonus[:, None], totals, second)
            offs = (request * num_chunks)[:, None] + chunk[None, :]
            mask = needed[:, None] & (chunk < num_chunks)[None, :]
            tl.store(first_ptr + offs, first, mask=mask)
            tl.store(second_ptr + offs, second, mask=mask)


@triton.jit
def chunk_draft_probs(
    draft_logits_ptr,
    latent_ptr,
    w2_ptr,
    map_ptr,
    ids_ptr,
    numbers_ptr,
    request,
    rejected,
    token,
    inside,
    draft_vocab,
    rank,
    stride_dr,
    stride_dk,
    stride_dv,
    stride_lr,
    stride_lk,
    stride_le,
    stride_wv,
    stride_we,
    stride_map,
    SOURCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return q of one chunk a row, [ROWS, LANES], 0 where no draft was rejected; one row at a time where q is recomputed."""
    position, drafted, temperature, top, total = load_draft(ids_ptr, numbers_ptr, request, rejected)
    rate, point, _ = temperature_terms(temperature)
    point = rejected & point
    mask = inside & (rejected & (point == 0))[:, None] & (SOURCE != POINT)
    y = tl.full(token.shape, float("-inf"), tl.float32)
    if SOURCE != POINT:
        draft_id = token.to(tl.int64)
        if map_ptr is None:
            mask = mask & (token < draft_vocab)
        else:
            draft_id, mask = find_draft_ids(map_ptr, token, mask, draft_vocab, stride_map)
        y_ptr = draft_logits_ptr + (request * stride_dr + position * stride_dk)[:, None]
        y = tl.load(y_ptr + draft_id * stride_dv, mask=mask, other=float("-inf")).to(tl.float32)
        if SOURCE == RECOMPUTED:
            # The product is that of `resample_kernel`, with all rows but one empty.
            offs = tl.arange(0, _PRODUCT_ROWS)
            offs_l = tl.broadcast_to(request * stride_lr + position * stride_lk, [_PRODUCT_ROWS])
            y = corrected_tile(
                *(tl.broadcast_to(y, [_PRODUCT_ROWS, LANES]), latent_ptr, offs_l, offs == 0, stride_le),
                *(w2_ptr, tl.reshape(draft_id * stride_wv, [LANES]), tl.reshape(mask, [LANES]), stride_we),
                *(rank, RANK, BLOCK_K, INTERPRETED),
            )
            y = tl.sum(tl.where((offs == 0)[:, None, None], tl.reshape(y, [_PRODUCT_ROWS, 1, LANES]), 0.0), axis=0)
    return draft_probs(y, mask, token, drafted[:, None], point[:, None], top[:, None], total[:, None], rate[:, None])


@triton.jit
def _chunk_masses(first, second, unread):
    """Return the mass of each chunk that a draw from the residual falls into, of p where rounding left none, and where that is."""
    sums = tl.where(unread[:, None] | (first == float("-inf")), 0.0, first)
    empty = tl.sum(sums, axis=1) <= 0
    return tl.where(empty[:, None], second, sums), empty


@triton.jit
def _bonus_masses(mass, first, second, unread, top, total, rate, greedy, usable):
    """Return the masses, and maximum and total of the row, with those of bonus rows that nothing was known of."""
    tops = tl.where(unread[:, None], first, float("-inf"))
    bonus_top, bonus_total, weights = row_statistics(tops, tl.where(unread[:, None], second, 0.0), rate, usable)
    weights = tl.where(greedy[:, None], tl.where(tops == bonus_top[:, None], 1.0, 0.0), weights)
    mass = tl.where(unread[:, None], weights, mass)
    return mass, tl.where(unread, bonus_top, top), tl.where(unread, bonus_total, total)


_PICK_INTEGERS = (
    *("num_requests", "block_size", "vocab_size", "draft_vocab", "num_chunks", "stride_tn", "stride_tv"),
    *("stride_dr", "stride_dk", "stride_dv", "stride_map", "stride_ur", "stride_uk"),
)
_PICK_POINTERS = (
    *("logits_ptr", "ids_ptr", "numbers_ptr", "draft_logits_ptr", "map_ptr", "first_ptr", "second_ptr", "uniforms_ptr"),
    *("num_accepted_ptr", "num_emitted_ptr", "valid_ptr", "tokens_ptr", "logprobs_ptr"),
)


@triton.jit(do_not_specialize=_PICK_INTEGERS, do_not_specialize_on_alignment=_PICK_POINTERS)
def pick_kernel(
    logits_ptr,  # [N, V]
    ids_ptr,  # [R, 8] of `accept_kernel`
    numbers_ptr,  # [R, 8] likewise
    draft_logits_ptr,  # [R, gamma, V_draft], or None
    latent_ptr,  # [R, gamma, r], or None
    w2_ptr,  # [V_draft, r], or None
    map_ptr,  # [V_draft], or None
    first_ptr,  # [R, chunks] contiguous, of `resample_kernel`
    second_ptr,  # [R, chunks] contiguous, likewise
    uniforms_ptr,  # [R, 2]
    num_accepted_ptr,  # [R] contiguous, as all results
    num_emitted_ptr,  # [R]
    valid_ptr,  # [R]
    tokens_ptr,  # [R, gamma + 1]
    logprobs_ptr,  # [R, gamma + 1]
    num_requests,
    block_size,
    vocab_size,
    draft_vocab,
    rank,
    num_chunks,
    stride_tn,
    stride_tv,
    stride_dr,
    stride_dk,
    stride_dv,
    stride_lr,
    stride_lk,
    stride_le,
    stride_wv,
    stride_we,
    stride_map,
    stride_ur,
    stride_uk,
    SOURCE: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    POSITIONS: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    CELLS: tl.constexpr,
    SUBS: tl.constexpr,
):
    """Draw the token of each request that has none yet; a bonus row that is no distribution takes the request back."""
    request = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    plan, row, temperature, top, total, threshold, last_id, min_weight = load_target(
        ids_ptr, numbers_ptr, request, request < num_requests
    )
    needed = plan != NOTHING
    if any_row(needed):
        rejected = plan == RESIDUAL
        rate, greedy, usable = temperature_terms(temperature)
        first, second = summary_tile(first_ptr, second_ptr, request, needed, num_chunks, CELL, CHUNK, CELLS, SUBS)
        unread = needed & (not FILTERED) & (plan == BONUS)
        mass, empty = _chunk_masses(first, second, unread)
        if not FILTERED:
            mass, top, total = _bonus_masses(mass, first, second, unread, top, total, rate, greedy, usable)
        lawful = needed & (total == total)
        u_ptr = uniforms_ptr + request * stride_ur
        cell_uniform = tl.where(greedy, 0.0, tl.load(u_ptr, mask=needed, other=0.0))
        token_uniform = tl.where(greedy, 0.0, tl.load(u_ptr + stride_uk, mask=needed, other=0.0))
        chunk, remaining = choose_chunk(mass, cell_uniform, token_uniform, ROWS, CELL, CHUNK, CELLS, SUBS)

        token, inside = chunk_tokens(chunk[:, None], tl.arange(0, LANES)[None, :], CELL, CHUNK)
        mask = lawful[:, None] & inside & (token < vocab_size)
        x_ptr = logits_ptr + (row * stride_tn)[:, None] + token.to(tl.int64) * stride_tv
        x = tl.load(x_ptr, mask=mask, other=float("-inf")).to(tl.float32)
        w = target_weights(x, token, top, rate, threshold, last_id, min_weight, FILTERED)
        w = tl.where(mask, w, 0.0)
        p = divide(w, tl.broadcast_to(total[:, None], w.shape))
        q = chunk_draft_probs(
            *(draft_logits_ptr, latent_ptr, w2_ptr, map_ptr, ids_ptr, numbers_ptr, request, rejected & lawful),
            *(token, mask, draft_vocab, rank, stride_dr, stride_dk, stride_dv, stride_lr, stride_lk, stride_le),
            *(stride_wv, stride_we, stride_map, SOURCE, INTERPRETED, RANK, BLOCK_K, LANES),
        )
        residual = tl.where(p > q, p - q, 0.0)
        empty = empty | (tl.sum(residual, axis=1) <= 0)
        mass = tl.where(empty[:, None], p, residual)
        if not FILTERED:
            weights = tl.where(greedy[:, None], tl.where(mask & (x == top[:, None]), 1.0, 0.0), w)
            mass = tl.where(unread[:, None], weights, mass)
        lane = choose_lane(mass, token_uniform, remaining, LANES, SUBS)
        drawn, _ = chunk_tokens(chunk, lane, CELL, CHUNK)
        logprob = tl.log(tl.where(lawful & (greedy == 0), at_lane(p, lane, LANES), 1.0))
        position = tl.load(ids_ptr + request * 8 + 2, mask=needed, other=0)
        store_draw(
            *(num_accepted_ptr, num_emitted_ptr, valid_ptr, tokens_ptr, logprobs_ptr, request, position),
            *(needed, lawful, drawn, logprob, block_size, POSITIONS),
        )

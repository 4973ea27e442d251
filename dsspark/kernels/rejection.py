r"""Lossless verification in five launches: accept, resample from the residual, or draw the bonus (paper 2.1).

Bytes moved, in rows of logits a request of l drafts: l rows of p once, for their statistics (`acceptance`), then one row of p and one
of q at a rejection, or the bonus row (`resampling`), then one chunk of what was drawn from, and eight bytes a chunk and row of
statistics, written and read. With gamma = 7 that is 9 rows after a rejection and 8 without, and with half-precision logits in cells of 256
another third of a row for statistics and chunks (9.32 counted at V = 32,768). Where q is recomputed its row of U is read instead, and W2 once
for all requests.

Departs from the reference in the order of work alone: the rows after a rejection are read before it is known. What they hold does not
matter. With filters the bonus row is read with the drafted ones, for its cutoffs (`filters`) take several passes. Where the host cannot see
it, `cu_seqlens` that point outside the logits make their request invalid. float64, the oracle's dtype, is not taken.
"""

from __future__ import annotations

from dataclasses import fields

import torch
import triton
from torch import Tensor

from dsspark._checks import as_temperature
from dsspark.contracts import check_verify_arguments
from dsspark.kernels.acceptance import accept_kernel, rows_kernel, statistics_kernel
from dsspark.kernels.draft_law import RECOMPUTED
from dsspark.kernels.filters import cutoffs
from dsspark.kernels.launch import Variant, interpreted, launch
from dsspark.kernels.rejection_plan import Config, Plan, Source, choose_config
from dsspark.kernels.rejection_variants import verify_variants
from dsspark.kernels.resampling import pick_kernel, resample_kernel
from dsspark.kernels.sampling import check_logits, check_uniforms
from dsspark.numerics import CELL
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Filters, PackedBatch, Verification

__all__ = ["Config", "choose_config", "variants", "verify"]


def variants() -> list[Variant]:
    """Return the specialisations that the launchers choose for the sizes of real models; see `Variant`."""
    return verify_variants()


def _empty_result(num_requests: int, block_size: int, device: torch.device) -> Verification:
    return Verification(
        num_accepted=torch.empty((num_requests,), dtype=torch.int32, device=device),
        tokens=torch.empty((num_requests, block_size + 1), dtype=torch.int64, device=device),
        num_emitted=torch.empty((num_requests,), dtype=torch.int32, device=device),
        valid=torch.empty((num_requests,), dtype=torch.bool, device=device),
        logprobs=torch.empty((num_requests, block_size + 1), dtype=torch.float32, device=device),
    )


def _row_terms(
    logits: Tensor, temperature: Tensor, batch: PackedBatch, filters: Filters | None, plan: Plan
) -> tuple[Tensor | None, ...]:
    """Return maximum, total and argmax of every row that the acceptance test needs, and its cutoffs or None."""
    num_rows, vocab_size = logits.shape
    num_requests, device = batch.num_requests, logits.device
    tiling, statistics, rows = plan.statistics_tiling, plan.statistics(), plan.rows()
    tops, totals = (torch.empty((num_rows, tiling.num_chunks), dtype=torch.float32, device=device) for _ in range(2))
    row_max = torch.empty((num_rows,), dtype=torch.float32, device=device)
    # A row that is nobody's stays NaN: no filter reads it.
    row_sum = torch.empty_like(row_max) if filters is None else torch.full_like(row_max, torch.nan)
    best = torch.empty((num_rows,), dtype=torch.int32, device=device)
    slots = num_requests * plan.rows_a_request
    inputs = (logits, temperature, batch.cu_seqlens, batch.num_tokens, tops, totals)
    sizes = (num_requests, plan.block_size, num_rows, vocab_size, tiling.num_chunks, *logits.stride())
    sizes += (temperature.stride(0), batch.cu_seqlens.stride(0))
    tiles = (triton.cdiv(slots, statistics["ROWS"]), tiling.num_tiles)
    launch(statistics_kernel, tiles, *inputs, *sizes, **statistics, num_warps=plan.config.num_warps)
    grid = (triton.cdiv(slots, rows["ROWS"]),)
    outputs = (row_max, row_sum, best)
    launch(rows_kernel, grid, *inputs, *outputs, *sizes, **rows, num_warps=plan.config.num_warps)
    if filters is None:
        return row_max, row_sum, best, None, None, None
    ids = batch.request_ids[:num_rows]
    kept = cutoffs(logits, temperature, row_max, row_sum, filters, ids, group_max=tops)
    return row_max, kept.kept_sum, best, kept.threshold, kept.last_id, kept.min_weight


def _accept(
    logits: Tensor,
    temperature: Tensor,
    batch: PackedBatch,
    draft: DraftBlock,
    accept: Tensor,
    terms: tuple[Tensor | None, ...],
    result: Verification,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """Write all results but the tokens that are to be drawn; return what these are drawn from."""
    num_requests, shape = batch.num_requests, plan.accept()
    ids = torch.empty((num_requests, 8), dtype=torch.int64, device=logits.device)
    numbers = torch.empty((num_requests, 8), dtype=torch.float32, device=logits.device)
    launch(
        accept_kernel,
        (triton.cdiv(num_requests, shape["BLOCK_R"]),),
        *(logits, temperature, batch.cu_seqlens, batch.num_tokens, draft.tokens, draft.token_probs),
        *(draft.temperature, draft.row_max, draft.row_sum, accept, *terms),
        *(result.num_accepted, result.num_emitted, result.valid, result.tokens, result.logprobs, ids, numbers),
        *(num_requests, plan.block_size, *logits.shape, *logits.stride(), temperature.stride(0)),
        *(batch.cu_seqlens.stride(0), *draft.tokens.stride(), *draft.token_probs.stride()),
        *(draft.temperature.stride(0), *draft.row_max.stride(), *draft.row_sum.stride(), *accept.stride()),
        **shape,
        num_warps=plan.config.num_warps,
    )
    return ids, numbers


def _draw(
    logits: Tensor, source: Source, facts: tuple[Tensor, Tensor], final: Tensor, result: Verification, plan: Plan
) -> None:
    """Draw the tokens that `accept_kernel` left open."""
    num_requests, tiling = result.tokens.shape[0], plan.draw_tiling
    first, second = (
        torch.empty((num_requests, tiling.num_chunks), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    inputs = (logits, *facts, *source.pointers(), first, second)
    sizes = (plan.vocab_size, source.draft_vocab, source.rank, tiling.num_chunks, *logits.stride(), *source.strides())
    shape = plan.resample()
    # Where q is recomputed, a program takes all requests, so that it reads its tile of W2 once.
    programs = 1 if source.kind == RECOMPUTED.value else triton.cdiv(num_requests, shape["ROWS"])
    launch(
        resample_kernel,
        (programs, tiling.num_tiles),
        *(*inputs, num_requests, *sizes),
        **shape,
        INTERPRETED=interpreted(resample_kernel),
        num_warps=plan.resample_warps,
        num_stages=plan.config.product_stages,
    )
    shape = plan.pick()
    launch(
        pick_kernel,
        (triton.cdiv(num_requests, shape["ROWS"]),),
        *(*inputs, final),
        *(result.num_accepted, result.num_emitted, result.valid, result.tokens, result.logprobs),
        *(num_requests, plan.block_size, *sizes, *final.stride()),
        **shape,
        INTERPRETED=interpreted(pick_kernel),
        num_warps=plan.pick_warps,
    )


def verify(
    target_logits: Tensor,
    batch: PackedBatch,
    draft: DraftBlock,
    uniforms: Uniforms,
    *,
    temperature: float | Tensor = 1.0,
    filters: Filters | None = None,
    cell: int = CELL,
    config: Config | None = None,
) -> Verification:
    """Fused twin of `dsspark.reference.rejection.verify`; same contract, five launches without filters, no synchronisation.

    Numerics: p and q in float32, as in the reference; tokens equal the reference's unless a uniform is within rounding of a breakpoint.
    """
    check_verify_arguments(target_logits, batch, draft, uniforms, filters, cell)
    num_requests, block_size = draft.tokens.shape
    temperature = as_temperature(temperature, num_requests, target_logits)
    check_logits("target_logits", target_logits)
    check_uniforms("uniforms.accept", uniforms.accept)
    check_uniforms("uniforms.final", uniforms.final)
    source = Source.of(draft)
    if filters is not None and all(getattr(filters, field.name) is None for field in fields(filters)):
        filters = None
    if filters is not None:  # cutoffs are found by `request_ids`, which packed rows alone have
        target_logits = target_logits[: batch.request_ids.shape[0]]
    vocab_size = target_logits.shape[1]
    plan = Plan(
        vocab_size=vocab_size,
        block_size=block_size,
        cell=cell,
        filtered=filters is not None,
        kind=source.kind,
        mapped=source.draft_to_target is not None,
        product=source.product,
        config=config or source.config(vocab_size),
    )
    result = _empty_result(num_requests, block_size, target_logits.device)
    if num_requests:
        terms = _row_terms(target_logits, temperature, batch, filters, plan)
        facts = _accept(target_logits, temperature, batch, draft, uniforms.accept, terms, result, plan)
        _draw(target_logits, source, facts, uniforms.final, result, plan)
    return result

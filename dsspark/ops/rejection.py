"""`verify` as an operator: batch, draft, uniforms and filters travel as their tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark.numerics import CELL, compute_dtype
from dsspark.ops.common import eager, join_batch, split_batch
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Filters, PackedBatch, Verification


@torch.library.custom_op("dsspark::verify", mutates_args=())
def _verify_op(
    target_logits: Tensor,
    batch: list[Tensor],
    draft: list[Tensor],
    logits: Tensor | None,
    latent: Tensor | None,
    markov_w2: Tensor | None,
    base_logits: Tensor | None,
    draft_to_target: Tensor | None,
    uniforms: list[Tensor],
    temperature: Tensor | None,
    temperature_value: float,
    top_k: Tensor | None,
    top_k_value: int | None,
    top_p: Tensor | None,
    top_p_value: float | None,
    min_p: Tensor | None,
    min_p_value: float | None,
    cell: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, token_probs, row_max, row_sum, draft_temperature = draft
    block = DraftBlock(
        tokens=tokens,
        token_probs=token_probs,
        row_max=row_max,
        row_sum=row_sum,
        temperature=draft_temperature,
        logits=logits,
        latent=latent,
        markov_w2=markov_w2,
        base_logits=base_logits,
        draft_to_target=draft_to_target,
    )
    filters = Filters(
        top_k=top_k_value if top_k is None else top_k,
        top_p=top_p_value if top_p is None else top_p,
        min_p=min_p_value if min_p is None else min_p,
    )
    none = filters.top_k is None and filters.top_p is None and filters.min_p is None
    result: Verification = eager("verify")(
        target_logits,
        join_batch(batch),
        block,
        Uniforms(draft=uniforms[0], accept=uniforms[1], final=uniforms[2]),
        temperature=temperature_value if temperature is None else temperature,
        filters=None if none else filters,
        cell=cell,
        backend=backend,
    )
    return result.num_accepted, result.tokens, result.num_emitted, result.valid, result.logprobs


@_verify_op.register_fake
def _(target_logits, batch, draft, *rest):  # type: ignore[no-untyped-def]
    num_requests, block_size = draft[0].shape
    shape = num_requests, block_size + 1
    return (
        target_logits.new_empty((num_requests,), dtype=torch.int32),
        target_logits.new_empty(shape, dtype=torch.int64),
        target_logits.new_empty((num_requests,), dtype=torch.int32),
        target_logits.new_empty((num_requests,), dtype=torch.bool),
        target_logits.new_empty(shape, dtype=compute_dtype(target_logits)),
    )


@torch.no_grad()
def verify(
    target_logits: Tensor,
    batch: PackedBatch,
    draft: DraftBlock,
    uniforms: Uniforms,
    *,
    temperature: float | Tensor = 1.0,
    filters: Filters | None = None,
    cell: int = CELL,
    backend: str,
) -> Verification:
    """Traceable form of `dsspark.verify`."""
    filters = Filters() if filters is None else filters
    values = [temperature, filters.top_k, filters.top_p, filters.min_p]
    tensors = [value if isinstance(value, Tensor) else None for value in values]
    numbers = [None if isinstance(value, Tensor) else value for value in values]
    num_accepted, tokens, num_emitted, valid, logprobs = _verify_op(
        target_logits,
        split_batch(batch),
        [draft.tokens, draft.token_probs, draft.row_max, draft.row_sum, draft.temperature],
        draft.logits,
        draft.latent,
        draft.markov_w2,
        draft.base_logits,
        draft.draft_to_target,
        [uniforms.draft, uniforms.accept, uniforms.final],
        tensors[0],
        0.0 if numbers[0] is None else numbers[0],
        tensors[1],
        numbers[1],
        tensors[2],
        numbers[2],
        tensors[3],
        numbers[3],
        cell,
        backend,
    )
    return Verification(
        num_accepted=num_accepted, tokens=tokens, num_emitted=num_emitted, valid=valid, logprobs=logprobs
    )

"""The argument contract of each component, shared by its two bodies: what is accepted is the same, and so is every error.

Only what the host knows is checked; see `dsspark._checks`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from torch import Tensor

from dsspark._checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_block_size,
    check_cell,
    check_device,
    check_dtype,
    check_shape,
)
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Filters, PackedBatch, check_draft_to_target

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead


def check_draft_arguments(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Uniforms,
    hidden: Tensor | None,
    draft_to_target: Tensor | None,
    cell: int,
) -> None:
    """Raise unless the arguments of `draft_block` belong together."""
    check_shape("base_logits", base_logits, ("R", "gamma", "V_draft"))
    check_dtype("base_logits", base_logits, FLOAT_DTYPES)
    num_requests, block_size, vocab_size = base_logits.shape
    check_block_size("base_logits: gamma", block_size)
    if vocab_size < 1:
        raise ValueError("base_logits: got V_draft = 0, expected at least one token in the draft vocabulary")
    check_shape("anchors", anchors, (num_requests,))
    check_dtype("anchors", anchors, INT_DTYPES)
    check_device("anchors", anchors, "base_logits", base_logits)
    check_shape("uniforms.draft", uniforms.draft, (num_requests, block_size, 2))
    check_device("uniforms.draft", uniforms.draft, "base_logits", base_logits)
    check_draft_to_target(draft_to_target, base_logits)
    check_cell(cell)
    if head is None:
        return
    check_shape("head.markov_w2.weight", head.markov_w2.weight, (vocab_size, head.rank))
    check_device("head.markov_w1.weight", head.markov_w1.weight, "base_logits", base_logits)
    if anchors.device.type == "cpu":
        num_ids = head.markov_w1.weight.shape[0]
        largest = vocab_size - 1 if draft_to_target is None else int(draft_to_target[-1])
        if largest >= num_ids:
            raise ValueError(
                f"head: got {num_ids} rows of W1, expected at least {largest + 1}: one for every target id the draft can emit"
            )
        if bool(((anchors < 0) | (anchors >= num_ids)).any()):
            raise ValueError(
                f"anchors: got ids outside 0..{num_ids - 1}, expected target ids that index the rows of W1"
            )
    if head.kind != "vanilla":
        if hidden is None:
            raise ValueError(
                f"hidden: got None, expected the backbone's hidden states [R, gamma, d] for a {head.kind} head"
            )
        check_shape("hidden", hidden, (num_requests, block_size, head.hidden_size or "d"))
        check_device("hidden", hidden, "base_logits", base_logits)


def check_verify_arguments(
    target_logits: Tensor, batch: PackedBatch, draft: DraftBlock, uniforms: Uniforms, filters: Filters | None, cell: int
) -> None:
    """Raise unless the arguments of `verify` belong together."""
    check_shape("target_logits", target_logits, ("N", "V"))
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    num_rows, vocab_size = target_logits.shape
    if vocab_size < 1:
        raise ValueError("target_logits: got V = 0, expected at least one token in the vocabulary")
    num_requests, block_size = batch.num_requests, draft.tokens.shape[1]
    check_shape("draft.tokens", draft.tokens, (num_requests, "gamma"))
    check_shape("uniforms.accept", uniforms.accept, (num_requests, block_size))
    for name, tensor in (
        ("batch.cu_seqlens", batch.cu_seqlens),
        ("draft.tokens", draft.tokens),
        ("uniforms.accept", uniforms.accept),
    ):
        check_device(name, tensor, "target_logits", target_logits)
    check_cell(cell)
    check_filters(filters, num_requests, target_logits)
    if target_logits.device.type == "cpu" and int(batch.num_tokens) > num_rows:
        raise ValueError(
            f"target_logits: got {num_rows} rows, expected one for each of the {int(batch.num_tokens)} packed tokens; "
            "raise the capacity of pack(...) or verify fewer drafts"
        )


def check_filters(filters: Filters | None, num_requests: int, like: Tensor) -> None:
    """Raise `ValueError` unless every tensor in `filters` is a scalar or [R], on the device of `like`."""
    for field in () if filters is None else fields(filters):
        value = getattr(filters, field.name)
        if isinstance(value, Tensor):
            if value.dim() > 0:
                check_shape(f"filters.{field.name}", value, (num_requests,))
            check_device(f"filters.{field.name}", value, "target_logits", like)

"""Faults of drafting: the q that is told is not the q that was sampled; heads off by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsspark.models.heads import MarkovHead
from dsspark.numerics import row_weights
from dsspark.randomness import Uniforms
from dsspark.reference import markov
from dsspark.testing.mutants.mutant import Mutant, swapped
from dsspark.types import DraftBlock

draft_block = markov.draft_block


def _described(block: DraftBlock, logits: Tensor | None = None, temperature: float | Tensor = 1.0) -> DraftBlock:
    """Return the block's tokens with another law told of them."""
    told = block.logits if logits is None else logits
    assert told is not None
    return DraftBlock.from_logits(block.tokens, told, temperature, block.draft_to_target)


def argmax_told_as_softmax(*args: Any, temperature: float = 1.0, **kwargs: Any) -> DraftBlock:
    """Take the argmax and report the softmax."""
    return _described(draft_block(*args, temperature=0.0, **kwargs), temperature=temperature)


def told_at_temperature_one(*args: Any, **kwargs: Any) -> DraftBlock:
    """Draw at T and report the law at 1."""
    return _described(draft_block(*args, **kwargs))


def top_k_drawn(base_logits: Tensor, *args: Any, temperature: float = 1.0, **kwargs: Any) -> DraftBlock:
    """Draw from the two most probable tokens and report the whole law."""

    def filtered(logits: Tensor, row_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best = logits.topk(min(2, logits.shape[1]), dim=-1)
        return row_weights(torch.full_like(logits, -torch.inf).scatter_(1, best.indices, best.values), row_temperature)

    with swapped(markov, "row_weights", filtered):
        block = draft_block(base_logits, *args, temperature=temperature, **kwargs)
    return _described(block, temperature=temperature)


def drawn_in_bfloat16(base_logits: Tensor, *args: Any, temperature: float = 1.0, **kwargs: Any) -> DraftBlock:
    """Draw from logits rounded to bfloat16 and report the float32 law."""
    exact = draft_block(base_logits, *args, temperature=temperature, **kwargs)
    rounded = draft_block(base_logits.to(torch.bfloat16), *args, temperature=temperature, **kwargs)
    return _described(rounded, exact.logits, temperature)


def drawn_without_the_anchor(base_logits: Tensor, anchors: Tensor, *args: Any, **kwargs: Any) -> DraftBlock:
    """Correct position 1 by token 0 instead of the anchor."""
    return draft_block(base_logits, torch.zeros_like(anchors), *args, **kwargs)


def drawn_with_a_late_state(*args: Any, **kwargs: Any) -> DraftBlock:
    """Give the RNN head the state of one step before."""
    original = markov.latent_step
    pending: list[Tensor | None] = []

    def late(
        head: MarkovHead, previous_tokens: Tensor, hidden: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        latent, following = original(head, previous_tokens, hidden, state)
        pending.append(following)
        return latent, state if len(pending) < 2 else pending[-2]

    with swapped(markov, "latent_step", late):
        return draft_block(*args, **kwargs)


def drawn_with_the_next_hidden(*args: Any, hidden: Tensor | None = None, **kwargs: Any) -> DraftBlock:
    """Read h of the position after."""
    return draft_block(*args, hidden=None if hidden is None else hidden.roll(-1, dims=1), **kwargs)


def drawn_with_one_number(
    base_logits: Tensor, anchors: Tensor, head: MarkovHead | None, uniforms: Uniforms, **kwargs: Any
) -> DraftBlock:
    """Use the first position's numbers at every position."""
    repeated = uniforms.draft[:, :1].expand_as(uniforms.draft)
    return draft_block(
        base_logits, anchors, head, Uniforms(draft=repeated, accept=uniforms.accept, final=uniforms.final), **kwargs
    )


DRAFTING_MUTANTS = (
    Mutant(
        name="softmax q for an argmax draft",
        fault="greedy drafts verified with the drafter's softmax probability instead of a one-hot",
        check="law",
        parts={"draft_block": argmax_told_as_softmax},
    ),
    Mutant(
        name="q at the wrong temperature",
        fault="drafts drawn at the request's temperature, q computed at 1",
        check="law",
        parts={"draft_block": told_at_temperature_one},
    ),
    Mutant(
        name="top-k on the draw but not in q",
        fault="a filtered draft distribution is sampled, the unfiltered one enters the ratio",
        check="law",
        parts={"draft_block": top_k_drawn},
    ),
    Mutant(
        name="bfloat16 draw, float32 ratio",
        fault="the softmax that is sampled and the softmax of the ratio have different precision",
        check="law by bisection",
        parts={"draft_block": drawn_in_bfloat16},
    ),
    Mutant(
        name="one random number for the whole block",
        fault="the draft loop does not advance its generator",
        check="law",
        parts={"draft_block": drawn_with_one_number},
    ),
    Mutant(
        name="slot 0 ignores the anchor",
        fault="off by one: the first correction reads token 0; q is truthful, so no law changes",
        check="oracle equality",
        parts={"draft_block": drawn_without_the_anchor},
    ),
    Mutant(
        name="RNN state late by one",
        fault="the recurrent head corrects with the state of the position before; q is truthful, so no law changes",
        check="oracle equality",
        parts={"draft_block": drawn_with_a_late_state},
    ),
    Mutant(
        name="hidden state of the next position",
        fault="off by one in the backbone's slots; q is truthful, so no law changes",
        check="oracle equality",
        parts={"draft_block": drawn_with_the_next_hidden},
    ),
)

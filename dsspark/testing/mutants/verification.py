"""Faults of verification: acceptance, residual, bonus, edges, filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dsspark.reference import filters as filters_module
from dsspark.reference import rejection
from dsspark.reference.sampling import first_exceeding
from dsspark.testing.mutants.mutant import Mutant, with_stage
from dsspark.types import DraftBlock, Filters, PackedBatch, Verification

verify = rejection.verify


def _with(name: str, stage: Callable[..., Any]) -> dict[str, Any]:
    return {"verify": with_stage(verify, rejection, name, stage)}


def target_law(p: Tensor, q: Tensor) -> Tensor:
    """Resample from p."""
    return p


def law_at_the_token_only(draft: DraftBlock, requests: Tensor, position: int, vocab_size: int) -> Tensor:
    """Give q at the drafted token and 0 elsewhere."""
    law = rejection_draft_law(draft, requests, position, vocab_size)
    tokens = draft.tokens[requests, position, None].clamp(0, vocab_size - 1)
    return torch.zeros_like(law).scatter_(1, tokens, law.gather(1, tokens))


rejection_draft_law = rejection.draft_law


def accepts_at_equality(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Accept iff u <= p / q."""
    return u * q <= p


def accepts_with_clamped_q(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Keep q away from zero "for stability"."""
    return u * q.clamp(min=1e-5) < p


def residual_above_threshold(p: Tensor, q: Tensor) -> Tensor:
    """Call everything up to 1e-8 zero."""
    weights = (p - q).clamp(min=0)
    weights = torch.where(weights > 1e-8, weights, 0.0)
    return torch.where(weights.sum(dim=-1, keepdim=True) == 0, p, weights)


def residual_or_last_token(p: Tensor, q: Tensor) -> Tensor:
    """Emit token V - 1 where the residual is empty."""
    weights = (p - q).clamp(min=0)
    last = F.one_hot(torch.tensor(p.shape[1] - 1), p.shape[1]).to(p.dtype)
    return torch.where(weights.sum(dim=-1, keepdim=True) == 0, last, weights)


def draws_reaching(weights: Tensor, uniforms: Tensor, *, cell: int) -> Tensor:
    """Take the first token whose running mass *reaches* u: at u = 0 one of no mass."""
    cells = rearrange(F.pad(weights, (0, -weights.shape[1] % cell)), "n (c w) -> n c w", w=cell)

    def reaching(running: Tensor, u: Tensor) -> Tensor:
        return torch.searchsorted(running, (u[:, None] * running[:, -1:]).contiguous(), right=False)[:, 0]

    chosen = reaching(cells.sum(dim=-1).cumsum(dim=-1), uniforms[:, 0])
    inside = cells[torch.arange(len(cells)), chosen].cumsum(dim=-1)
    return (chosen * cell + reaching(inside, uniforms[:, 1])).clamp(max=weights.shape[1] - 1)


def draws_with_padded_lanes(weights: Tensor, uniforms: Tensor, *, cell: int) -> Tensor:
    """Fill the masked lanes of the last cell with exp(0) instead of 0."""
    padded = F.pad(weights, (0, -weights.shape[1] % cell), value=1.0)
    cells = rearrange(padded, "n (c w) -> n c w", w=cell)
    chosen = first_exceeding(cells.sum(dim=-1).cumsum(dim=-1), uniforms[:, 0])
    inside = cells[torch.arange(len(cells)), chosen].cumsum(dim=-1)
    return (chosen * cell + first_exceeding(inside, uniforms[:, 1])).clamp(max=weights.shape[1] - 1)


def verify_truncated(
    target_logits: Tensor, batch: PackedBatch, draft: DraftBlock, *args: Any, **kwargs: Any
) -> Verification:
    """Cut the target's row to the draft's vocabulary."""
    rows = target_logits.clone()
    if draft.logits is not None and draft.logits.shape[2] < rows.shape[1]:
        rows[:, draft.logits.shape[2] :] = -torch.inf
    return verify(rows, batch, draft, *args, **kwargs)


def verify_bonus_row_before(target_logits: Tensor, batch: PackedBatch, *args: Any, **kwargs: Any) -> Verification:
    """Draw the bonus token from the last draft's own row."""
    rows = target_logits.clone()
    last = batch.cu_seqlens[1:].long() - 1
    first = batch.cu_seqlens[:-1].long()
    rows[last] = target_logits[torch.maximum(last - 1, first)]
    return verify(rows, batch, *args, **kwargs)


def verify_negative_index(
    target_logits: Tensor, batch: PackedBatch, draft: DraftBlock, *args: Any, **kwargs: Any
) -> Verification:
    """Let the placeholder -1 index the last token."""
    tokens = torch.where(draft.tokens < 0, target_logits.shape[1] + draft.tokens, draft.tokens)
    return verify(target_logits, batch, replace(draft, tokens=tokens), *args, **kwargs)


def verify_next_request(
    target_logits: Tensor, batch: PackedBatch, draft: DraftBlock, *args: Any, **kwargs: Any
) -> Verification:
    """Read q from the row of the request beside this one, as after a batch reorder."""
    assert draft.logits is not None or bool((draft.temperature == 0).all())
    if draft.logits is None:
        return verify(target_logits, batch, draft, *args, **kwargs)
    # Rows are point-major with two requests each: the neighbour of row i is row i ^ 1.
    neighbour = (torch.arange(len(draft.tokens)) ^ 1).clamp(max=len(draft.tokens) - 1)
    stale = DraftBlock.from_logits(draft.tokens, draft.logits[neighbour], draft.temperature, draft.draft_to_target)
    return verify(target_logits, batch, stale, *args, **kwargs)


def verify_filtering_the_bonus_only(
    target_logits: Tensor, batch: PackedBatch, *args: Any, filters: Filters | None = None, **kwargs: Any
) -> Verification:
    """Apply the filters to the bonus row and to no other."""
    if filters is None:
        return verify(target_logits, batch, *args, **kwargs)
    rows = target_logits.clone()
    bonus = batch.cu_seqlens[1:].long() - 1
    weights, _ = filters_module.target_weights(rows[bonus], torch.ones(len(bonus)), filters)
    rows[bonus] = torch.where(weights > 0, rows[bonus], -torch.inf)
    return verify(rows, batch, *args, **kwargs)


def verify_keeping_ties(
    target_logits: Tensor, *args: Any, filters: Filters | None = None, **kwargs: Any
) -> Verification:
    """Keep every token that ties with the k-th."""
    if filters is None or not isinstance(filters.top_k, int):
        return verify(target_logits, *args, **kwargs)
    least = target_logits.topk(filters.top_k, dim=-1).values[:, -1:]
    return verify(torch.where(target_logits >= least, target_logits, -torch.inf), *args, **kwargs)


VERIFICATION_MUTANTS = (
    Mutant(
        name="residual from p",
        fault="the correction is drawn from the target's law instead of max(0, p - q)",
        check="law",
        parts=_with("residual", target_law),
    ),
    Mutant(
        name="residual subtracts q only at the drafted token",
        fault="a drafter without full probabilities: p with the rejected token reduced, the rest of q forgotten",
        check="law",
        parts=_with("draft_law", law_at_the_token_only),
    ),
    Mutant(
        name="u <= p / q",
        fault="a draw of exactly 0 accepts a token of probability 0",
        check="boundary draw",
        parts=_with("accepts", accepts_at_equality),
    ),
    Mutant(
        name="epsilon-clamped q",
        fault="q + eps or max(q, eps) in the ratio rejects improbable drafts too often",
        check="law by bisection",
        parts=_with("accepts", accepts_with_clamped_q),
    ),
    Mutant(
        name="residual threshold at 1e-8",
        fault="a small residual counts as empty, and the rejected token can come back",
        check="boundary draw",
        parts=_with("residual", residual_above_threshold),
    ),
    Mutant(
        name="empty residual gives the last token",
        fault="an all-zero row makes the sampler return V - 1",
        check="boundary draw",
        parts=_with("residual", residual_or_last_token),
    ),
    Mutant(
        name="a draw of 0 picks a token of no mass",
        fault="inverse CDF with >= instead of >: u = 0 returns token 0 whatever its probability",
        check="boundary draw",
        parts=_with("sample_two_level", draws_reaching),
    ),
    Mutant(
        name="masked lanes of the last tile win",
        fault="padding of a vocabulary that is no multiple of the block is filled with exp(0)",
        check="law",
        parts=_with("sample_two_level", draws_with_padded_lanes),
    ),
    Mutant(
        name="target truncated to the draft vocabulary",
        fault="p is cut to the reduced draft vocabulary, so tokens outside of it are never emitted",
        check="law",
        parts={"verify": verify_truncated},
    ),
    Mutant(
        name="bonus from the wrong row",
        fault="off by one: the bonus token is drawn from the row of the last draft",
        check="law",
        parts={"verify": verify_bonus_row_before},
    ),
    Mutant(
        name="-1 accepted",
        fault="a placeholder draft token indexes the last vocabulary entry",
        check="boundary draw",
        parts={"verify": verify_negative_index},
    ),
    Mutant(
        name="another request's row of q",
        fault="a stale slot after a batch reorder: the ratio uses a neighbour's draft logits",
        check="joint law",
        parts={"verify": verify_next_request},
    ),
    Mutant(
        name="filters reach the bonus row only",
        fault="a mask or top-k that the acceptance test and the residual do not see",
        check="law under filters",
        parts={"verify": verify_filtering_the_bonus_only},
    ),
    Mutant(
        name="top-k keeps every tie",
        fault="ties at the k-th token are kept in one path and cut in another",
        check="law under filters",
        parts={"verify": verify_keeping_ties},
    ),
)

"""The rounds that `test_distributed.py` runs on 1, 2 and 4 ranks: whole tensors from a seed, of which each rank takes its part."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from breakpoints import MARGIN, away_from_breakpoints
from torch import Tensor

import dsspark
from dsspark.reference.filters import select_requests, target_weights
from dsspark.reference.rejection import draft_law, residual

GAMMA = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One round. `inner` are the shard offsets on four ranks; two ranks split at the middle one."""

    name: str
    vocab: int = 53
    cell: int = 4
    inner: tuple[int, int, int] = (8, 28, 32)
    requests: int = 24
    dtype: torch.dtype = torch.float32
    kind: str | None = "vanilla"
    keep_logits: bool = True
    filters: str = "none"
    rounded: bool = False  # integer logits: ties everywhere
    faults: bool = False
    draft_ids: bool = False  # a draft vocabulary of its own
    point: bool = False
    doubted: bool = False  # q(x) overstated where p == q: rejects although the residual is empty
    arbitrary: bool = False  # uniforms as drawn, near breakpoints or not
    draft_vocab: int | None = None  # q over a prefix (or an extension) of the target's ids

    def bounds(self, world: int) -> tuple[int, ...]:
        inner = {1: (), 2: self.inner[1:2], 4: self.inner}[world]
        return (0, *inner, self.vocab)


CASES = [
    Case(name="vanilla"),
    Case(name="recomputed", keep_logits=False, dtype=torch.bfloat16),
    Case(name="gated", kind="gated", dtype=torch.float16),
    Case(name="rnn", kind="rnn", keep_logits=False),
    Case(name="parallel only, arbitrary uniforms", kind=None, requests=300, arbitrary=True),
    Case(name="ties", kind=None, rounded=True, dtype=torch.bfloat16),
    Case(name="faults", faults=True),
    Case(name="top-k", filters="top_k", rounded=True),
    Case(name="top-p", filters="top_p", dtype=torch.bfloat16),
    Case(name="all filters", filters="all", rounded=True, dtype=torch.float16, requests=48),
    Case(name="bad filters", filters="bad"),
    Case(name="draft ids", draft_ids=True),
    Case(name="draft ids recomputed", draft_ids=True, keep_logits=False),
    Case(name="smaller draft vocabulary", draft_vocab=41),
    Case(name="larger draft vocabulary", draft_vocab=61),
    Case(name="point", point=True),
    Case(name="empty residual", kind=None, doubted=True),
    Case(name="real cells", vocab=8193, cell=256, inner=(1024, 1280, 7936), requests=6, dtype=torch.bfloat16),
    Case(name="no requests", requests=0),
]


@dataclass(frozen=True, kw_only=True)
class Round:
    """The whole tensors of a case."""

    base: Tensor
    anchors: Tensor
    head: dsspark.MarkovHead | None
    hidden: Tensor
    uniforms: dsspark.Uniforms
    draft_temperature: Tensor
    temperature: Tensor
    draft_to_target: Tensor | None
    reference: dsspark.DraftBlock
    batch: dsspark.PackedBatch
    target_logits: Tensor
    filters: dsspark.Filters | None


def strided(values: Tensor) -> Tensor:
    """Return the values as a view whose rows are followed by +inf."""
    padded = torch.full((*values.shape[:-1], values.shape[-1] + 5), torch.inf, dtype=values.dtype)
    padded[..., :-5] = values
    return padded[..., :-5]


def random_logits(case: Case, generator: torch.Generator, *shape: int) -> Tensor:
    logits = torch.randn(shape, generator=generator) * 1.5
    return strided((logits.round() if case.rounded else logits).to(case.dtype))


def head_of(case: Case, draft_vocab: int, generator: torch.Generator) -> dsspark.MarkovHead | None:
    if case.kind is None:
        return None
    head = dsspark.MarkovHead(max(case.vocab, draft_vocab), 8, case.kind, 6, draft_vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return head


def filters_of(case: Case) -> dsspark.Filters | None:
    """Return per-request filters; "bad" has entries out of range, which make their requests invalid."""
    count = case.requests
    top_k = torch.arange(count) % 9
    top_p = torch.linspace(0.05, 1.0, count)
    if case.filters == "bad":
        return dsspark.Filters(top_k=torch.arange(count) - 1, top_p=top_p - 0.06, min_p=torch.linspace(0, 1.1, count))
    chosen = {"none": (), "top_k": ("top_k",), "top_p": ("top_p",), "all": ("top_k", "top_p", "min_p")}[case.filters]
    values = {"top_k": top_k, "top_p": top_p, "min_p": top_p.flip(0) * 0.3}
    return dsspark.Filters(**{name: values[name] for name in chosen}) if chosen else None


FAULTS = ((0, torch.nan), (30, torch.inf), (52, torch.nan), (9, torch.inf))
"""Columns on different ranks, and what to put there."""


def plant_draft_faults(base: Tensor) -> None:
    """Spoil a row of each of the first requests."""
    for request, (column, value) in enumerate(FAULTS):
        base[request, request % GAMMA, column] = value
    base[8, 1] = -torch.inf
    base[10, :, :50] = -torch.inf  # a law all the same


def plant_target_faults(target: Tensor, batch: dsspark.PackedBatch) -> None:
    """Spoil a row of each of the next requests."""
    starts, lengths = batch.cu_seqlens[:-1], batch.cu_seqlens.diff() - 1
    for request, (column, value) in enumerate(FAULTS, start=4):
        target[starts[request] + min(request % 2, int(lengths[request])), column] = value
    target[starts[9]] = -torch.inf
    target[starts[11], 1:] = -torch.inf  # a law all the same


def draft_vocabulary(case: Case) -> tuple[int, Tensor | None]:
    """Return V_draft, and the map where the drafter has ids of its own."""
    if not case.draft_ids:
        return case.draft_vocab or case.vocab, None
    # 4 of ids 0..7, 16 of 8..27, all of 28..31 and 10 of the rest: the draft's cells of 4 fit the target's ranks.
    ids = torch.tensor([0, 2, 3, 7, *range(12, 28), *range(28, 32), *range(33, 53, 2)])
    return len(ids), ids


@functools.cache
def build(case: Case) -> Round:
    """Return the round of a case; its uniforms lie `MARGIN` away from every breakpoint unless it wants arbitrary ones."""
    generator = torch.Generator().manual_seed(len(case.name))
    count = case.requests
    draft_vocab, draft_to_target = draft_vocabulary(case)
    cycle = torch.tensor([1.0, 0.0, 0.6, 1.7, 0.3])
    lengths = (torch.arange(count) * 7 // 3 + 2) % (GAMMA + 1)
    total = int((lengths + 1).sum())
    anchors = torch.randint(0, case.vocab, (count,), generator=generator)
    blank = torch.zeros(count, GAMMA, dtype=torch.int64)
    round_ = Round(
        base=random_logits(case, generator, count, GAMMA, draft_vocab),
        anchors=anchors,
        head=head_of(case, draft_vocab, generator),
        hidden=torch.randn(count, GAMMA, 6, generator=generator),
        uniforms=dsspark.Uniforms.draw(count, GAMMA, generator),
        draft_temperature=cycle[torch.arange(count) % 5],
        temperature=cycle[torch.arange(count) % 4],
        draft_to_target=draft_to_target,
        reference=dsspark.DraftBlock.point(blank),
        batch=dsspark.pack(anchors, blank, lengths, anchors),
        target_logits=random_logits(case, generator, total + 2, case.vocab),  # two rows of padding
        filters=filters_of(case),
    )
    settled = not case.arbitrary and count > 0
    if case.faults:
        round_.draft_temperature[13] = torch.nan
        plant_draft_faults(round_.base)
    if settled:
        round_ = dataclasses.replace(round_, uniforms=settle_draft(case, round_))
    resemble(case, round_, generator)
    if case.faults:
        round_.temperature[12] = -1.0
        plant_target_faults(round_.target_logits, round_.batch)
    block = reference_draft(case, round_, case.keep_logits)
    if case.point:
        placeholder = torch.rand(block.tokens.shape, generator=generator) < 0.1
        block = dsspark.DraftBlock.point(torch.where(placeholder, -1, block.tokens))
    if case.doubted:
        round_.temperature.copy_(round_.draft_temperature)
        block = dataclasses.replace(block, token_probs=torch.full_like(block.token_probs, 4.0))
    batch = dsspark.pack(anchors, block.tokens, lengths, anchors, capacity=total + 2)
    round_ = dataclasses.replace(round_, reference=block, batch=batch)
    return dataclasses.replace(round_, uniforms=settle_verification(case, round_)) if settled else round_


def resemble(case: Case, round_: Round, generator: torch.Generator) -> None:
    """Give the target's rows the draft's logits and some noise, so that drafts are accepted about half the time."""
    kept = reference_draft(case, round_, True).logits.float().nan_to_num(nan=0.0).clamp(-9, 9)
    ids = torch.arange(kept.shape[2]) if round_.draft_to_target is None else round_.draft_to_target
    inside = ids < case.vocab
    noise = 0.0 if case.doubted else torch.randn(kept.shape, generator=generator)
    similar = kept + (noise.round() if case.rounded else 0.7 * noise)
    starts, lengths = round_.batch.cu_seqlens[:-1], round_.batch.cu_seqlens.diff() - 1
    for k in range(GAMMA):
        for request in (lengths > k).nonzero()[:, 0].tolist():
            round_.target_logits[starts[request] + k, ids[inside]] = similar[request, k, inside].to(case.dtype)


def reference_draft(case: Case, round_: Round, keep_logits: bool) -> dsspark.DraftBlock:
    """Return what the single-rank reference drafts."""
    return dsspark.draft_block(
        round_.base,
        round_.anchors,
        round_.head,
        round_.uniforms,
        temperature=round_.draft_temperature,
        hidden=round_.hidden,
        draft_to_target=round_.draft_to_target,
        keep_logits=keep_logits,
        cell=case.cell,
        backend="reference",
    )


def settle_draft(case: Case, round_: Round) -> dsspark.Uniforms:
    """Move the draft's uniforms away from the breakpoints, position by position, as each law depends on the token before."""
    uniforms = round_.uniforms
    for k in range(GAMMA):
        block = reference_draft(case, dataclasses.replace(round_, uniforms=uniforms), True)
        weights, _ = target_weights(block.logits[:, k].double(), block.temperature.double())
        moved = uniforms.draft.clone()
        moved[:, k] = away_from_breakpoints(weights, moved[:, k], case.cell)
        uniforms = dataclasses.replace(uniforms, draft=moved)
    return uniforms


def settle_verification(case: Case, round_: Round) -> dsspark.Uniforms:
    """Move the acceptance and the final uniforms away from what they are compared with."""
    block, uniforms, starts = round_.reference, round_.uniforms, round_.batch.cu_seqlens[:-1]
    lengths = round_.batch.cu_seqlens.diff() - 1
    everyone = torch.arange(len(starts))
    accept = uniforms.accept.clone()

    def law(k: Tensor) -> Tensor:
        weights, total = target_weights(
            round_.target_logits[starts + k].double(),
            round_.temperature.double(),
            select_requests(round_.filters, everyone),
        )
        return weights / total[:, None]

    for k in range(GAMMA):
        tokens = block.tokens[:, k]
        inside = (tokens >= 0) & (tokens < case.vocab)
        p = law(torch.minimum(lengths, torch.tensor(k))).gather(1, torch.where(inside, tokens, 0)[:, None])[:, 0]
        ratio = torch.where(inside, p, 0.0) / block.token_probs[:, k].double()
        near = ((accept[:, k] - ratio).abs() < 2 * MARGIN) & (ratio < 1)
        accept[near, k] = (accept[near, k] + 0.25) % 0.999
    uniforms = dataclasses.replace(uniforms, accept=accept)
    result = reference_verify(case, dataclasses.replace(round_, uniforms=uniforms))
    accepted = result.num_accepted.to(torch.int64)
    weights = law(accepted)
    for k in range(GAMMA):
        rows = ((accepted == k) & (lengths > k)).nonzero()[:, 0]
        q = draft_law(block, rows, k, case.vocab).double()
        weights[rows] = residual(weights[rows], torch.where((weights[rows] - q).abs() < 1e-6, weights[rows], q))
    weights[~result.valid] = torch.nan
    final = away_from_breakpoints(weights, uniforms.final, case.cell)
    return dataclasses.replace(uniforms, final=final)


def reference_verify(case: Case, round_: Round) -> dsspark.Verification:
    """Return what the single-rank reference emits."""
    return dsspark.verify(
        round_.target_logits,
        round_.batch,
        round_.reference,
        round_.uniforms,
        temperature=round_.temperature,
        filters=round_.filters,
        cell=case.cell,
        backend="reference",
    )

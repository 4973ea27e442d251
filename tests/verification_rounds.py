"""Shared by the tests of the verification kernel: ragged rounds of every kind of draft, and uniforms where rounding cannot decide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from breakpoints import MARGIN, away_from_breakpoints, distance_to_breakpoints
from torch import Tensor

from dsspark import DraftBlock, Filters, MarkovHead, PackedBatch, Uniforms
from dsspark._checks import as_temperature
from dsspark.reference import rejection as reference
from dsspark.reference.filters import select_requests, target_weights
from dsspark.reference.markov import draft_block
from dsspark.reference.verification import pack

LENGTHS = [3, 0, 4, 1, 2, 4, 0, 4]
TEMPERATURE = torch.tensor([1.0, 0.0, 0.6, 1.7, 0.0, 1.0, 1.0, 0.3])
DRAFT_TEMPERATURE = torch.tensor([1.0, 1.0, 0.0, 1.7, 0.0, 0.8, 1.0, 0.3])
SOURCES = ("stored", "point", "recomputed", "unheaded", "mapped", "mapped-recomputed", "smaller", "larger")
ACCEPT_MARGIN = MARGIN


@dataclass(frozen=True)
class Round:
    """The arguments of `verify`."""

    rows: Tensor
    batch: PackedBatch
    draft: DraftBlock
    uniforms: Uniforms
    options: dict[str, Any]

    def run(self, verify, **changes):
        """Return what `verify` makes of the round."""
        return verify(self.rows, self.batch, self.draft, self.uniforms, **{**self.options, **changes})


def make_draft(source, lengths, vocab, dtype, uniforms, temperature, generator, block_size):
    """Return a block whose q comes from `source`, drafted by the reference."""
    requests = len(lengths)
    sizes = {"smaller": vocab - 6, "larger": vocab + 6, "mapped": vocab // 2, "mapped-recomputed": vocab // 2}
    size, rank = sizes.get(source, vocab), 6
    base = (torch.randn(requests, block_size, size, generator=generator) * 2).to(dtype)
    anchors = torch.randint(min(size, vocab), (requests,), generator=generator)
    ids = None
    if source.startswith("mapped"):  # some of its ids are beyond the target's
        ids = torch.randperm(vocab + 4, generator=generator)[:size].sort().values
    head = None
    if source.endswith("recomputed"):
        head = MarkovHead(max(size, vocab + 4), rank, draft_vocab_size=size).to(dtype)
        for weight in (head.markov_w1.weight, head.markov_w2.weight):
            weight.data = torch.randn(weight.shape, generator=generator).to(dtype)
    keep = not source.endswith(("recomputed", "unheaded"))
    draft = draft_block(
        base, anchors, head, uniforms, temperature=temperature, draft_to_target=ids, keep_logits=keep, cell=5
    )
    return DraftBlock.point(draft.tokens) if source == "point" else draft


def make_round(
    source="stored",
    *,
    lengths=LENGTHS,
    block_size=4,
    vocab=37,
    dtype=torch.float32,
    cell=12,
    temperature=TEMPERATURE,
    draft_temperature=DRAFT_TEMPERATURE,
    filters=None,
    generator=None,
    settle=True,
):
    """Return a round; `settle` moves its uniforms away from every breakpoint."""
    requests = len(lengths)
    uniforms = Uniforms.draw(requests, block_size, generator)
    draft = make_draft(source, lengths, vocab, dtype, uniforms, draft_temperature, generator, block_size)
    zeros = torch.zeros(requests, dtype=torch.int64)
    batch = pack(zeros, draft.tokens, torch.tensor(lengths, dtype=torch.int64), zeros)
    rows = torch.randn(len(batch.tokens), vocab, generator=generator) * 2
    likely = torch.rand(len(rows), generator=generator) < 0.6  # so that requests are rejected early, late and never
    followers = torch.cat((batch.tokens[1:], batch.tokens[:1])).clamp(max=vocab - 1)
    rows[likely, followers[likely]] += 5.0
    rows = rows.to(dtype)
    options = {"temperature": temperature, "filters": filters, "cell": cell}
    made = Round(rows, batch, draft, uniforms, options)
    return settled(made) if settle else made


def deciding_laws(made: Round, num_accepted: Tensor) -> Tensor:
    """Return the law that each request's last token is drawn from, [R, V] float64, unnormalised."""
    laws = []
    draft = made.draft
    exact = replace(
        draft,
        token_probs=draft.token_probs.double(),
        logits=None if draft.logits is None else draft.logits.double(),
        base_logits=None if draft.base_logits is None else draft.base_logits.double(),
    )
    for r, count in enumerate(num_accepted.tolist()):
        start, end = int(made.batch.cu_seqlens[r]), int(made.batch.cu_seqlens[r + 1])
        p = target_law(made, r, start + count)
        if count < end - start - 1:
            q = reference.draft_law(exact, torch.tensor([r]), count, p.shape[1])
            p = reference.residual(p, q)
        laws.append(p)
    return torch.cat(laws)


def target_law(made: Round, request: int, row: int) -> Tensor:
    """Return p of a row, [1, V] float64."""
    temperature = as_temperature(made.options["temperature"], made.batch.num_requests, made.rows)
    filters = select_requests(made.options["filters"], torch.tensor([request]))
    weights, total = target_weights(made.rows[row : row + 1].double(), temperature[request, None].double(), filters)
    return weights / total


def acceptance_ratios(made: Round) -> Tensor:
    """Return p / q of every drafted token that was packed, [R, gamma] float64; 0 elsewhere."""
    ratios = torch.zeros(made.draft.tokens.shape, dtype=torch.float64)
    for r in range(made.batch.num_requests):
        start, end = int(made.batch.cu_seqlens[r]), int(made.batch.cu_seqlens[r + 1])
        for k in range(end - start - 1):
            token = int(made.draft.tokens[r, k])
            if 0 <= token < made.rows.shape[1]:
                ratios[r, k] = target_law(made, r, start + k)[0, token] / made.draft.token_probs[r, k].double()
    return ratios


def settled(made: Round) -> Round:
    """Return the round with uniforms that are far, relatively, from every point at which its outcome changes."""
    ratio = acceptance_ratios(made)
    u = made.uniforms.accept.double().clamp(max=1 - ACCEPT_MARGIN)
    near = (u - ratio).abs() < ACCEPT_MARGIN * ratio
    accept = torch.where(near, ratio.clamp(max=1) * (1 - 2 * ACCEPT_MARGIN), u).float()
    made = replace(made, uniforms=Uniforms(draft=made.uniforms.draft, accept=accept, final=made.uniforms.final))
    laws = deciding_laws(made, made.run(reference.verify).num_accepted)
    final = away_from_breakpoints(laws, made.uniforms.final, made.options["cell"])
    return replace(made, uniforms=Uniforms(draft=made.uniforms.draft, accept=accept, final=final))


def nearness(made: Round) -> Tensor:
    """Return how near each request's uniforms are to a point at which its outcome changes, relatively, [R] float64."""
    ratio = acceptance_ratios(made)
    lengths = made.batch.cu_seqlens.diff() - 1
    drafted = torch.arange(ratio.shape[1]) < lengths[:, None]
    distance = torch.where(drafted, (made.uniforms.accept.double() / ratio - 1).abs(), torch.inf).amin(dim=1)
    laws = deciding_laws(made, made.run(reference.verify).num_accepted)
    return torch.minimum(distance, distance_to_breakpoints(laws, made.uniforms.final, made.options["cell"]))


def same(found, expected, logprobs=2e-5):
    """Assert that two verifications emit the same tokens, and log-probabilities but for rounding."""
    for name in ("num_accepted", "tokens", "num_emitted", "valid"):
        got, want = getattr(found, name).cpu(), getattr(expected, name).cpu()
        assert got.dtype == want.dtype
        assert torch.equal(got, want), f"{name}: {got.tolist()} for {want.tolist()}"
    assert found.logprobs.dtype == torch.float32
    assert (found.logprobs.cpu() - expected.logprobs.cpu()).abs().max() <= logprobs if len(found.valid) else True


FILTERS = (
    Filters(top_k=3),
    Filters(top_p=0.7),
    Filters(min_p=0.1),
    Filters(top_k=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]), top_p=0.9, min_p=torch.linspace(0, 0.3, 8)),
)

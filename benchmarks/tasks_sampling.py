"""The tasks whose cost is the vocabulary: drafting and verification."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dsspark
from benchmarks import baselines, floors
from benchmarks.cases import COMPETENT, PUBLIC, Case, Contender, backends, rarely, seeded
from benchmarks.sizes import Size
from dsspark.reference.sampling import sample_two_level


def _head(size: Size, device: str) -> dsspark.MarkovHead:
    torch.manual_seed(0)
    with torch.device(device):
        head = dsspark.MarkovHead(size.vocab_size, size.rank).requires_grad_(False).to(size.dtype)
    head.markov_w2.weight.mul_(4)  # a bias that moves the law
    return head


def _two_level(weights: Tensor, uniforms: Tensor) -> Tensor:
    return sample_two_level(weights, uniforms)


def draft_inputs(size: Size, device: str) -> SimpleNamespace:
    """Return what drafting takes."""
    generator = seeded(device)
    shape = size.num_requests, size.block_size, size.vocab_size
    return SimpleNamespace(
        base=torch.randn(shape, generator=generator, device=device).to(size.dtype),
        anchors=torch.randint(size.vocab_size, shape[:1], generator=generator, device=device),
        head=_head(size, device),
        uniforms=dsspark.Uniforms.draw(*shape[:2], generator, device),
    )


def markov(size: Size, device: str, *, keep_logits: bool = True) -> Case:
    """Draft a block; the head is vanilla."""
    inputs = draft_inputs(size, device)
    contenders = backends(
        dsspark.draft_block, lambda x: (x.base, x.anchors, x.head, x.uniforms), keep_logits=keep_logits
    )

    def eager(form: Callable[..., Any]) -> Contender:
        return Contender(
            run=lambda x: form(x.base, x.anchors, x.head, x.uniforms),
            comparable=lambda x: form(x.base, x.anchors, x.head, x.uniforms, draw=_two_level),
        )

    def agree(got: Any, expected: Any) -> None:
        if size.dtype == torch.float32 or isinstance(got, dsspark.DraftBlock):
            rarely((got.tokens != expected.tokens).any(dim=1), "tokens")
        else:  # the eager forms round the law once more; until the first draw their logits are the reference's but for that
            assert keep_logits is False or torch.allclose(got.logits[:, 0], expected.logits[:, 0], rtol=2e-2, atol=2e-2)

    return Case(
        name="markov" if keep_logits else "markov, recomputed",
        size=size,
        inputs=inputs,
        contenders={
            **contenders,
            PUBLIC: eager(baselines.draft_block_public),
            COMPETENT: eager(baselines.draft_block_competent),
        },
        agree=agree,
        floor_bytes=floors.markov(size, keep_logits=keep_logits),
    )


def rejection(size: Size, device: str) -> Case:
    """Verify blocks of full length whose target is the drafter's law with noise: about 0.9 of the drafts reached are accepted."""
    x = draft_inputs(size, device)
    block = dsspark.draft_block(x.base, x.anchors, x.head, x.uniforms, backend="reference")
    full = torch.full((size.num_requests,), size.block_size, device=device)
    batch = dsspark.pack(x.anchors, block.tokens, full, torch.zeros_like(full), backend="reference")
    shape = size.num_requests, size.block_size + 1, size.vocab_size
    target = torch.randn(shape, generator=seeded(device), device=device) / 4
    target[:, :-1] += block.logits
    target = target.to(size.dtype).flatten(0, 1)
    inputs = SimpleNamespace(target=target, batch=batch, block=block, uniforms=x.uniforms)
    contenders = backends(dsspark.verify, lambda x: (x.target, x.batch, x.block, x.uniforms))

    def padded(x: SimpleNamespace) -> Tensor:
        return x.target.view(x.block.logits.shape[0], -1, x.target.shape[1])

    def public(x: SimpleNamespace, draw: baselines.Draw = baselines.multinomial) -> Any:
        return baselines.verify_public(padded(x), x.block.logits, x.block.tokens, x.uniforms, draw=draw)

    def competent(x: SimpleNamespace, draw: baselines.Draw = baselines.inverse_cdf) -> Any:
        return baselines.verify_competent(
            padded(x), x.block.logits, x.block.tokens, x.block.token_probs, x.uniforms, draw=draw
        )

    def agree(got: Any, expected: Any) -> None:
        rarely(got.num_accepted != expected.num_accepted, "num_accepted")
        if isinstance(got, dsspark.Verification):
            rarely((got.tokens != expected.tokens).any(dim=1), "tokens")
        else:
            last = expected.tokens.gather(1, expected.num_accepted[:, None].long())[:, 0]
            rarely((got.final != last) & (got.num_accepted == expected.num_accepted), "final")

    accepted = dsspark.verify(
        inputs.target, inputs.batch, inputs.block, inputs.uniforms, backend="reference"
    ).num_accepted
    return Case(
        name="rejection",
        size=size,
        inputs=inputs,
        contenders={
            **contenders,
            PUBLIC: Contender(run=public, comparable=lambda x: public(x, _two_level)),
            COMPETENT: Contender(run=competent, comparable=lambda x: competent(x, _two_level)),
        },
        agree=agree,
        floor_bytes=floors.rejection(size, rejected=int((accepted < size.block_size).sum())),
        facts={"mean_accepted": float(accepted.float().mean())},
    )

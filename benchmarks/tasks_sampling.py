"""The tasks whose cost is the vocabulary: drafting and verification."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dsspark
from benchmarks import baselines, floors
from benchmarks.cases import COMPETENT, PUBLIC, Case, Contender, backends, moved_to, rarely, seeded
from benchmarks.sizes import Size
from dsspark.reference.sampling import sample_two_level


def _head(size: Size) -> dsspark.MarkovHead:
    torch.manual_seed(0)
    head = dsspark.MarkovHead(size.vocab_size, size.rank).requires_grad_(False).to(size.dtype)
    head.markov_w2.weight.mul_(4)  # a bias that moves the law
    return head


def _two_level(weights: Tensor, uniforms: Tensor) -> Tensor:
    return sample_two_level(weights, uniforms)


def block_inputs(size: Size) -> tuple[SimpleNamespace, dsspark.DraftBlock]:
    """Return what drafting takes, and the block that the reference drafts from it."""
    generator = seeded()
    base = torch.randn(size.num_requests, size.block_size, size.vocab_size, generator=generator).to(size.dtype)
    inputs = SimpleNamespace(
        base=base,
        anchors=torch.randint(size.vocab_size, (size.num_requests,), generator=generator),
        head=_head(size),
        uniforms=dsspark.Uniforms.draw(size.num_requests, size.block_size, generator),
    )
    return inputs, dsspark.draft_block(base, inputs.anchors, inputs.head, inputs.uniforms, backend="reference")


def markov(size: Size, device: str, *, keep_logits: bool = True) -> Case:
    """Draft a block; the head is vanilla."""
    inputs = moved_to(block_inputs(size)[0], device)
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
    draft_inputs, block = block_inputs(size)
    full = torch.full((size.num_requests,), size.block_size)
    batch = dsspark.pack(draft_inputs.anchors, block.tokens, full, torch.zeros_like(full), backend="reference")
    target = torch.randn(size.num_requests, size.block_size + 1, size.vocab_size, generator=seeded()) / 4
    target[:, :-1] += block.logits
    inputs = moved_to(
        SimpleNamespace(
            target=target.to(size.dtype).flatten(0, 1), batch=batch, block=block, uniforms=draft_inputs.uniforms
        ),
        device,
    )
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

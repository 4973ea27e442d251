"""The task of training: the losses of a batch of slots and their gradient."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import floors
from benchmarks.cases import COMPETENT, KERNEL, PUBLIC, REFERENCE, Case, Contender, moved_to, seeded
from benchmarks.sizes import Size
from dsspark._dispatch import Backend, dispatched
from dsspark.reference import losses as reference

slot_losses = dispatched(reference.slot_losses)

CE_WEIGHT, L1_WEIGHT = 0.1, 0.9
"""Paper equation 12."""

Losses = tuple[Tensor, Tensor, Tensor]
"""Cross-entropy [S], distance [S] and the gradient [S, V] of their weighted sum."""


@torch.enable_grad()
def losses_public(draft: Tensor, target: Tensor, labels: Tensor) -> Losses:
    """As public training code writes it: two softmaxes in float32 under autograd."""
    leaf = draft.detach().requires_grad_()
    logits = leaf.float()
    cross_entropy = F.cross_entropy(logits, labels, reduction="none")
    distance = (logits.softmax(-1) - target.float().softmax(-1)).abs().sum(-1)
    total = (CE_WEIGHT * cross_entropy + L1_WEIGHT * distance).sum()
    return cross_entropy.detach(), distance.detach(), torch.autograd.grad(total, leaf)[0]


def losses_competent(draft: Tensor, target: Tensor, labels: Tensor) -> Losses:
    """By hand, in place, one softmax shared by both losses and by the gradient; every slot at once."""
    q, p = draft.float().log_softmax(-1), target.float().softmax(-1)
    cross_entropy = -q.gather(1, labels[:, None])[:, 0]
    difference = q.exp_().sub(p)
    distance = difference.abs().sum(-1)
    side = difference.sign_()
    drift = (side * q).sum(-1, keepdim=True)
    gradient = side.sub_(drift).mul_(L1_WEIGHT).add_(CE_WEIGHT).mul_(q)
    gradient.scatter_add_(1, labels[:, None], torch.full_like(drift, -CE_WEIGHT))
    return cross_entropy, distance, gradient.to(draft.dtype)


def losses(size: Size, device: str) -> Case:
    """Cross-entropy, distance and their gradient, forward and backward."""
    generator = seeded()
    shape = size.num_requests * size.block_size, size.vocab_size
    target = 3 * torch.randn(shape, generator=generator)
    inputs = moved_to(
        SimpleNamespace(
            draft=(target + torch.randn(shape, generator=generator)).to(size.dtype),
            target=target.to(size.dtype),
            labels=torch.randint(size.vocab_size, shape[:1], generator=generator),
        ),
        device,
    )

    def ours(backend: Backend) -> Contender:
        @torch.enable_grad()
        def run(x: SimpleNamespace) -> Losses:
            leaf = x.draft.detach().requires_grad_()
            found = slot_losses(leaf, x.target, x.labels, backend=backend)
            weights = torch.full_like(found.distance, CE_WEIGHT), torch.full_like(found.distance, L1_WEIGHT)
            gradient = torch.autograd.grad(tuple(found), leaf, weights)[0]
            return found.cross_entropy.detach(), found.distance.detach(), gradient

        return Contender(run=run)

    def agree(got: Losses, expected: Losses) -> None:
        for name, mine, other in zip(("cross_entropy", "distance"), got, expected, strict=False):
            assert torch.allclose(mine, other, rtol=1e-4, atol=1e-4), f"{name}: {mine[:4]}, {other[:4]}"
        scale = expected[2].float().abs().amax()
        apart = (got[2].float() - expected[2].float()).abs().amax()
        assert apart <= 1e-2 * scale, f"gradient: {apart} apart, the largest is {scale}"

    return Case(
        name="losses",
        size=size,
        inputs=inputs,
        contenders={
            REFERENCE: ours("reference"),
            KERNEL: ours("triton"),
            PUBLIC: Contender(run=lambda x: losses_public(x.draft, x.target, x.labels)),
            COMPETENT: Contender(run=lambda x: losses_competent(x.draft, x.target, x.labels)),
        },
        agree=agree,
        floor_bytes=floors.losses(size),
    )

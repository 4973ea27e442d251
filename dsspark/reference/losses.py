r"""What a drafter is trained on: cross-entropy, distance to the target's law, and confidence (paper 3.3, eq. 8 and 12).

$$L = 0.1\, L_{CE} + 0.9\, L_1 + 1.0\, L_{conf}, \qquad L_\bullet = \frac{\sum_i w_i\, \ell_i}{\sum_i w_i}$$

over supervised slots i, with w_i = exp(-k / 4) at position k = 0, 1, ... of its block. Training is teacher-forced: the Markov head
reads the previous *true* token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsspark._checks import check_shape
from dsspark.loss_terms import (
    POSITION_DECAY,
    DraftLosses,
    SlotLosses,
    acceptance_label,
    check_slot_arguments,
    combined,
    position_weights,
    weighted_mean,
)
from dsspark.numerics import compute_dtype

__all__ = [
    "POSITION_DECAY",
    "DraftLosses",
    "SlotLosses",
    "acceptance_label",
    "draft_losses",
    "l1_distance",
    "position_weights",
    "slot_losses",
    "weighted_mean",
]

_ENTRIES_AT_ONCE = 1 << 20
"""Probabilities that exist at one moment: 4 MiB of q and as much of p, whatever the batch."""


def l1_distance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    r"""Return $|q - p|_1 = \sum_v |q(v) - p(v)|$ of every slot: twice the total variation, *without* the 1/2.

    Args:
        draft_logits: [..., V] float.
        target_logits: [..., V] float, the same shape. No gradient is taken through it.

    Returns:
        [...] float32 (float64 for float64 logits), in [0, 2].

    Raises:
        ValueError: for shapes that differ.

    Source: paper 3.3, eq. 12.
    """
    check_shape("target_logits", target_logits, tuple(draft_logits.shape))
    dtype = compute_dtype(draft_logits)
    q = draft_logits.to(dtype).softmax(dim=-1)
    p = target_logits.detach().to(dtype).softmax(dim=-1)
    return (q - p).abs().sum(dim=-1)


class _SlotLosses(torch.autograd.Function):
    """Forward and backward a few slots at a time; the logits are all that is kept between the two."""

    @staticmethod
    def forward(ctx: Any, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(draft_logits, target_logits, labels)
        cross_entropy = torch.empty(labels.shape, dtype=compute_dtype(draft_logits), device=labels.device)
        distance = torch.empty_like(cross_entropy)
        for slots in _chunks(draft_logits):
            log_q = draft_logits[slots].to(distance.dtype).log_softmax(dim=-1)
            p = target_logits[slots].to(distance.dtype).log_softmax(dim=-1).exp_()  # as q, so that ties stay ties
            cross_entropy[slots] = -log_q.gather(1, labels[slots, None].to(torch.int64))[:, 0]
            distance[slots] = log_q.exp_().sub_(p).abs_().sum(dim=-1)
        return cross_entropy, distance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, ce_gradient: Tensor, l1_gradient: Tensor) -> tuple[Tensor, None, None]:
        draft_logits, target_logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(draft_logits)
        for slots in _chunks(draft_logits):
            q = draft_logits[slots].to(l1_gradient.dtype).log_softmax(dim=-1).exp_()
            p = target_logits[slots].to(l1_gradient.dtype).log_softmax(dim=-1).exp_()
            ce, l1 = ce_gradient[slots, None], l1_gradient[slots, None]
            side = p.sub_(q).sign_().neg_()  # of q - p; 0 at a tie
            drift = (side * q).sum(dim=-1, keepdim=True)
            change = q.mul_(side.sub_(drift).mul_(l1).add_(ce))
            change.scatter_add_(1, labels[slots, None].to(torch.int64), -ce)
            # A slot that counts for nothing may hold NaN, which 0 * NaN would pass on.
            gradient[slots] = change.masked_fill_((ce == 0) & (l1 == 0), 0).to(gradient.dtype)
        return gradient, None, None


def _chunks(logits: Tensor) -> list[slice]:
    count, vocab_size = logits.shape
    size = max(1, _ENTRIES_AT_ONCE // vocab_size)
    return [slice(start, start + size) for start in range(0, count, size)]


def slot_losses(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> SlotLosses:
    r"""Return the cross-entropy and the distance of every slot, differentiable in the draft's logits.

    $$\ell_{CE} = -\log q(x), \qquad \ell_1 = \sum_v |q(v) - p(v)|$$

    with the gradients, written in the draft's logits,

    $$\frac{\partial \ell_{CE}}{\partial z_v} = q(v) - [v = x], \qquad
      \frac{\partial \ell_1}{\partial z_v} = q(v) \Big( s_v - \sum_u s_u q(u) \Big), \qquad s = \mathrm{sign}(q - p),$$

    where a tie, q(v) = p(v), has s_v = 0: the middle of the subgradients, so that a drafter which equals its target stays where it is.

    Args:
        draft_logits: [S, V] float.
        target_logits: [S, V] float. No gradient is taken through it.
        labels: [S] integers, the true tokens, in [0, V).

    Returns:
        `SlotLosses`, [S] each.

    Raises:
        ValueError: for shapes or devices that do not belong together.
        TypeError: for dtypes that are not listed.

    Numerics: laws and sums in float32 (float64 for float64 logits); the gradient is rounded once to the logits' dtype. A slot whose
        upstream gradients are 0 gets the gradient 0, whatever it holds. Deterministic.
    Cost: logits read once forward and once backward, one gradient written; never more than 2^20 entries of q and p in memory.
    Source: paper 3.3, eq. 8 and 12.

    Example:
        >>> logits = torch.zeros(1, 4, requires_grad=True)
        >>> losses = slot_losses(logits, torch.zeros(1, 4), torch.tensor([2]))
        >>> torch.autograd.grad(losses.distance.sum(), logits)[0].tolist()
        [[0.0, 0.0, 0.0, 0.0]]
    """
    check_slot_arguments(draft_logits, target_logits, labels)
    return SlotLosses(*_SlotLosses.apply(draft_logits, target_logits.detach(), labels))  # type: ignore[no-untyped-call]


def draft_losses(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    confidence_logits: Tensor | None = None,
    *,
    supervised: Tensor | None = None,
    decay: float = POSITION_DECAY,
    ce_weight: float = 0.1,
    l1_weight: float = 0.9,
    confidence_weight: float = 1.0,
) -> DraftLosses:
    r"""Return the losses of a batch of teacher-forced blocks (paper eq. 12).

    Args:
        draft_logits: U + B, [R, gamma, V] float; position k was corrected with the true token before it.
        target_logits: [R, gamma, V] float, the frozen target's on the same text.
        labels: [R, gamma] integers, the true tokens.
        confidence_logits: z, [R, gamma] float, or None without a head.
        supervised: [R, gamma] bool, the slots that count; all if None.
        decay: of the position weights.
        ce_weight: paper eq. 12.
        l1_weight: likewise; it multiplies $|q - p|_1$ without the 1/2.
        confidence_weight: likewise.

    Returns:
        `DraftLosses`. The confidence label is detached: it trains the head and the hidden states it reads, never q towards its own
        prediction.

    Raises:
        ValueError: for shapes that do not belong together or a negative weight.
        TypeError: for dtypes that are not listed.

    Numerics: laws, losses and means in float32 (float64 for float64 logits). No law is kept for the backward pass: see `slot_losses`.
        Deterministic.
    Source: paper 3.3, eq. 12; constants of the public code.

    Example:
        >>> logits = torch.zeros(1, 2, 4)
        >>> losses = draft_losses(logits, logits, torch.zeros(1, 2, dtype=torch.int64))
        >>> round(losses.cross_entropy.item(), 4), losses.distance.item(), losses.acceptance.item()
        (1.3863, 0.0, 1.0)
    """
    return combined(
        slot_losses,
        draft_logits,
        target_logits,
        labels,
        confidence_logits,
        supervised,
        decay,
        ce_weight,
        l1_weight,
        confidence_weight,
    )

"""What both bodies of the training losses share: their results, the position weights, and how the terms of a slot become one loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsspark._checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_block_size,
    check_device,
    check_dtype,
    check_range,
    check_shape,
)

POSITION_DECAY = 4.0
"""The public code's constant at gamma = 7; the paper writes exp(-(k - 1) / gamma)."""


@dataclass(frozen=True, kw_only=True)
class DraftLosses:
    """The weighted means of a batch, scalars.

    Attributes:
        total: what is minimised.
        cross_entropy: of the true tokens, in nats.
        distance: $|q - p|_1$, in [0, 2].
        confidence: binary cross-entropy of the confidence head, in nats; 0 without a head.
        acceptance: the mean of $1 - |q - p|_1 / 2$: how often a drafted token would be accepted. No gradient.
    """

    total: Tensor
    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    acceptance: Tensor


class SlotLosses(NamedTuple):
    """The two losses of each slot, [S] float32 (float64 for float64 logits).

    Attributes:
        cross_entropy: of the label under q, in nats.
        distance: $|q - p|_1$, in [0, 2].
    """

    cross_entropy: Tensor
    distance: Tensor


def check_slot_arguments(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> None:
    """Raise unless the arguments of `slot_losses` belong together."""
    check_shape("draft_logits", draft_logits, ("S", "V"))
    check_dtype("draft_logits", draft_logits, FLOAT_DTYPES)
    check_shape("target_logits", target_logits, tuple(draft_logits.shape))
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    check_device("target_logits", target_logits, "draft_logits", draft_logits)
    check_shape("labels", labels, (draft_logits.shape[0],))
    check_dtype("labels", labels, INT_DTYPES)
    check_device("labels", labels, "draft_logits", draft_logits)
    if draft_logits.shape[1] < 1:
        raise ValueError("draft_logits: got V = 0, expected at least one token")


def position_weights(
    block_size: int,
    decay: float = POSITION_DECAY,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return exp(-k / decay) for k = 0..gamma - 1, [gamma]: an early rejection wastes the rest of the block.

    Raises:
        ValueError: for a block size outside 1..32 or a decay that is not positive.
    """
    check_block_size("block_size", block_size)
    if not decay > 0:
        raise ValueError(f"decay: got {decay}, expected a positive number; use float('inf') for equal weights")
    return torch.exp(-torch.arange(block_size, dtype=dtype, device=device) / decay)


def acceptance_label(distance: Tensor) -> Tensor:
    r"""Return $c^* = 1 - \tfrac12 |q - p|_1 = \sum_v \min(q(v), p(v))$, detached (paper eq. 8).

    Numerics: clamped to [0, 1], which rounding may leave by an ulp and binary cross-entropy must not see.
    """
    return (1 - 0.5 * distance.detach()).clamp(0, 1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return sum(w * x) / sum(w); 0 where no slot has any weight. A slot of weight 0 may hold NaN."""
    values = torch.where(weights > 0, values, 0.0)
    return (values * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def combined(
    slot_losses: Callable[[Tensor, Tensor, Tensor], SlotLosses],
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    confidence_logits: Tensor | None,
    supervised: Tensor | None,
    decay: float,
    ce_weight: float,
    l1_weight: float,
    confidence_weight: float,
) -> DraftLosses:
    """Return `draft_losses` from the `slot_losses` of one body."""
    check_shape("draft_logits", draft_logits, ("R", "gamma", "V"))
    check_dtype("draft_logits", draft_logits, FLOAT_DTYPES)
    check_shape("target_logits", target_logits, tuple(draft_logits.shape))
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    num_blocks, block_size, _ = draft_logits.shape
    check_shape("labels", labels, (num_blocks, block_size))
    check_dtype("labels", labels, INT_DTYPES)
    for name, weight in (("ce_weight", ce_weight), ("l1_weight", l1_weight), ("confidence_weight", confidence_weight)):
        check_range(name, weight, 0.0, float("inf"), "leave a term out with 0")

    slots = slot_losses(draft_logits.flatten(0, 1), target_logits.flatten(0, 1), labels.flatten())
    dtype = slots.distance.dtype
    weights = position_weights(block_size, decay, dtype=dtype, device=draft_logits.device)
    weights = weights.expand(num_blocks, block_size)
    if supervised is not None:
        check_shape("supervised", supervised, (num_blocks, block_size))
        check_dtype("supervised", supervised, (torch.bool,))
        weights = weights * supervised
    distance = slots.distance.view_as(weights)
    label = acceptance_label(distance)
    confidence = torch.zeros((), dtype=dtype, device=draft_logits.device)
    if confidence_logits is not None:
        check_shape("confidence_logits", confidence_logits, (num_blocks, block_size))
        check_dtype("confidence_logits", confidence_logits, FLOAT_DTYPES)
        entropy = F.binary_cross_entropy_with_logits(confidence_logits.to(dtype), label, reduction="none")
        confidence = weighted_mean(entropy, weights)
    ce_mean = weighted_mean(slots.cross_entropy.view_as(weights), weights)
    l1_mean = weighted_mean(distance, weights)
    return DraftLosses(
        total=ce_weight * ce_mean + l1_weight * l1_mean + confidence_weight * confidence,
        cross_entropy=ce_mean,
        distance=l1_mean,
        confidence=confidence,
        acceptance=weighted_mean(label, weights),
    )

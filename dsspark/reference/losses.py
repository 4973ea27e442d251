r"""What a drafter is trained on: cross-entropy, distance to the target's law, and confidence (paper 3.3, eq. 8 and 12).

$$L = 0.1\, L_{CE} + 0.9\, L_1 + 1.0\, L_{conf}, \qquad L_\bullet = \frac{\sum_i w_i\, \ell_i}{\sum_i w_i}$$

over supervised slots i, with w_i = exp(-k / 4) at position k = 0, 1, ... of its block. Training is teacher-forced: the Markov head
reads the previous *true* token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsspark._checks import FLOAT_DTYPES, INT_DTYPES, check_block_size, check_dtype, check_range, check_shape
from dsspark.numerics import compute_dtype

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


def position_weights(
    block_size: int,
    decay: float = POSITION_DECAY,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return exp(-k / decay) for k = 0..gamma - 1, [gamma]: an early rejection wastes the rest of the block.

    Args:
        block_size: gamma.
        decay: positions over which the weight falls by a factor e; infinite for equal weights.
        dtype, device: of the result.

    Raises:
        ValueError: for a block size outside 1..32 or a decay that is not positive.

    Source: paper 3.3; the constant of the public code.
    """
    check_block_size("block_size", block_size)
    if not decay > 0:
        raise ValueError(f"decay: got {decay}, expected a positive number; use float('inf') for equal weights")
    return torch.exp(-torch.arange(block_size, dtype=dtype, device=device) / decay)


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


def acceptance_label(distance: Tensor) -> Tensor:
    r"""Return $c^* = 1 - \tfrac12 |q - p|_1 = \sum_v \min(q(v), p(v))$, detached (paper eq. 8).

    Args:
        distance: $|q - p|_1$ of `l1_distance`, any shape.

    Numerics: clamped to [0, 1], which rounding may leave by an ulp and binary cross-entropy must not see.
    Source: paper 3.3, eq. 8.
    """
    return (1 - 0.5 * distance.detach()).clamp(0, 1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return sum(w * x) / sum(w), a scalar; 0 where no slot has any weight. A slot of weight 0 may hold NaN.

    Args:
        values: x, any shape.
        weights: w >= 0, the same shape.

    Source: paper 3.3, eq. 12.
    """
    values = torch.where(weights > 0, values, 0.0)
    return (values * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


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

    Numerics: laws, losses and means in float32 (float64 for float64 logits). Deterministic.
    Source: paper 3.3, eq. 12; constants of the public code.

    Example:
        >>> logits = torch.zeros(1, 2, 4)
        >>> losses = draft_losses(logits, logits, torch.zeros(1, 2, dtype=torch.int64))
        >>> round(losses.cross_entropy.item(), 4), losses.distance.item(), losses.acceptance.item()
        (1.3863, 0.0, 1.0)
    """
    check_shape("draft_logits", draft_logits, ("R", "gamma", "V"))
    check_dtype("draft_logits", draft_logits, FLOAT_DTYPES)
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    num_blocks, block_size, _ = draft_logits.shape
    check_shape("labels", labels, (num_blocks, block_size))
    check_dtype("labels", labels, INT_DTYPES)
    for name, weight in (("ce_weight", ce_weight), ("l1_weight", l1_weight), ("confidence_weight", confidence_weight)):
        check_range(name, weight, 0.0, float("inf"), "leave a term out with 0")

    dtype = compute_dtype(draft_logits)
    weights = position_weights(block_size, decay, dtype=dtype, device=draft_logits.device)
    weights = weights.expand(num_blocks, block_size)
    if supervised is not None:
        check_shape("supervised", supervised, (num_blocks, block_size))
        check_dtype("supervised", supervised, (torch.bool,))
        weights = weights * supervised

    cross_entropy = F.cross_entropy(
        draft_logits.to(dtype).flatten(0, 1), labels.to(torch.int64).flatten(), reduction="none"
    )
    distance = l1_distance(draft_logits, target_logits)
    label = acceptance_label(distance)
    confidence = torch.zeros((), dtype=dtype, device=draft_logits.device)
    if confidence_logits is not None:
        check_shape("confidence_logits", confidence_logits, (num_blocks, block_size))
        check_dtype("confidence_logits", confidence_logits, FLOAT_DTYPES)
        slots = F.binary_cross_entropy_with_logits(confidence_logits.to(dtype), label, reduction="none")
        confidence = weighted_mean(slots, weights)
    ce_mean = weighted_mean(cross_entropy.view_as(weights), weights)
    l1_mean = weighted_mean(distance, weights)
    return DraftLosses(
        total=ce_weight * ce_mean + l1_weight * l1_mean + confidence_weight * confidence,
        cross_entropy=ce_mean,
        distance=l1_mean,
        confidence=confidence,
        acceptance=weighted_mean(label, weights),
    )

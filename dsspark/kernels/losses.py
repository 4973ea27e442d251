r"""The training losses of a slot and their gradient, without a law in memory (paper 3.3, eq. 8 and 12).

$$\ell_{CE} = \log \sum_v e^{z_v} - z_x, \qquad \ell_1 = \sum_v |q_v - p_v|, \qquad
  \frac{\partial}{\partial z_v} = g_{CE} (q_v - [v = x]) + g_1\, q_v \Big( s_v - \sum_u s_u q_u \Big), \quad s = \mathrm{sign}(q - p)$$

The forward kernel reads both rows twice (normalisers, then sums) and leaves five numbers a slot: the maximum and the weight sum of q and
of p, and the drift $\sum_u s_u q_u$. The backward kernel reads both rows once and writes the gradient. Bytes moved: 7 rows a slot, of
which the second reading comes from cache where two rows fit; the floor is 5, for the normalisers must be known before a difference is.
Autograd of two softmaxes keeps rows of float32 laws and moves 13 times the floor.

Departs from the reference where only the device can see: a label outside 0..V - 1 makes its slot's cross-entropy NaN. No float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark.kernels.describe import describe
from dsspark.kernels.elementwise import divide
from dsspark.kernels.launch import Variant, interpreted, launch
from dsspark.kernels.sampling import check_logits, rounded
from dsspark.loss_terms import POSITION_DECAY, DraftLosses, SlotLosses, check_slot_arguments, combined

_STATISTICS = 5
"""Numbers a slot that the backward pass needs: maximum and weight sum of q, of p, and the drift."""
_UNSPECIALISED = ("num_slots", "stride_x", "stride_gc", "stride_gl")


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; sizes are powers of two.

    Attributes:
        block_s: slots a program.
        block_v: tokens read at once.
        num_warps: warps a program.
    """

    block_s: int
    block_v: int
    num_warps: int = 8


def choose_config(vocab_size: int) -> Config:
    """Return the configuration for a vocabulary: a program takes one slot, or several short ones."""
    block_v = min(2048, int(triton.next_power_of_2(vocab_size)))
    return Config(block_s=max(1, min(64, 2048 // block_v)), block_v=block_v, num_warps=8 if block_v == 2048 else 4)


@triton.jit
def _tile(row_ptr, offs_v, stride_v, mask):
    """Return a tile of logits in float32, -inf outside."""
    return tl.load(row_ptr[:, None] + offs_v[None, :] * stride_v, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _running_statistics(x, top, total):
    """Return the maximum and the weight sum of a row after one more tile; the sum is NaN after a NaN or +inf."""
    finite = x < float("inf")  # false for NaN and +inf
    bad = tl.max(tl.where(finite, 0, 1), axis=1) > 0
    x = tl.where(finite, x, float("-inf"))
    higher = tl.maximum(top, tl.max(x, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
    return higher, tl.where(bad, float("nan"), total)


@triton.jit
def _law(x, top, total):
    """Return the law of a tile of logits."""
    base = tl.where(top == float("-inf"), 0.0, top)
    return divide(tl.exp(x - base[:, None]), tl.broadcast_to(total[:, None], x.shape))


@triton.jit
def _side(q, p):
    """Return sign(q - p), 0 at a tie."""
    return tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))


@triton.jit(do_not_specialize=["num_slots", "stride_x"])
def slot_losses_kernel(
    draft_ptr,  # [S, V]
    target_ptr,  # [S, V]
    labels_ptr,  # [S]
    cross_entropy_ptr,  # [S] float32
    distance_ptr,  # [S] float32
    statistics_ptr,  # [5, S] float32
    stride_ds,
    stride_dv,
    stride_ts,
    stride_tv,
    stride_x,
    num_slots,
    vocab_size,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the losses of BLOCK_S slots and what their gradients need."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_s = slot < num_slots
    draft_row, target_row = draft_ptr + slot * stride_ds, target_ptr + slot * stride_ts

    top_q = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    top_p = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    total_q = tl.zeros((BLOCK_S,), tl.float32)
    total_p = tl.zeros((BLOCK_S,), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        offs_v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        mask = mask_s[:, None] & (offs_v < vocab_size)[None, :]
        top_q, total_q = _running_statistics(_tile(draft_row, offs_v, stride_dv, mask), top_q, total_q)
        top_p, total_p = _running_statistics(_tile(target_row, offs_v, stride_tv, mask), top_p, total_p)

    label = tl.load(labels_ptr + slot * stride_x, mask=mask_s, other=0).to(tl.int64)
    # Summed lane by lane and across lanes once, at the end.
    apart = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
    drifts = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
    chosen = tl.zeros((BLOCK_S,), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        offs_v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        mask = mask_s[:, None] & (offs_v < vocab_size)[None, :]
        x = _tile(draft_row, offs_v, stride_dv, mask)
        chosen += tl.sum(tl.where(offs_v[None, :] == label[:, None], x, 0.0), axis=1)
        q = _law(x, top_q, total_q)
        p = _law(_tile(target_row, offs_v, stride_tv, mask), top_p, total_p)
        apart += tl.abs(q - p)
        drifts += _side(q, p) * q

    known = (label >= 0) & (label < vocab_size)
    cross_entropy = tl.where(known, tl.log(total_q) + (top_q - chosen), float("nan"))
    tl.store(cross_entropy_ptr + slot, cross_entropy, mask=mask_s)
    tl.store(distance_ptr + slot, tl.sum(apart, axis=1), mask=mask_s)
    tl.store(statistics_ptr + slot, top_q, mask=mask_s)
    tl.store(statistics_ptr + num_slots + slot, total_q, mask=mask_s)
    tl.store(statistics_ptr + 2 * num_slots.to(tl.int64) + slot, top_p, mask=mask_s)
    tl.store(statistics_ptr + 3 * num_slots.to(tl.int64) + slot, total_p, mask=mask_s)
    tl.store(statistics_ptr + 4 * num_slots.to(tl.int64) + slot, tl.sum(drifts, axis=1), mask=mask_s)


@triton.jit(do_not_specialize=["num_slots", "stride_x", "stride_gc", "stride_gl"])
def slot_gradients_kernel(
    draft_ptr,  # [S, V]
    target_ptr,  # [S, V]
    labels_ptr,  # [S]
    statistics_ptr,  # [5, S] float32
    ce_gradient_ptr,  # [S] float32
    l1_gradient_ptr,  # [S] float32
    gradient_ptr,  # [S, V] contiguous
    stride_ds,
    stride_dv,
    stride_ts,
    stride_tv,
    stride_x,
    stride_gc,
    stride_gl,
    num_slots,
    vocab_size,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the gradient of BLOCK_S slots for BLOCK_V tokens."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_s = slot < num_slots
    offs_v = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = mask_s[:, None] & (offs_v < vocab_size)[None, :]
    top_q = tl.load(statistics_ptr + slot, mask=mask_s, other=0.0)
    total_q = tl.load(statistics_ptr + num_slots + slot, mask=mask_s, other=1.0)
    top_p = tl.load(statistics_ptr + 2 * num_slots.to(tl.int64) + slot, mask=mask_s, other=0.0)
    total_p = tl.load(statistics_ptr + 3 * num_slots.to(tl.int64) + slot, mask=mask_s, other=1.0)
    drift = tl.load(statistics_ptr + 4 * num_slots.to(tl.int64) + slot, mask=mask_s, other=0.0)
    ce = tl.load(ce_gradient_ptr + slot * stride_gc, mask=mask_s, other=0.0)
    l1 = tl.load(l1_gradient_ptr + slot * stride_gl, mask=mask_s, other=0.0)
    label = tl.load(labels_ptr + slot * stride_x, mask=mask_s, other=0).to(tl.int64)

    q = _law(_tile(draft_ptr + slot * stride_ds, offs_v, stride_dv, mask), top_q, total_q)
    p = _law(_tile(target_ptr + slot * stride_ts, offs_v, stride_tv, mask), top_p, total_p)
    gradient = q * ((_side(q, p) - drift[:, None]) * l1[:, None] + ce[:, None])
    gradient -= tl.where(offs_v[None, :] == label[:, None], ce[:, None], 0.0)
    # A slot that counts for nothing may hold NaN, which 0 * NaN would pass on.
    gradient = tl.where(((ce == 0) & (l1 == 0))[:, None], 0.0, gradient)
    gradient = rounded(gradient, gradient_ptr.dtype.element_ty, INTERPRETED)
    tl.store(gradient_ptr + slot[:, None] * vocab_size + offs_v[None, :], gradient, mask=mask)


@dataclass(frozen=True)
class _Step:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, int | bool]
    num_warps: int

    def launch(self) -> None:
        launch(self.kernel, self.grid, *self.arguments, **self.constants, num_warps=self.num_warps)


def _forward_step(draft: Tensor, target: Tensor, labels: Tensor, outputs: list[Tensor], config: Config) -> _Step:
    arguments = (draft, target, labels, *outputs, *draft.stride(), *target.stride(), labels.stride(0), *draft.shape)
    grid = (int(triton.cdiv(draft.shape[0], config.block_s)),)
    constants = {"BLOCK_S": config.block_s, "BLOCK_V": config.block_v}
    return _Step(slot_losses_kernel, grid, arguments, constants, config.num_warps)


def _backward_step(saved: list[Tensor], upstream: list[Tensor], gradient: Tensor, config: Config) -> _Step:
    draft, target, labels, _ = saved
    strides = (*draft.stride(), *target.stride(), labels.stride(0), *(part.stride(0) for part in upstream))
    arguments = (*saved, *upstream, gradient, *strides, *draft.shape)
    grid = (int(triton.cdiv(draft.shape[0], config.block_s)), int(triton.cdiv(draft.shape[1], config.block_v)))
    constants = {"BLOCK_S": config.block_s, "BLOCK_V": config.block_v}
    constants["INTERPRETED"] = interpreted(slot_gradients_kernel)
    return _Step(slot_gradients_kernel, grid, arguments, constants, config.num_warps)


class _SlotLosses(torch.autograd.Function):
    """The two kernels; the logits and five numbers a slot are kept between them."""

    @staticmethod
    def forward(
        ctx: Any, draft_logits: Tensor, target_logits: Tensor, labels: Tensor, config: Config
    ) -> tuple[Tensor, Tensor]:
        cross_entropy, distance = (
            torch.empty(labels.shape, dtype=torch.float32, device=labels.device) for _ in range(2)
        )
        statistics = torch.empty(_STATISTICS, len(labels), dtype=torch.float32, device=labels.device)
        outputs = [cross_entropy, distance, statistics]
        _forward_step(draft_logits, target_logits, labels, outputs, config).launch()
        ctx.save_for_backward(draft_logits, target_logits, labels, statistics)
        ctx.config = config
        return cross_entropy, distance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, ce_gradient: Tensor, l1_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        draft_logits = ctx.saved_tensors[0]
        gradient = torch.empty(draft_logits.shape, dtype=draft_logits.dtype, device=draft_logits.device)
        _backward_step(list(ctx.saved_tensors), [ce_gradient, l1_gradient], gradient, ctx.config).launch()
        return gradient, None, None, None


def variants() -> list[Variant]:
    """Return the specialisations that training at the sizes of real vocabularies launches; see `Variant`."""
    return [variant for dtypes, vocab_size in _sizes() for variant in _described(dtypes, vocab_size)]


def _sizes() -> Iterator[tuple[tuple[torch.dtype, torch.dtype], int]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield (dtype, dtype), 151_936
    yield (torch.float32, torch.bfloat16), 151_936
    yield (torch.bfloat16, torch.float32), 151_936
    yield (torch.bfloat16, torch.bfloat16), 151_937


def _described(dtypes: tuple[torch.dtype, torch.dtype], vocab_size: int) -> Iterator[Variant]:
    num_slots, config = 1024, choose_config(vocab_size)
    draft, target = (torch.empty(num_slots, vocab_size, dtype=dtype, device="meta") for dtype in dtypes)
    labels = torch.empty(num_slots, dtype=torch.int64, device="meta")
    row = torch.empty(num_slots, dtype=torch.float32, device="meta")
    statistics = torch.empty(_STATISTICS, num_slots, dtype=torch.float32, device="meta")
    forward = _forward_step(draft, target, labels, [row, row, statistics], config)
    saved = [draft, target, labels, statistics]
    backward = _backward_step(saved, [row, row], torch.empty_like(draft), config)
    size = "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes) + f"-V{vocab_size}"
    for name, step in (("forward", forward), ("backward", backward)):
        yield describe(
            f"losses/{name}/{size}",
            step.kernel,
            step.arguments,
            step.constants,
            values=_UNSPECIALISED,
            wide_loads=("draft_ptr", "target_ptr") if vocab_size % 16 == 0 else (),
            num_warps=step.num_warps,
        )


def slot_losses(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, *, config: Config | None = None
) -> SlotLosses:
    """Fused twin of `dsspark.reference.losses.slot_losses`; same contract, one launch forward and one backward."""
    check_slot_arguments(draft_logits, target_logits, labels)
    check_logits("draft_logits", draft_logits)
    check_logits("target_logits", target_logits)
    config = config or choose_config(draft_logits.shape[1])
    return SlotLosses(*_SlotLosses.apply(draft_logits, target_logits.detach(), labels, config))


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
    config: Config | None = None,
) -> DraftLosses:
    """Fused twin of `dsspark.reference.losses.draft_losses`; same contract, the slots by `slot_losses`, their means by torch."""

    def losses(draft: Tensor, target: Tensor, tokens: Tensor) -> SlotLosses:
        return slot_losses(draft, target, tokens, config=config)

    return combined(
        losses,
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

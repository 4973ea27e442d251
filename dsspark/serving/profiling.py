"""The worked example of `CostTable.profile`: whole steps of the shipped models on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import dsspark
from dsspark.cost_table import CostTable
from dsspark.models.drafter import DSparkDrafter
from dsspark.models.pretrained import load_pretrained
from dsspark.models.target import TargetLM

PROFILED_BUDGET = 4
"""Tokens that each request of a profiled step verifies, its anchor included."""
DEFAULT_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_CHUNK = 32
_CONTEXT = 96


class _Batch:
    """Requests in the middle of random texts, on which a step can be repeated; what the text says does not change its cost."""

    def __init__(self, target: TargetLM, drafter: DSparkDrafter, count: int) -> None:
        self.target, self.drafter = target, drafter
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(256, (count, _CONTEXT + 1), generator=generator)
        self.cache, self.context = target.new_cache(count), drafter.new_context(count)
        for start in range(0, _CONTEXT, _CHUNK):
            piece = texts[:, start : start + _CHUNK]
            self.forward(
                piece[:, 0], piece[:, 1:], torch.full((count,), _CHUNK - 1), torch.full((count,), start), keep=True
            )
        self.anchors, self.positions = texts[:, -1], torch.full((count,), _CONTEXT)

    def forward(self, anchors: Tensor, drafts: Tensor, lengths: Tensor, positions: Tensor, *, keep: bool) -> Tensor:
        """Run the target; keep what it read, or forget it again."""
        batch = dsspark.pack(anchors, drafts, lengths, positions)
        self.cache.reserve(positions + lengths + 1)
        logits, features = self.target.forward_ragged(batch, self.cache)
        if keep:
            self.drafter.extend(self.context, features, batch.request_ids)
        else:
            self.cache.rollback(positions)
        self.batch = batch
        return logits

    def step(self, size: int) -> None:
        """Draft, verify `size` tokens of as many requests as that is worth, accept or resample, and forget it all."""
        count = -(-size // PROFILED_BUDGET)
        if count < len(self.anchors):
            self.anchors, self.positions = self.anchors[:count], self.positions[:count]
            self.cache.keep(range(count))
            self.context.keep(range(count))
        uniforms = dsspark.Uniforms.from_seeds(list(range(count)), [0] * count, self.drafter.block_size)
        draft = self.drafter.propose(self.anchors, self.context, uniforms, temperature=torch.ones(count)).draft
        lengths = torch.full((count,), size // count - 1)
        lengths[: size % count] += 1
        logits = self.forward(self.anchors, draft.tokens, lengths, self.positions, keep=False)
        dsspark.verify(logits, self.batch, draft, uniforms)


@torch.no_grad()
def profile_shipped(
    sizes: Sequence[int] = DEFAULT_SIZES, repeats: int = 7, on_step: Callable[[], None] | None = None
) -> CostTable:
    """Measure steps per second of the shipped target and drafter on this machine.

    Args:
        sizes: batch tokens B to measure; a step over B tokens has B / 4 requests.
        repeats: timed steps a size.
        on_step: told of every step, timed or not.

    Raises:
        ValueError: as `CostTable.profile`.
        FileNotFoundError: without the shipped weights.

    Warns:
        UserWarning: when the curve is flat.
    """
    target, drafter, _ = load_pretrained()
    batch = _Batch(target, drafter, -(-max(sizes) // PROFILED_BUDGET))

    def step(size: int) -> None:
        batch.step(size)
        if on_step is not None:
            on_step()

    return CostTable.profile(
        step,
        sorted(sizes, reverse=True),  # the batch only shrinks
        repeats,
        provenance={
            "model": "the shipped byte-level target with its DSpark drafter",
            "step": f"draft, target pass and verification of B / {PROFILED_BUDGET} requests, {_CONTEXT} cached tokens each",
            "cores": str(os.cpu_count()),
        },
    )

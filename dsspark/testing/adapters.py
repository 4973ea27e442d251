"""Thin adapters: samplers and schedulers with other signatures, made auditable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dsspark.cost_table import CostTable
from dsspark.randomness import Uniforms
from dsspark.reference.filters import target_weights
from dsspark.reference.rejection import draft_law
from dsspark.testing.rounds import Scheduler
from dsspark.types import DraftBlock, Filters, PackedBatch, Verification

WHOLE_VOCABULARY = 64
"""A cell that holds every vocabulary of the audits: the two-level draw becomes one inverse CDF, driven by final[:, 1]."""


@dataclass(frozen=True)
class OutsideSampler:
    """A rejection sampler that takes probabilities, as engines' samplers do.

    Attributes:
        function: `function(target_probs, draft_probs, draft_tokens)` with target_probs [R, gamma + 1, V] and draft_probs
            [R, gamma, V] float32, draft_tokens [R, gamma] int64; returns the emitted tokens [R, gamma + 1], padded with -1.
        takes_uniforms: whether it takes two more arguments, `accept` [R, gamma] and `final` [R], and draws nothing by itself; its
            final draw must be an inverse CDF in token order. Then its law is exact; otherwise it is tested statistically.
    """

    function: Callable[..., Tensor]
    takes_uniforms: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"function: got {type(self.function).__name__}, expected a callable that returns tokens [R, gamma + 1]"
            )

    def tokens(self, *arguments: Tensor) -> Tensor:
        """Call the sampler and check what it returns.

        Raises:
            ValueError: for anything but tokens [R, gamma + 1].
        """
        num_requests, block_size = arguments[2].shape
        tokens = self.function(*arguments)
        wanted = f"expected an int64 tensor [{num_requests}, {block_size + 1}] of tokens padded with -1"
        if not isinstance(tokens, Tensor):
            raise ValueError(f"sampler: returned {type(tokens).__name__}, {wanted}")
        if tuple(tokens.shape) != (num_requests, block_size + 1) or tokens.is_floating_point():
            raise ValueError(f"sampler: returned {list(tokens.shape)} of {tokens.dtype}, {wanted}")
        return tokens.to(torch.int64)

    def verify(
        self,
        target_logits: Tensor,
        batch: PackedBatch,
        draft: DraftBlock,
        uniforms: Uniforms,
        *,
        temperature: float = 1.0,
        filters: Filters | None = None,
        cell: int = WHOLE_VOCABULARY,
    ) -> Verification:
        """Be called as `dsspark.verify`, for whole blocks and with the uniforms injected."""
        num_requests, block_size = draft.tokens.shape
        vocab_size = target_logits.shape[1]
        weights, row_sum = target_weights(target_logits, torch.full((len(target_logits),), temperature), filters)
        target = rearrange(weights / row_sum[:, None], "(r k) v -> r k v", r=num_requests)
        everyone = torch.arange(num_requests)
        draft_probs = torch.stack([draft_law(draft, everyone, k, vocab_size) for k in range(block_size)], dim=1)
        noise = (uniforms.accept, uniforms.final[:, 1]) if self.takes_uniforms else ()
        tokens = self.tokens(target, draft_probs, draft.tokens, *noise)
        num_emitted = (tokens >= 0).sum(dim=1).to(torch.int32)
        return Verification(
            num_accepted=(num_emitted - 1).clamp(min=0),
            tokens=tokens,
            num_emitted=num_emitted,
            valid=torch.ones(num_requests, dtype=torch.bool),
            logprobs=torch.zeros(tokens.shape),
        )


@dataclass(frozen=True)
class _Stateless:
    """A function (survival, cost_table) -> lengths as a scheduler."""

    function: Callable[[Tensor, CostTable], Tensor]
    cost_table: CostTable

    def step(self, survival: Tensor, request_ids: object) -> Tensor:
        return self.function(survival, self.cost_table)


def scheduler_maker(scheduler: Callable[..., Any]) -> tuple[Callable[[CostTable, int], Scheduler], bool]:
    """Return how to make a scheduler from a cost table and gamma, and whether it remembers steps.

    Args:
        scheduler: a function `f(survival [R, gamma], cost_table) -> lengths [R]`, such as `dsspark.schedule`, or a class
            `C(cost_table, block_size)` whose objects have `step(survival, request_ids) -> lengths`, such as
            `dsspark.DelayedScheduler`.

    Raises:
        TypeError: for anything that is neither.
    """
    if not callable(scheduler):
        raise TypeError(
            f"scheduler: got {type(scheduler).__name__}, expected a function (survival, cost_table) -> lengths, or a class "
            "(cost_table, block_size) with a method step(survival, request_ids) -> lengths"
        )
    if inspect.isclass(scheduler):
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(
                f"scheduler: got the class {scheduler.__name__} without a method step(survival, request_ids) -> lengths"
            )
        made: Any = scheduler
        return made, True
    return lambda cost_table, block_size: _Stateless(scheduler, cost_table), False

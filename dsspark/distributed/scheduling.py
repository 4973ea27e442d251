"""Decide once, broadcast: what every rank must know alike before shapes can depend on it (paper 3.2.2 and 5.2).

Hidden states that went through a tensor-parallel layer may differ in their last bits from rank to rank. Survivals computed from them
may then rank two requests differently, lengths differ, and the next collective hangs or mixes requests. So the group's first rank
decides; the others check their arguments, so that a wrong one raises everywhere, and take its answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsspark._dispatch import dispatched
from dsspark.contracts import check_budget_arguments, check_search_arguments, check_survival_arguments
from dsspark.cost_table import CostTable
from dsspark.distributed.collectives import all_gather, broadcast
from dsspark.distributed.partition import VocabularyShard
from dsspark.numerics import compute_dtype
from dsspark.reference import confidence, scheduler

_survival = dispatched(confidence.survival)
_schedule = dispatched(scheduler.schedule)
_plan_budget = dispatched(scheduler.plan_budget)
_admit = dispatched(scheduler.admit)


def survival_parallel(confidence_logits: Tensor, shard: VocabularyShard, temperatures: Tensor | None = None) -> Tensor:
    """Return `dsspark.survival` of the first rank's logits, on every rank; [R, gamma]."""
    check_survival_arguments(confidence_logits, temperatures)
    like = confidence_logits.new_empty(confidence_logits.shape, dtype=compute_dtype(confidence_logits))
    return decide_once(lambda: _survival(confidence_logits, temperatures), like, shard, "survival")


def schedule_parallel(
    survival: Tensor, cost_table: CostTable, shard: VocabularyShard, *, max_tokens: int | None = None
) -> Tensor:
    """Return `dsspark.schedule` of the first rank's survivals and cost table, on every rank; [R] int32."""
    check_search_arguments(survival, cost_table, max_tokens)
    like = survival.new_empty(survival.shape[0], dtype=torch.int32)
    return decide_once(lambda: _schedule(survival, cost_table, max_tokens=max_tokens), like, shard, "lengths")


def plan_budget_parallel(
    survival: Tensor, cost_table: CostTable, shard: VocabularyShard, *, max_tokens: int | None = None
) -> Tensor:
    """Return `dsspark.plan_budget` of the first rank's (stale) survivals, on every rank; int32 scalar."""
    check_search_arguments(survival, cost_table, max_tokens)
    like = survival.new_empty((), dtype=torch.int32)
    return decide_once(lambda: _plan_budget(survival, cost_table, max_tokens=max_tokens), like, shard, "budget")


def admit_parallel(survival: Tensor, budget: int | Tensor, shard: VocabularyShard) -> Tensor:
    """Return `dsspark.admit` of the first rank's survivals and budget, on every rank; [R] int32."""
    check_budget_arguments(survival, budget)
    like = survival.new_empty(survival.shape[0], dtype=torch.int32)
    return decide_once(lambda: _admit(survival, budget), like, shard, "lengths")


def check_agreement(shard: VocabularyShard, **tensors: Tensor) -> None:
    """Raise `ValueError`, on every rank, unless each tensor is the same bit for bit on all ranks. For tests and start-up: it
    synchronises, and gathers the tensors.

    Args:
        shard: names the group.
        tensors: what the functions of this package expect alike on every rank (anchors, uniforms, temperatures, batches); the same
            shapes everywhere.
    """
    for name, tensor in tensors.items():
        everyone = all_gather(tensor.contiguous().view(-1).view(torch.uint8), shard, "agreement")
        differing = (everyone != everyone[0]).any(dim=1).nonzero()[:, 0].tolist()
        if differing:
            raise ValueError(
                f"{name}: got other values on ranks {differing} than on rank 0, expected the same on every rank; "
                "broadcast it, or draw it from the same seeds"
            )


def decide_once(
    decision: Callable[[], Tensor], like: Tensor, shard: VocabularyShard, label: str = "decision"
) -> Tensor:
    """Let the first rank decide and return its answer on every rank: any policy that a shape depends on.

    Args:
        decision: called on the first rank only, so what it remembers (`DelayedScheduler`) lives there; it must not raise there alone.
        like: a tensor of the answer's shape, dtype and device, overwritten on the other ranks.
        shard: names the group.
        label: for `count_traffic`.

    Example:
        >>> import torch
        >>> shard = VocabularyShard.single(8)
        >>> decide_once(lambda: torch.tensor([2, 1]), torch.zeros(2, dtype=torch.int64), shard).tolist()
        [2, 1]
    """
    answer = decision().contiguous() if shard.rank == 0 else like
    return broadcast(answer, shard, f"schedule: {label}")

"""Faults of scheduling: looking at tokens before deciding about them, ties, overshoot."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsspark
from dsspark.cost_table import CostTable
from dsspark.testing.adapters import scheduler_maker
from dsspark.testing.grid import GridLaw
from dsspark.testing.mutants.mutant import Mutant
from dsspark.types import DraftBlock


def _made(function: Callable[[Tensor, CostTable], Tensor]) -> dict[str, Any]:
    return {"scheduler": scheduler_maker(function)[0]}


def global_search(survival: Tensor, cost_table: CostTable) -> Tensor:
    """Take the lengths of largest Theta, whatever it looks at (paper Appendix A)."""
    num_requests, block_size = survival.shape

    def theta(lengths: tuple[int, ...]) -> float:
        tau = num_requests + sum(float(survival[r, :length].sum()) for r, length in enumerate(lengths))
        return tau * float(cost_table.sps[num_requests + sum(lengths)])

    return torch.tensor(max(itertools.product(range(block_size + 1), repeat=num_requests), key=theta))


def budget_of_this_step(survival: Tensor, cost_table: CostTable) -> Tensor:
    """Plan the budget from the survivals it decides about: a delay of 0."""
    return dsspark.admit(survival, dsspark.plan_budget(survival, cost_table))


def later_positions_first(survival: Tensor, cost_table: CostTable) -> Tensor:
    """Break ties by (-position, -request): x_{k+1} is admitted before x_k where survival saturates."""
    num_requests, block_size = survival.shape
    budget = int(dsspark.plan_budget(torch.full_like(survival, 0.5), cost_table))
    ranked = sorted((-float(survival[r, j]), -j, -r) for r in range(num_requests) for j in range(block_size))
    lengths = torch.zeros(num_requests, dtype=torch.int64)
    for _, j, r in ranked[:budget]:
        lengths[-r] = max(int(lengths[-r]), 1 - j)
    return lengths


def admitting_each_other(survival: Tensor, cost_table: CostTable) -> Tensor:
    """Verify a request's first draft iff another request's second one looks good: each [l_r >= 1] ignores its own tokens."""
    second = survival[:, -1].roll(1)
    return (second > 0).to(torch.int64) if len(survival) > 1 else torch.zeros(1, dtype=torch.int64)


def admit_above_threshold(survival: Tensor, budget: int) -> Tensor:
    """Admit whatever reaches the survival of the K-th candidate: ties overshoot."""
    ranked = survival.flatten().sort(descending=True).values
    if budget == 0:
        return torch.zeros(len(survival), dtype=torch.int32)
    threshold = ranked[min(budget, len(ranked)) - 1]
    return ((survival >= threshold) & (survival > 0)).sum(dim=1).to(torch.int32)


def admit_past_zero(survival: Tensor, budget: int) -> Tensor:
    """Fill the budget with candidates that cannot survive."""
    return dsspark.admit(survival.clamp(min=1e-6), budget)


def own_probability(law: GridLaw, anchors: Tensor, draft: DraftBlock) -> Tensor:
    """Show the scheduler q of the drafted token itself."""
    return draft.token_probs.cumprod(dim=1)


def confidence_of_the_token(law: GridLaw, anchors: Tensor, draft: DraftBlock) -> Tensor:
    """Read x_k where the confidence head reads x_{k-1}."""
    if law.confidence is None:
        return torch.ones(draft.tokens.shape)
    # One position further on: c_1 becomes what c_2 should be.
    table = torch.tensor(law.confidence)
    position = (torch.arange(law.block_size) + 1).clamp(max=law.block_size - 1)
    return table[position, draft.tokens].cumprod(dim=1)


SCHEDULING_MUTANTS = (
    Mutant(
        name="global search over current confidences",
        fault="the whole current block is searched for the best lengths: a_2 tells x_1 before x_1 is admitted",
        check="joint law, causality",
        parts=_made(global_search),
    ),
    Mutant(
        name="budget searched over the current block",
        fault="a delayed scheduler with a delay of 0",
        check="joint law, causality",
        parts=_made(budget_of_this_step),
    ),
    Mutant(
        name="tie admitted out of order",
        fault="survival saturates at 1.0 and top-k takes position k + 1 before k",
        check="joint law, causality",
        parts=_made(later_positions_first),
    ),
    Mutant(
        name="two requests admit each other",
        fault="each admitted by the other's first token: no request decides about its own tokens, marginals exact, jointly wrong",
        check="joint law, causality",
        parts=_made(admitting_each_other),
    ),
    Mutant(
        name="threshold admission overshoots",
        fault="every candidate that ties with the K-th is admitted: more tokens than the step was planned for",
        check="budget",
        parts={"admit": admit_above_threshold},
    ),
    Mutant(
        name="candidates of zero survival fill the budget",
        fault="drafts that cannot survive are verified",
        check="budget",
        parts={"admit": admit_past_zero},
    ),
    Mutant(
        name="admission by the token's own probability",
        fault="a draft is dropped because its own probability is low",
        check="joint law",
        parts={"survival": own_probability},
    ),
    Mutant(
        name="confidence from x_k",
        fault="off by one: the confidence head reads the token whose verification it decides",
        check="joint law",
        parts={"survival": confidence_of_the_token},
    ),
)

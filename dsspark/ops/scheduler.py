"""`schedule`, `plan_budget` and `admit` as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark.cost_table import CostTable
from dsspark.ops.common import eager


def _table(sps: Tensor) -> CostTable:
    """Return the table of rates that were checked when their table was built: its constructor would read them again."""
    table: CostTable = object.__new__(CostTable)
    object.__setattr__(table, "sps", sps)
    object.__setattr__(table, "provenance", {})
    return table


@torch.library.custom_op("dsspark::schedule", mutates_args=())
def _schedule_op(survival: Tensor, sps: Tensor, max_tokens: int | None, backend: str) -> Tensor:
    lengths: Tensor = eager("schedule")(survival, _table(sps), max_tokens=max_tokens, backend=backend)
    return lengths


@_schedule_op.register_fake
def _(survival, sps, max_tokens, backend):  # type: ignore[no-untyped-def]
    return survival.new_empty(survival.shape[:1], dtype=torch.int32)


@torch.no_grad()
def schedule(survival: Tensor, cost_table: CostTable, *, max_tokens: int | None = None, backend: str) -> Tensor:
    """Traceable form of `dsspark.schedule`."""
    result: Tensor = _schedule_op(survival, cost_table.sps, max_tokens, backend)
    return result


@torch.library.custom_op("dsspark::plan_budget", mutates_args=())
def _plan_budget_op(survival: Tensor, sps: Tensor, max_tokens: int | None, backend: str) -> Tensor:
    budget: Tensor = eager("plan_budget")(survival, _table(sps), max_tokens=max_tokens, backend=backend)
    return budget


@_plan_budget_op.register_fake
def _(survival, sps, max_tokens, backend):  # type: ignore[no-untyped-def]
    return survival.new_empty((), dtype=torch.int32)


@torch.no_grad()
def plan_budget(survival: Tensor, cost_table: CostTable, *, max_tokens: int | None = None, backend: str) -> Tensor:
    """Traceable form of `dsspark.plan_budget`."""
    result: Tensor = _plan_budget_op(survival, cost_table.sps, max_tokens, backend)
    return result


@torch.library.custom_op("dsspark::admit", mutates_args=())
def _admit_op(survival: Tensor, budget: Tensor | None, count: int, backend: str) -> Tensor:
    lengths: Tensor = eager("admit")(survival, count if budget is None else budget, backend=backend)
    return lengths


@_admit_op.register_fake
def _(survival, budget, count, backend):  # type: ignore[no-untyped-def]
    return survival.new_empty(survival.shape[:1], dtype=torch.int32)


@torch.no_grad()
def admit(survival: Tensor, budget: int | Tensor, *, backend: str) -> Tensor:
    """Traceable form of `dsspark.admit`."""
    given = isinstance(budget, Tensor)
    lengths: Tensor = _admit_op(survival, budget if given else None, 0 if given else budget, backend)
    return lengths

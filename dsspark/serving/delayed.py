"""The scheduler as production runs it: a budget from old confidences, admission by current ones (paper 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

import dsspark
from dsspark._checks import check_block_size, check_shape
from dsspark.cost_table import CostTable


def check_delay(delay: int) -> None:
    """Raise `ValueError` unless the budget is planned from an earlier step than the one it is for."""
    if isinstance(delay, bool) or not isinstance(delay, int) or delay < 1:
        raise ValueError(
            f"delay: got {delay!r}, expected an int of 1 or more: a budget planned from the current survivals depends "
            "on the tokens it admits, which leaks and changes the output law; use schedule(...) for no delay"
        )


class DelayedScheduler:
    """Plan the budget of a step from the survivals of `delay` steps before, and admit by current survival (paper 5.2).

    The delay is a causal barrier: the budget knows nothing of the tokens it decides about, so a global search is
    safe. It also is what lets an engine know the next batch size before the current step ends.

    A request that was not there `delay` steps ago (new, or paused) is planned with the optimistic prior: survival 1
    at every position, so that it gets drafts to verify until it has a record. Requests that have left count no more.
    The state is the last `delay` steps. Ids are looked up on the host; `DeviceDelayedScheduler` keeps everything on the device.

    Args:
        cost_table: steps per second, on the device of the survivals.
        block_size: gamma, 1 to 32.
        delay: steps between a survival and the budget planned from it, 1 or more.

    Raises:
        ValueError: for a block size out of range or a delay below 1, which would leak.

    Source: paper 5.2.

    Example:
        >>> import torch
        >>> scheduler = DelayedScheduler(CostTable.from_points([1, 3], [1.0, 1.2]), block_size=2, delay=1)
        >>> scheduler.step(torch.tensor([[0.1, 0.0]]), ["a"]).tolist()  # no record: planned as if both would survive
        [1]
        >>> scheduler.step(torch.tensor([[0.9, 0.9]]), ["a"]).tolist()  # planned from 0.1: verifying does not pay
        [0]
    """

    def __init__(self, cost_table: CostTable, block_size: int, delay: int = 2) -> None:
        check_block_size("block_size", block_size)
        check_delay(delay)
        self.cost_table = cost_table
        self.block_size = block_size
        self.delay = delay
        self._steps: deque[tuple[dict[Hashable, int], Tensor]] = deque(maxlen=delay)

    def step(self, survival: Tensor, request_ids: Sequence[Hashable] | Tensor, max_tokens: int | None = None) -> Tensor:
        """Return the draft lengths of this step and remember its survivals.

        Args:
            survival: a, [R, gamma] float, of the current step.
            request_ids: R distinct ids, in the row order of this step, which may change from step to step. A tensor
                [R] of ids is read by the host.
            max_tokens: the largest B, anchors included; the table's own limit if None or larger.

        Returns:
            lengths, [R] int32.

        Raises:
            ValueError: for a wrong shape, a wrong number of ids or one that repeats, or R above max_tokens or the
                table; the state is then as before.
            TypeError: for dtypes that are not listed.

        Numerics: as `plan_budget` and `admit`. The survivals are copied, so the caller may overwrite its buffer.
        """
        check_shape("survival", survival, ("R", self.block_size))
        ids = request_ids.tolist() if isinstance(request_ids, Tensor) else list(request_ids)
        if len(ids) != survival.shape[0]:
            raise ValueError(f"request_ids: got {len(ids)} ids, expected {survival.shape[0]}, one a row of survival")
        rows = {request: row for row, request in enumerate(ids)}
        if len(rows) != len(ids):
            twice = sorted({str(request) for request in ids if ids.count(request) > 1})
            raise ValueError(
                f"request_ids: got {', '.join(twice)} more than once, expected distinct ids; one row a request"
            )
        budget = dsspark.plan_budget(self._stale(survival, ids), self.cost_table, max_tokens=max_tokens)
        lengths = dsspark.admit(survival, budget)
        self._steps.append((rows, survival.detach().clone()))
        return lengths

    def _stale(self, survival: Tensor, ids: Sequence[Hashable]) -> Tensor:
        """Return what was known of these requests `delay` steps ago, [R, gamma]; 1 where nothing was."""
        prior = torch.ones_like(survival[:1])
        if len(self._steps) < self.delay or not ids:
            return prior.expand(survival.shape)
        rows, past = self._steps[0]
        source = torch.tensor([rows.get(request, len(rows)) for request in ids], device=survival.device)
        return torch.cat((past.to(survival), prior))[source]

    def reset(self) -> None:
        """Forget every step."""
        self._steps.clear()

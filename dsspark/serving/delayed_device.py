"""The delayed scheduler with its state on the device: no host synchronisation, one CUDA graph (paper 5.2)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import dsspark
from dsspark._checks import INT_DTYPES, check_block_size, check_device, check_dtype, check_shape
from dsspark.cost_table import CostTable
from dsspark.serving.delayed import check_delay


class DeviceDelayedScheduler:
    """Do what `DelayedScheduler` does, keyed by the engine's slots instead of a dictionary on the host.

    An engine keeps each running request in a slot 0..max_requests - 1 and gives it an id that it never uses again. Both
    arrive as device tensors. A survival of `delay` steps ago counts only if the slot held the *same id* then; otherwise the
    request is new there, and the optimistic prior of `DelayedScheduler` stands: survival 1. So a slot that was handed on does
    not plan with its last tenant's record, and finished requests need not be announced.

    All state lives in two buffers that `step` changes in place, with shapes that depend on R alone: it can be captured in a
    CUDA graph for each R, replayed in any order, and the graphs share the state.

    Args:
        cost_table: steps per second; moved to `device`.
        block_size: gamma, 1 to 32.
        max_requests: number of slots, 1 or more.
        delay: steps between a survival and the budget planned from it, 1 or more.
        device: of the state; the cost table's if None.
        backend: of `plan_budget` and `admit`.

    Raises:
        ValueError: for a block size out of range, no slots, or a delay below 1, which would leak.

    Source: paper 5.2.

    Example:
        >>> import torch
        >>> table = CostTable.from_points([1, 3], [1.0, 1.2])
        >>> scheduler = DeviceDelayedScheduler(table, block_size=2, max_requests=8, delay=1)
        >>> slot, request = torch.tensor([5]), torch.tensor([1001])
        >>> scheduler.step(torch.tensor([[0.1, 0.0]]), slot, request).tolist()  # no record: planned as if both would survive
        [1]
        >>> scheduler.step(torch.tensor([[0.9, 0.9]]), slot, request).tolist()  # planned from 0.1: verifying does not pay
        [0]
    """

    def __init__(
        self,
        cost_table: CostTable,
        block_size: int,
        max_requests: int,
        delay: int = 2,
        *,
        device: torch.device | str | None = None,
        backend: Literal["auto", "reference", "triton"] = "auto",
    ) -> None:
        check_block_size("block_size", block_size)
        check_delay(delay)
        if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
            raise ValueError(f"max_requests: got {max_requests!r}, expected an int of 1 or more, the engine's slots")
        self.cost_table = cost_table if device is None else cost_table.to(device)
        self.block_size, self.max_requests, self.delay, self.backend = block_size, max_requests, delay, backend
        where = self.cost_table.sps.device
        # Oldest step first. An id is kept beside whether the slot was filled at all, so that every int64 may be an id.
        self._survival = torch.ones(delay, max_requests, block_size, dtype=torch.float32, device=where)
        self._owner = torch.zeros(delay, max_requests, dtype=torch.int64, device=where)
        self._filled = torch.zeros(delay, max_requests, dtype=torch.bool, device=where)

    def step(self, survival: Tensor, slots: Tensor, request_ids: Tensor, max_tokens: int | None = None) -> Tensor:
        """Return the draft lengths of this step and remember its survivals.

        Args:
            survival: a, [R, gamma] float, of the current step.
            slots: [R] int64 or int32, distinct, each in 0..max_requests - 1. Only the device can see a wrong value: two rows in
                one slot leave either record, one out of range is the indexing error of the device.
            request_ids: [R] int64 or int32.
            max_tokens: the largest B, anchors included; the table's own limit if None or larger.

        Returns:
            lengths, [R] int32.

        Raises:
            ValueError: for a wrong shape or device, or R above the slots, max_tokens or the table; the state is then as before.
            TypeError: for dtypes that are not listed.

        Numerics: as `plan_budget` and `admit`; survivals are kept in float32.
        Cost: delay * max_requests * (4 gamma + 9) bytes are moved by one step; no host synchronisation.
        """
        check_shape("survival", survival, ("R", self.block_size))
        num_requests = survival.shape[0]
        if num_requests > self.max_requests:
            raise ValueError(
                f"survival: got {num_requests} requests, expected at most max_requests = {self.max_requests}; build the "
                "scheduler with as many slots as the engine has"
            )
        for name, tensor in (("slots", slots), ("request_ids", request_ids)):
            check_shape(name, tensor, (num_requests,))
            check_dtype(name, tensor, INT_DTYPES)
            check_device(name, tensor, "survival", survival)
        index, owner = slots.to(torch.int64), request_ids.to(torch.int64)
        known = self._filled[0, index] & (self._owner[0, index] == owner)
        stale = torch.where(known[:, None], self._survival[0, index], 1.0)
        budget = dsspark.plan_budget(stale, self.cost_table, max_tokens=max_tokens, backend=self.backend)
        lengths = dsspark.admit(survival, budget, backend=self.backend)
        self._remember(survival, index, owner)
        return lengths

    def _remember(self, survival: Tensor, index: Tensor, owner: Tensor) -> None:
        """Move every step one place towards the oldest and write the newest, in place: the host keeps no counter."""
        for step in range(self.delay - 1):
            for state in (self._survival, self._owner, self._filled):
                state[step].copy_(state[step + 1])
        self._filled[-1].fill_(False)  # a request that pauses must not find its older record here
        self._filled[-1].index_fill_(0, index, True)
        self._owner[-1].index_copy_(0, index, owner)
        self._survival[-1].index_copy_(0, index, survival.detach().to(torch.float32))

    def reset(self) -> None:
        """Forget every step."""
        self._filled.fill_(False)

"""The policies once more, in NumPy: a simulator takes hundreds of thousands of steps. Tests hold them to the library's own.

One interface: what a policy needs (`delay`, `reads_survival`) and `lengths(survival, stale)`. Survivals are clean here (in [0, 1],
non-increasing along a row, no NaN): the pools guarantee it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dsspark.cost_table import CostTable

Survivals = NDArray[np.float32]
Lengths = NDArray[np.int64]
DrafterName = Literal["none", "mtp", "dspark"]


class SimulatedPolicy(Protocol):
    """Choose the verified length of each request.

    Attributes:
        name: in figures and tables.
        drafter: whose drafts and whose cost.
        delay: steps between the survivals it plans from and the current; 0 if it plans from none.
        reads_survival: whether it looks at survivals at all.
    """

    @property
    def name(self) -> str: ...
    @property
    def drafter(self) -> DrafterName: ...
    @property
    def delay(self) -> int: ...
    @property
    def reads_survival(self) -> bool: ...

    def lengths(self, survival: Survivals, stale: Survivals) -> Lengths:
        """Return lengths [R] for survival [R, gamma] and the survivals of `delay` steps ago, 1 where there are none."""
        ...

    def most_tokens(self, num_requests: int, block_size: int) -> int:
        """Return the largest B it can ask for."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The first `length` drafts; 0 is plain decoding, and with the MTP drafter 1 is MTP-1."""

    name: str
    drafter: DrafterName
    length: int
    delay: int = 0
    reads_survival: bool = False

    def lengths(self, survival: Survivals, stale: Survivals) -> Lengths:
        """Return the same length for all."""
        return np.full(len(survival), min(self.length, survival.shape[1]), dtype=np.int64)

    def most_tokens(self, num_requests: int, block_size: int) -> int:
        """Return what whole batches take."""
        return num_requests * (1 + min(self.length, block_size))


@dataclass(frozen=True)
class Threshold:
    """As long as the survival reaches a bar."""

    name: str
    threshold: float
    drafter: DrafterName = "dspark"
    delay: int = 0
    reads_survival: bool = True

    def lengths(self, survival: Survivals, stale: Survivals) -> Lengths:
        """Return the number of positions above the bar: they lead, since a row never rises."""
        return _counted(survival >= np.float32(self.threshold))

    def most_tokens(self, num_requests: int, block_size: int) -> int:
        """Return what whole batches take."""
        return num_requests * (1 + block_size)


def _counted(chosen: NDArray[np.bool_]) -> Lengths:
    return np.asarray(chosen.sum(axis=1, dtype=np.int64))


def admit(survival: Survivals, budget: int) -> Lengths:
    """Twin of `dsspark.admit`: the `budget` largest candidates above 0; ties by position, then request."""
    num_requests = len(survival)
    flat = survival.T.ravel()  # position-major: index k R + r
    budget = min(budget, flat.size)
    if budget <= 0:
        return np.zeros(num_requests, dtype=np.int64)
    if budget == flat.size:
        return _counted(survival > 0)
    bar = np.partition(flat, flat.size - budget)[flat.size - budget]
    if bar <= 0:
        return _counted(survival > 0)
    lengths = _counted(survival > bar)
    left = budget - int(lengths.sum())
    ties = np.flatnonzero(flat == bar)[:left]
    return np.asarray(lengths + np.bincount(ties % num_requests, minlength=num_requests), dtype=np.int64)


def ranked_throughput(survival: Survivals, sps: NDArray[np.float64]) -> tuple[Survivals, NDArray[np.float64]]:
    """Return the candidates that fit, descending, and Theta of admitting the first 0, 1, 2, ... of them."""
    num_requests = len(survival)
    fitting = min(survival.size, len(sps) - 1 - num_requests)
    ranked = -np.sort(-survival.ravel())[:fitting]
    tau = np.empty(fitting + 1)
    tau[0] = 0.0
    np.cumsum(ranked, dtype=np.float64, out=tau[1:])
    return ranked, (num_requests + tau) * sps[num_requests : num_requests + fitting + 1]


@dataclass(frozen=True, eq=False)
class EarlyStop:
    """Algorithm 1, on current survivals."""

    name: str
    table: CostTable
    drafter: DrafterName = "dspark"
    delay: int = 0
    reads_survival: bool = True

    def lengths(self, survival: Survivals, stale: Survivals) -> Lengths:
        """Return the twin of `dsspark.schedule`."""
        ranked, theta = ranked_throughput(survival, self.table.sps.numpy())
        stops = ~((theta[1:] > theta[:-1]) & (ranked > 0))
        return admit(survival, int(stops.argmax()) if stops.any() else len(ranked))

    def most_tokens(self, num_requests: int, block_size: int) -> int:
        """Return one token each: what does not fit the table is not admitted."""
        return num_requests


@dataclass(frozen=True, eq=False)
class Delayed:
    """The production scheduler: the budget from `delay` steps ago, by global search."""

    name: str
    table: CostTable
    delay: int = 2
    drafter: DrafterName = "dspark"
    reads_survival: bool = True

    def lengths(self, survival: Survivals, stale: Survivals) -> Lengths:
        """Return the twin of `DelayedScheduler.step`."""
        ranked, theta = ranked_throughput(stale, self.table.sps.numpy())
        theta[1:][ranked <= 0] = -np.inf
        return admit(survival, int(theta.argmax()))

    def most_tokens(self, num_requests: int, block_size: int) -> int:
        """Return one token each: what does not fit the table is not admitted."""
        return num_requests


def make_policy(name: str, tables: dict[DrafterName, CostTable]) -> SimulatedPolicy:
    """Return a policy by name: none, mtp-1, fixed-K, threshold-P, algorithm-1, delayed, delayed-D.

    Args:
        name: of the policy.
        tables: what the schedulers know, by drafter.

    Raises:
        ValueError: for a name that is none of these.
    """
    kind, _, number = name.partition("-")
    try:
        if name == "none":
            return Fixed(name, "none", 0)
        if name == "mtp-1":
            return Fixed(name, "mtp", 1)
        if name == "algorithm-1":
            return EarlyStop(name, tables["dspark"])
        if kind == "fixed" and 1 <= int(number) <= 32:
            return Fixed(name, "dspark", int(number))
        if kind == "threshold" and 0 <= float(number) <= 1:
            return Threshold(name, float(number))
        if kind == "delayed" and (not number or int(number) >= 1):
            return Delayed(name, tables["dspark"], int(number or 2))
    except ValueError:
        pass
    raise ValueError(
        f"--policies: got {name!r}, expected none, mtp-1, fixed-K, threshold-P, algorithm-1, delayed or delayed-D with D >= 1"
    )

"""The only place that talks to other ranks: three collectives, each counted.

Everything else in this package is a pure function of tensors. `count_traffic` records what was exchanged, so that a claim about
bytes on the wire is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dsspark.distributed.partition import VocabularyShard


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective.

    Attributes:
        label: what was exchanged.
        kind: "all_reduce", "all_gather" or "broadcast".
        payload: bytes of the result, which every rank ends up with.
        world_size: P.
    """

    label: str
    kind: str
    payload: int
    world_size: int

    @property
    def wire(self) -> float:
        """Bytes that each rank must receive under a ring algorithm: 2 (P - 1) / P of an all-reduce's payload, (P - 1) / P of an
        all-gather's, all of a broadcast's; 0 for a single rank."""
        if self.world_size == 1:
            return 0.0
        share = (self.world_size - 1) / self.world_size
        return self.payload * {"all_reduce": 2 * share, "all_gather": share, "broadcast": 1.0}[self.kind]


@dataclass(frozen=True)
class Traffic:
    """What was exchanged, in order."""

    messages: list[Message] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """Collectives."""
        return len(self.messages)

    @property
    def payload(self) -> int:
        """Bytes of all results."""
        return sum(message.payload for message in self.messages)

    @property
    def wire(self) -> float:
        """Bytes that each rank receives, see `Message.wire`."""
        return sum(message.wire for message in self.messages)

    def by_label(self) -> dict[str, int]:
        """Return the payload of each label, in order of first use."""
        totals: dict[str, int] = {}
        for message in self.messages:
            totals[message.label] = totals.get(message.label, 0) + message.payload
        return totals


_COUNTER: ContextVar[Traffic | None] = ContextVar("dsspark_traffic", default=None)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Record every collective of this package in the block.

    Example:
        >>> import torch
        >>> from dsspark.distributed import VocabularyShard
        >>> with count_traffic() as traffic:
        ...     maximum = all_reduce(torch.zeros(2, dtype=torch.int64), VocabularyShard.single(8), "max", "row maxima")
        >>> traffic.calls, traffic.payload, traffic.wire
        (1, 16, 0.0)
    """
    traffic = Traffic()
    token = _COUNTER.set(traffic)
    try:
        yield traffic
    finally:
        _COUNTER.reset(token)


def all_reduce(tensor: Tensor, shard: VocabularyShard, operation: str, label: str) -> Tensor:
    """Return the elementwise "sum" or "max" over ranks; integers only, so that the order of ranks cannot matter. Overwrites `tensor`."""
    if tensor.is_floating_point():
        raise TypeError(f"all_reduce: got {tensor.dtype}, expected integers: a float sum depends on the order of ranks")
    _count(label, "all_reduce", tensor, shard)
    if shard.world_size > 1 and tensor.numel():
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], group=shard.group)
    return tensor


def all_gather(tensor: Tensor, shard: VocabularyShard, label: str) -> Tensor:
    """Return every rank's tensor, [P, ...]; the shapes must be the same on all ranks."""
    gathered = torch.empty((shard.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    _count(label, "all_gather", gathered, shard)
    if shard.world_size == 1:
        return gathered.copy_(tensor[None])
    if gathered.numel():
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in newer torch
        gather(gathered.view(-1), tensor.contiguous().view(-1), group=shard.group)
    return gathered


def broadcast(tensor: Tensor, shard: VocabularyShard, label: str) -> Tensor:
    """Return the tensor of the group's first rank. Overwrites `tensor` on the others."""
    _count(label, "broadcast", tensor, shard)
    if shard.world_size > 1 and tensor.numel():
        source = 0 if shard.group is None else dist.get_global_rank(shard.group, 0)
        dist.broadcast(tensor, source, group=shard.group)
    return tensor


def _count(label: str, kind: str, result: Tensor, shard: VocabularyShard) -> None:
    traffic = _COUNTER.get()
    if traffic is not None:
        payload = result.numel() * result.element_size()
        traffic.messages.append(Message(label=label, kind=kind, payload=payload, world_size=shard.world_size))

"""Which part of the vocabulary a rank holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsspark._checks import check_cell, check_dtype, check_shape
from dsspark.models.heads import MarkovHead
from dsspark.numerics import CELL

MAX_VOCAB = 2**20
"""Largest vocabulary: row totals are exact in 64-bit fixed point up to here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyShard:
    """The columns of the vocabulary that this rank holds, and the ranks that hold the others.

    Rank p of the group holds ids bounds[p] .. bounds[p + 1] - 1: rows of W2 and of the LM head, columns of the base and of the
    target logits. A cell of the two-level draw is never split over ranks, so its mass is the same number on any number of ranks.

    Attributes:
        bounds: P + 1 increasing offsets, 0 first and V last. Shards may be uneven; each holds at least one id, and each begins at a
            multiple of `cell`.
        rank: of this process within the group.
        cell: ids in a cell; runs that must draw the same tokens use the same cell.
        group: the torch.distributed process group; None is the default group (or no group at all for a single rank).
        draft_to_target: [size] int64, the target ids of this rank's draft ids, see `of_draft`; None where the ids are the same.
        target_bounds: the partition of the target that `draft_to_target` belongs to.

    Raises:
        ValueError: for bounds that are no partition, a vocabulary above 2 ** 20, a rank outside the group, or a bound that is no
            multiple of `cell`; the message names a cell that works.

    Example:
        >>> VocabularyShard(bounds=(0, 37984, 75968, 113952, 151936), rank=1, cell=32).offset
        37984
    """

    bounds: tuple[int, ...]
    rank: int = 0
    cell: int = CELL
    group: dist.ProcessGroup | None = None
    draft_to_target: Tensor | None = None
    target_bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_cell(self.cell)
        bounds = tuple(self.bounds)
        if len(bounds) < 2 or bounds[0] != 0 or any(high <= low for low, high in itertools.pairwise(bounds)):
            raise ValueError(
                f"bounds: got {bounds}, expected 0 = b_0 < b_1 < ... < b_P = V; give every rank at least one id"
            )
        if bounds[-1] > MAX_VOCAB:
            raise ValueError(f"bounds: got a vocabulary of {bounds[-1]}, expected at most {MAX_VOCAB} ids")
        if not 0 <= self.rank < len(bounds) - 1:
            raise ValueError(f"rank: got {self.rank}, expected 0..{len(bounds) - 2}, one for each of the shards")
        inner = bounds[1:-1]
        if any(bound % self.cell for bound in inner):
            raise ValueError(
                f"cell: got {self.cell} with shard offsets {inner}, expected a divisor of every offset: a cell must lie on one rank; "
                f"cell={largest_cell(inner, self.cell)} works for these shards, or cut them with VocabularyShard.split"
            )
        object.__setattr__(self, "bounds", bounds)
        if self.draft_to_target is not None:
            check_shape("draft_to_target", self.draft_to_target, (self.size,))
            check_dtype("draft_to_target", self.draft_to_target, (torch.int64,))

    @property
    def world_size(self) -> int:
        """P, the number of ranks."""
        return len(self.bounds) - 1

    @property
    def vocab_size(self) -> int:
        """V, ids on all ranks."""
        return self.bounds[-1]

    @property
    def offset(self) -> int:
        """The first id of this rank."""
        return self.bounds[self.rank]

    @property
    def size(self) -> int:
        """Ids of this rank."""
        return self.bounds[self.rank + 1] - self.offset

    @property
    def cell_counts(self) -> tuple[int, ...]:
        """Cells of each rank."""
        return tuple(-(-(high - low) // self.cell) for low, high in itertools.pairwise(self.bounds))

    @classmethod
    def single(cls, vocab_size: int, *, cell: int = CELL) -> VocabularyShard:
        """Return the shard of a run on one rank: the whole vocabulary, no process group needed."""
        return cls(bounds=(0, vocab_size), cell=cell)

    @classmethod
    def split(cls, vocab_size: int, *, cell: int = CELL, group: dist.ProcessGroup | None = None) -> VocabularyShard:
        """Share the cells as evenly as they go; the first ranks hold one more. Communicates nothing.

        Raises:
            ValueError: for fewer cells than ranks.

        Example:
            >>> VocabularyShard.split(151936).bounds
            (0, 151936)
        """
        check_cell(cell)
        world_size, rank = _place(group)
        num_cells = -(-vocab_size // cell)
        if num_cells < world_size:
            raise ValueError(
                f"vocab_size: got {num_cells} cells of {cell} for {world_size} ranks, expected one each; choose a smaller cell"
            )
        bounds = tuple(
            min(vocab_size, cell * (p * (num_cells // world_size) + min(p, num_cells % world_size)))
            for p in range(world_size + 1)
        )
        return cls(bounds=bounds, rank=rank, cell=cell, group=group)

    @classmethod
    def from_size(
        cls,
        size: int,
        *,
        cell: int = CELL,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> VocabularyShard:
        """Adopt the partition that the engine has: every rank tells how many ids it holds, in order of rank.

        Collective: call it once, at start-up, on every rank of the group. All of them raise or none does.

        Args:
            size: ids of this rank, padding of the LM head left out.
            cell: as the attribute.
            group: as the attribute.
            device: a CUDA device for NCCL groups.
        """
        world_size, rank = _place(group)
        sizes = torch.zeros(world_size, dtype=torch.int64, device=device)
        sizes[rank] = size
        if world_size > 1:
            dist.all_reduce(sizes, group=group)
        bounds = (0, *sizes.cumsum(0).tolist())
        return cls(bounds=bounds, rank=rank, cell=cell, group=group)

    def of_draft(self, draft_to_target: Tensor) -> VocabularyShard:
        """Return the shard of a drafter with a vocabulary of its own, laid beside this target shard.

        A rank must hold exactly the draft ids whose target ids it holds, or a residual would need rows of q from other ranks. So
        the draft's bounds follow from the target's, and `cell` must divide them too.

        Args:
            draft_to_target: the whole map, [V_draft] int64, strictly increasing target ids. Read on the host: call this at start-up.

        Raises:
            ValueError: if a rank would hold no draft id, or for draft bounds that `cell` does not divide.
        """
        check_shape("draft_to_target", draft_to_target, ("V_draft",))
        check_dtype("draft_to_target", draft_to_target, (torch.int64,))
        edges = torch.tensor(self.bounds[:-1], device=draft_to_target.device)
        bounds = (*torch.searchsorted(draft_to_target, edges).tolist(), draft_to_target.shape[0])
        low, high = bounds[self.rank], bounds[self.rank + 1]
        return VocabularyShard(
            bounds=bounds,
            rank=self.rank,
            cell=self.cell,
            group=self.group,
            draft_to_target=draft_to_target[low:high],
            target_bounds=self.bounds,
        )

    def columns(self, full: Tensor) -> Tensor:
        """Return this rank's part of the last dimension, [..., V] -> [..., size]; a view."""
        check_shape("full", full, (*full.shape[:-1], self.vocab_size))
        return full[..., self.offset : self.offset + self.size]

    def shard_head(self, head: MarkovHead) -> MarkovHead:
        """Return a head that holds this rank's rows of W2 and shares everything else with `head`, storage included.

        W1 stays whole on every rank: the previous token is looked up in it, and a sharded lookup would cost one more exchange a
        position.
        """
        weight = head.markov_w2.weight
        check_shape("head.markov_w2.weight", weight, (self.vocab_size, head.rank))
        with torch.device("meta"):
            part = MarkovHead(head.markov_w1.weight.shape[0], head.rank, head.kind, head.hidden_size, self.size)
        part.markov_w1, part.gate_proj, part.joint_proj = head.markov_w1, head.gate_proj, head.joint_proj
        rows = weight.detach()[self.offset : self.offset + self.size]
        part.markov_w2.weight = torch.nn.Parameter(rows, requires_grad=weight.requires_grad)
        return part


def largest_cell(offsets: tuple[int, ...], limit: int) -> int:
    """Return the largest cell up to `limit` that divides every offset.

    Example:
        >>> largest_cell((37984, 75968, 113952), 256)
        32
    """
    common = math.gcd(*offsets)
    return next(cell for cell in range(limit, 0, -1) if common % cell == 0)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (world size, rank) in the group; (1, 0) where torch.distributed is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise RuntimeError(
                "group: got a process group without torch.distributed, expected init_process_group first"
            )
        return 1, 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: got a group without this process, expected one that it belongs to")
    return dist.get_world_size(group), rank

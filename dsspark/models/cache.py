"""The target's paged key-value cache: requests come and go, and a rejected draft's keys are forgotten by lowering a length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsspark._checks import check_shape
from dsspark.types import PackedBatch


class PagedKVCache:
    """Keys and values of every layer in pages of `page_size` positions; page p of a layer belongs to one request at most.

    Attributes:
        keys: one [pages, page_size, kv_heads, head_dim] tensor a layer. Grows by doubling.
        values: likewise.
        block_table: [R, max_pages] int32, the pages of each request in order; unused entries are 0.
        lengths: [R] int64, positions each request holds.

    Args:
        num_layers: layers of the model.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        page_size: positions a page.
        num_requests: R at the start, each of them empty.
        dtype: of keys and values.
        device: where everything lives.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 32,
        num_requests: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: got {page_size}, expected 1 or more positions a page")
        self.page_size = page_size
        shape = (0, page_size, num_kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._free: list[int] = []
        self._pages: list[list[int]] = []
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(0, 1, dtype=torch.int32, device=device)
        self.add_requests(num_requests)

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self._pages)

    @property
    def num_pages_in_use(self) -> int:
        """Pages that belong to some request."""
        return sum(len(pages) for pages in self._pages)

    def add_requests(self, count: int) -> None:
        """Append `count` empty requests after the existing rows."""
        if count < 0:
            raise ValueError(f"count: got {count}, expected 0 or more requests")
        self._pages.extend([] for _ in range(count))
        self.lengths = torch.cat((self.lengths, self.lengths.new_zeros(count)))
        self._rebuild_table()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the requests `rows`, in that order, and free the pages of all others.

        Raises:
            ValueError: for a row out of range or named twice.
        """
        rows = [int(row) for row in rows]
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.num_requests for row in rows):
            raise ValueError(f"rows: got {rows}, expected distinct rows from 0 to {self.num_requests - 1}")
        for row in set(range(self.num_requests)) - set(rows):
            self._free.extend(self._pages[row])
        self._pages = [self._pages[row] for row in rows]
        self.lengths = self.lengths[torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)]
        self._rebuild_table()

    def reserve(self, new_lengths: Tensor) -> None:
        """Allocate pages so that request r can hold new_lengths[r] positions, and set `lengths` to that.

        Args:
            new_lengths: [R] integers, none below the present length.

        Raises:
            ValueError: for another shape or a length that shrinks (use `rollback`).
        """
        check_shape("new_lengths", new_lengths, (self.num_requests,))
        if bool((new_lengths < self.lengths).any()):
            raise ValueError(
                f"new_lengths: got {new_lengths.tolist()}, expected at least {self.lengths.tolist()}; shrink with rollback"
            )
        wanted = [-(-length // self.page_size) for length in new_lengths.tolist()]
        missing = sum(max(0, want - len(pages)) for want, pages in zip(wanted, self._pages, strict=True))
        if missing > len(self._free):
            self._grow(missing - len(self._free))
        for want, pages in zip(wanted, self._pages, strict=True):
            pages.extend(self._free.pop() for _ in range(want - len(pages)))
        self.lengths = new_lengths.to(self.lengths)
        if missing:
            self._rebuild_table()

    def rollback(self, lengths: Tensor) -> None:
        """Forget every position from lengths[r] on, and free the pages that no longer hold any.

        Args:
            lengths: [R] integers, none above the present length.

        Raises:
            ValueError: for another shape or a length that grows (use `reserve`).
        """
        check_shape("lengths", lengths, (self.num_requests,))
        if bool(((lengths > self.lengths) | (lengths < 0)).any()):
            raise ValueError(
                f"lengths: got {lengths.tolist()}, expected 0 up to {self.lengths.tolist()}; grow with reserve"
            )
        freed = False
        for length, pages in zip(lengths.tolist(), self._pages, strict=True):
            keep = -(-length // self.page_size)
            freed |= len(pages) > keep
            self._free.extend(pages[keep:])
            del pages[keep:]
        self.lengths = lengths.to(self.lengths)
        if freed:
            self._rebuild_table()

    def slots(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return which rows of the batch are no padding, and the flat slot (page * page_size + offset) of each of them.

        Raises:
            ValueError: if a position was not reserved.
        """
        rows = (batch.request_ids >= 0).nonzero()[:, 0]
        requests, positions = batch.request_ids[rows].to(torch.int64), batch.positions[rows]
        if bool((positions >= self.lengths[requests]).any()):
            raise ValueError(
                "batch: got a position beyond the cache's lengths, expected only reserved ones; call reserve first"
            )
        pages = self.block_table[requests, positions // self.page_size].to(torch.int64)
        return rows, pages * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, kv_heads, head_dim] of a layer into the flat slots [N]."""
        self.keys[layer].flatten(0, 1)[slots] = keys.to(self.keys[layer].dtype)
        self.values[layer].flatten(0, 1)[slots] = values.to(self.values[layer].dtype)

    def _grow(self, at_least: int) -> None:
        old = self.keys[0].shape[0]
        extra = max(at_least, old, 16)
        for store in (self.keys, self.values):
            for layer, tensor in enumerate(store):
                store[layer] = torch.cat((tensor, tensor.new_zeros(extra, *tensor.shape[1:])))
        self._free.extend(reversed(range(old, old + extra)))

    def _rebuild_table(self) -> None:
        width = max((len(pages) for pages in self._pages), default=0)
        rows = [pages + [0] * (max(width, 1) - len(pages)) for pages in self._pages]
        table = torch.tensor(rows, dtype=torch.int32, device=self.lengths.device)
        self.block_table = table.reshape(len(rows), max(width, 1))

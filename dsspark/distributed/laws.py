"""The law of every packed target row, as far as this rank can see it: weights of its columns, and what all ranks agreed on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsspark.distributed.exact import order_key

ROWS_AT_ONCE = 64
"""Rows whose weights exist at the same time: the temporaries of a pass over all rows are this many shards of a row."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A filter that keeps the first tokens of each row, in order (logit descending, id ascending), whatever ranks they lie on.

    Attributes:
        key: [N] int64, `order_key` of the last logit kept.
        ties: [N] int64, how many of this rank's tokens with that very logit are kept, lowest ids first.
        everything: [N] bool, rows that nothing is cut from.
    """

    key: Tensor
    ties: Tensor
    everything: Tensor

    def keeps(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Return which columns stay, [n, size] bool, for some rows."""
        at = keys == self.key[rows, None]
        early = at & (at.cumsum(dim=1) <= self.ties[rows, None])
        return (keys > self.key[rows, None]) | early | self.everything[rows, None]


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """Target rows at their temperatures, this rank's columns.

    Attributes:
        logits: [N, size], as they came.
        row_max: [N] float32, over all ranks.
        best: [N] int64, the lowest id that attains it.
        temperature: [N] float32.
        cuts: the filters found so far, applied in order.
        min_p: [N] float64, or None.
    """

    logits: Tensor
    row_max: Tensor
    best: Tensor
    temperature: Tensor
    cuts: list[Cut] = field(default_factory=list)
    min_p: Tensor | None = None

    def weights(self, rows: Tensor) -> Tensor:
        """Return the filtered weights of some rows, [n, size] float32, before they are divided by their total."""
        logits = self.logits[rows]
        temperature = self.temperature[rows]
        scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
        weights = torch.exp((logits.to(torch.float32) - self.row_max[rows, None]) / scale)
        weights.nan_to_num_(
            nan=0.0, posinf=0.0
        )  # a row that is no law is marked elsewhere; here it must only be harmless
        if self.cuts:
            keys = order_key(logits)
            for cut in self.cuts:
                weights.masked_fill_(~cut.keeps(keys, rows), 0.0)
        if self.min_p is not None:
            weights.masked_fill_(weights.to(torch.float64) < self.min_p[rows, None], 0.0)
        return weights

    def chunks(self) -> Iterator[Tensor]:
        """Yield all rows' indices, `ROWS_AT_ONCE` at a time."""
        num_rows = self.logits.shape[0]
        for start in range(0, num_rows, ROWS_AT_ONCE):
            yield torch.arange(start, min(start + ROWS_AT_ONCE, num_rows), device=self.logits.device)

"""What the operators share: the way to the eager function, and results taken apart into tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsspark.types import PackedBatch


def eager(name: str) -> Callable[..., Any]:
    """Return the public function: an operator's body is never traced, so there it takes its eager way."""
    import dsspark

    return getattr(dsspark, name)  # type: ignore[no-any-return]


def split_batch(batch: PackedBatch) -> list[Tensor]:
    """Return the tensors of a batch."""
    return [batch.tokens, batch.positions, batch.request_ids, batch.cu_seqlens, batch.num_tokens]


def join_batch(parts: list[Tensor]) -> PackedBatch:
    """Return the batch of `split_batch`."""
    tokens, positions, request_ids, cu_seqlens, num_tokens = parts
    return PackedBatch(
        tokens=tokens, positions=positions, request_ids=request_ids, cu_seqlens=cu_seqlens, num_tokens=num_tokens
    )

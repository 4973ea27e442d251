"""`pack` and `ragged_attention` as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark.ops.common import eager, join_batch, split_batch
from dsspark.types import PackedBatch


@torch.library.custom_op("dsspark::pack", mutates_args=())
def _pack_op(
    anchors: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    start_positions: Tensor,
    capacity: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch: PackedBatch = eager("pack")(
        anchors, draft_tokens, lengths, start_positions, capacity=capacity, backend=backend
    )
    return batch.tokens, batch.positions, batch.request_ids, batch.cu_seqlens, batch.num_tokens


@_pack_op.register_fake
def _(anchors, draft_tokens, lengths, start_positions, capacity, backend):  # type: ignore[no-untyped-def]
    # Without a capacity the number of rows is data: the compiler gets a size it cannot know.
    rows = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity
    return (
        anchors.new_empty((rows,), dtype=torch.int64),
        anchors.new_empty((rows,), dtype=torch.int64),
        anchors.new_empty((rows,), dtype=torch.int32),
        anchors.new_empty((anchors.shape[0] + 1,), dtype=torch.int32),
        anchors.new_empty((), dtype=torch.int32),
    )


def pack(
    anchors: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    start_positions: Tensor,
    *,
    capacity: int | None = None,
    backend: str,
) -> PackedBatch:
    """Traceable form of `dsspark.pack`."""
    return join_batch(list(_pack_op(anchors, draft_tokens, lengths, start_positions, capacity, backend)))


@torch.library.custom_op("dsspark::ragged_attention", mutates_args=())
def _ragged_attention_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: list[Tensor],
    block_table: Tensor,
    context_lens: Tensor,
    scale: float | None,
    backend: str,
) -> Tensor:
    out: Tensor = eager("ragged_attention")(
        query, key_cache, value_cache, join_batch(batch), block_table, context_lens, scale=scale, backend=backend
    )
    return out.contiguous()


@_ragged_attention_op.register_fake
def _(query, key_cache, value_cache, batch, block_table, context_lens, scale, backend):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape)


def ragged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    backend: str,
) -> Tensor:
    """Traceable form of `dsspark.ragged_attention`."""
    result: Tensor = _ragged_attention_op(
        query, key_cache, value_cache, split_batch(batch), block_table, context_lens, scale, backend
    )
    return result

"""What decoding hundreds of chats at once on a CPU needs: coarse products, attention with grouped heads, a cache written in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

GROUPED = "dsspark_grouped"
"""The name under which transformers finds `_attend`."""
COLUMNS = 64
"""Columns that a cache grows by."""


@contextmanager
def coarse_products(precision: str = "medium") -> Iterator[None]:
    """Let float32 products round their factors to bfloat16 where the processor gains by it; sums and what is stored stay float32.

    Three times the speed on a CPU with AMX. For writing training data and for training, never for measuring.

    Args:
        precision: of `torch.set_float32_matmul_precision`; "highest" makes an exception inside.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention with grouped heads, each key read once for all queries of its group: query [B, H, Q, D], key and value [B, K, S, D].

    Its products stay exact: every length is another shape, and oneDNN's coarse ones keep about a megabyte for every shape they saw.
    """
    groups = key.shape[1]
    with coarse_products("highest"):
        grouped = rearrange(query * scaling, "b (k g) q d -> b k (g q) d", k=groups)
        scores = rearrange(grouped @ key.transpose(2, 3), "b k (g q) s -> b (k g) q s", q=query.shape[2])
        if attention_mask is not None:
            scores = scores + attention_mask[..., : key.shape[2]]
        weights = rearrange(scores.softmax(dim=-1), "b (k g) q s -> b k (g q) s", k=groups)
        return rearrange(weights @ value, "b k (g q) d -> b q (k g) d", q=query.shape[2]), None


def use_grouped_attention(model: Any) -> None:
    """Let a model of transformers attend with `_attend`; `set_attn_implementation` takes it back."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(GROUPED, _attend)
    AttentionMaskInterface.register(GROUPED, eager_mask)
    model.set_attn_implementation(GROUPED)


def roomy_cache(config: Any) -> Any:
    """Return a cache of transformers whose full-attention layers are written in place, in room that grows by `COLUMNS`."""
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
        keys: Tensor
        values: Tensor
        rooms: tuple[Tensor, Tensor] | None = None  # what keys and values are the first columns of

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            used, new = self.get_seq_length(), key_states.shape[2]
            if self.rooms is None or used + new > self.rooms[0].shape[2]:
                columns = -(-(used + new) // COLUMNS) * COLUMNS
                self.rooms = (_with_room(key_states, columns), _with_room(value_states, columns))
                if used:
                    self.rooms[0][:, :, :used], self.rooms[1][:, :, :used] = self.keys, self.values
            for room, states in zip(self.rooms, (key_states, value_states), strict=True):
                room[:, :, used : used + new] = states
            self.keys, self.values = (room[:, :, : used + new] for room in self.rooms)
            self.device, self.dtype, self.is_initialized = key_states.device, key_states.dtype, True
            return self.keys, self.values

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self.rooms = None

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self.rooms = None

    layers = DynamicCache(config=config).layers
    return Cache(layers=[RoomyLayer() if type(layer) is DynamicLayer else layer for layer in layers])


def _with_room(states: Tensor, columns: int) -> Tensor:
    return states.new_empty(*states.shape[:2], columns, states.shape[3])

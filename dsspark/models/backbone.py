"""The parallel backbone: one pass over [anchor, mask, ...] proposes a whole block (paper 2.2 with the change of 3.1).

Every draft layer's keys and values are [context ; block] (eq. 3): the context is the target's own features, projected once (eq. 2),
and stops strictly before the anchor, where the target has not run yet. Attention inside the block is bidirectional. Slot 0 is the
anchor and predicts x_1; slot k is a mask and predicts x_{k+1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from dsspark._checks import check_block_size, check_shape
from dsspark.models.layers import AttentionProjections, RMSNorm, SwiGLU, initialise, rotary_tables


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes of the parallel backbone.

    Attributes:
        feature_size: m * d of the target's concatenated features.
        hidden_size: d, the target's.
        block_size: gamma, 1 to 32.
        num_layers: draft layers.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: even.
        intermediate_size: of the SwiGLU.
        rope_base: of the rotary frequencies.
        norm_eps: of every RMSNorm.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    feature_size: int = 768
    hidden_size: int = 256
    block_size: int = 7
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_block_size("block_size", self.block_size)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: got {self.num_heads}, expected a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number, which rotary positions pair up")
        if self.num_layers < 1:
            raise ValueError(f"num_layers: got {self.num_layers}, expected 1 or more")


class KeyValue(NamedTuple):
    """Keys and values of one layer's context, [B, S, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor


def block_attention(query: Tensor, context: KeyValue, block: KeyValue, visible: Tensor) -> Tensor:
    r"""Attend from every slot to the context before its anchor and to its whole block (paper eq. 3).

    Args:
        query: [B, A, gamma, heads, head_dim]: A blocks for each of B contexts.
        context: [B, S, kv_heads, head_dim].
        block: [B, A, gamma, kv_heads, head_dim].
        visible: [B, A], how many context positions each block sees: the anchor's position.

    Returns:
        [B, A, gamma, heads, head_dim].
    """
    blocks, _, kv_heads = block.keys.shape[1:4]
    groups, length = query.shape[3] // kv_heads, context.keys.shape[1]
    query = rearrange(query * query.shape[-1] ** -0.5, "b a k (h g) e -> b a h (k g) e", h=kv_heads)
    flat = rearrange(query, "b a h q e -> b h (a q) e")
    to_context = flat @ rearrange(context.keys, "b s h e -> b h e s")
    hidden = torch.arange(length, device=query.device) >= visible[:, :, None]
    to_context = rearrange(to_context, "b h (a q) s -> b a h q s", a=blocks)
    to_context = to_context.masked_fill(hidden[:, :, None, None], float("-inf"))
    to_block = query @ rearrange(block.keys, "b a k h e -> b a h e k")

    weights = torch.cat((to_context, to_block), dim=-1).softmax(dim=-1)
    in_context, in_block = weights[..., :length], weights[..., length:]
    mixed = rearrange(in_context, "b a h q s -> b h (a q) s") @ rearrange(context.values, "b s h e -> b h s e")
    mixed = rearrange(mixed, "b h (a q) e -> b a h q e", a=blocks)
    mixed = mixed + in_block @ rearrange(block.values, "b a k h e -> b a h k e")
    out: Tensor = rearrange(mixed, "b a h (k g) e -> b a k (h g) e", g=groups)
    return out


class DraftLayer(nn.Module):
    """A pre-norm layer whose keys and values are [context ; block]; only the block has a stream of its own."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = AttentionProjections(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
        )
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], context: KeyValue, visible: Tensor) -> Tensor:
        """Return [B, A, gamma, d]."""
        normed = self.input_layernorm(x)
        block = KeyValue(*self.self_attn.key_value(normed, tables))
        x = x + self.self_attn.output(block_attention(self.self_attn.query(normed, tables), context, block, visible))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftBackbone(nn.Module):
    """What every backbone has: sizes, standardised features, and keys and values for the context.

    Args:
        config: sizes.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        # Raw features can reach 1e4 in one dimension and drown the rest: standardise each dimension first.
        self.register_buffer("feature_mean", torch.zeros(config.feature_size))
        self.register_buffer("feature_std", torch.ones(config.feature_size))

    def context_keys(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return the keys and values of each layer for verified tokens at `positions` [...]; each backbone has its own."""
        raise NotImplementedError(f"context_keys: {type(self).__name__} does not say what its layers attend to")

    def standardise(self, features: Tensor) -> Tensor:
        """Return features [..., F] with the fitted mean taken off and divided by the fitted standard deviation."""
        return (features - self.feature_mean) / self.feature_std

    @torch.no_grad()
    def fit_standardisation(self, features: Tensor) -> None:
        """Set the mean and the standard deviation of each feature dimension from a sample [N, F] of at least 2 rows."""
        check_shape("features", features, ("N", self.feature_mean.shape[0]))
        if features.shape[0] < 2:
            raise ValueError(
                f"features: got {features.shape[0]} rows, expected at least 2 to have a standard deviation"
            )
        self.feature_mean.copy_(features.mean(dim=0))
        self.feature_std.copy_(features.std(dim=0).clamp_min(1e-6))


class ParallelBackbone(DraftBackbone):
    """The draft layers, and the projection of the target's features into their context.

    Args:
        config: sizes.
        generator: draws the initial weights; a fresh generator with seed 0 if None.
    """

    def __init__(self, config: BackboneConfig, generator: torch.Generator | None = None) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        initialise(self, config.num_layers, generator or torch.Generator().manual_seed(0))

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The layers, in order."""
        return cast("list[DraftLayer]", list(self.layers))

    def context_keys(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return the keys and values that the target's features give each layer (paper eq. 2 and 3).

        Args:
            features: [..., m * d] of verified tokens.
            positions: [...] of those tokens in their texts.
        """
        context = self.hidden_norm(self.fc(self.standardise(features)))
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_base, context.dtype)
        return [KeyValue(*layer.self_attn.key_value(context, tables)) for layer in self.draft_layers]

    def forward(self, block: Tensor, anchor_positions: Tensor, context: Sequence[KeyValue]) -> Tensor:
        """Return the normed hidden states h of every slot, [B, A, slots, d].

        Args:
            block: embeddings of [anchor, mask, ...], [B, A, slots, d]: A blocks for each of B contexts.
            anchor_positions: [B, A]; slot k sits at position anchor + k, and its block sees the context before the anchor.
            context: keys and values of each layer, [B, S, kv_heads, head_dim], S at least the largest anchor position.
        """
        positions = anchor_positions[:, :, None] + torch.arange(block.shape[2], device=block.device)
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_base, block.dtype)
        x = block
        for layer, key_value in zip(self.draft_layers, context, strict=True):
            x = layer(x, tables, key_value, anchor_positions)
        out: Tensor = self.norm(x)
        return out


class DraftContext:
    """What a drafter remembers of each request: every layer's context keys and values, so that decoding recomputes none.

    Attributes:
        layers: keys and values of each layer, [R, capacity, kv_heads, head_dim]; capacity grows by doubling.
        lengths: [R] int64, context positions of each request.

    Args:
        backbone: whose context it is.
        num_requests: R.
    """

    def __init__(self, backbone: DraftBackbone, num_requests: int) -> None:
        if num_requests < 0:
            raise ValueError(f"num_requests: got {num_requests}, expected 0 or more")
        config, weight = backbone.config, next(backbone.parameters())
        empty = weight.new_zeros(num_requests, 0, config.num_kv_heads, config.head_dim)
        self.layers = [KeyValue(empty, empty) for _ in range(config.num_layers)]
        self.lengths = torch.zeros(num_requests, dtype=torch.int64, device=weight.device)

    def append(self, backbone: DraftBackbone, features: Tensor, request_ids: Tensor) -> None:
        """Append verified tokens; see `DSparkDrafter.extend`."""
        rows = (request_ids >= 0).nonzero()[:, 0]
        requests = request_ids[rows].to(torch.int64)
        num_requests = self.lengths.shape[0]
        if requests.numel() and int(requests.max()) >= num_requests:
            raise ValueError(
                f"request_ids: got {int(requests.max())}, expected ids below the context's {num_requests} requests"
            )
        order = requests.argsort(stable=True)
        counts = torch.bincount(requests, minlength=num_requests)
        first = counts.cumsum(0) - counts
        rank = torch.empty_like(requests)
        rank[order] = torch.arange(len(requests), device=requests.device) - first[requests[order]]
        positions = self.lengths[requests] + rank
        self.lengths = self.lengths + counts
        self._grow(int(self.lengths.max()) if num_requests else 0)
        new = backbone.context_keys(features[rows], positions)
        for layer, (keys, values) in zip(self.layers, new, strict=True):
            layer.keys[requests, positions] = keys.to(layer.keys.dtype)
            layer.values[requests, positions] = values.to(layer.values.dtype)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the requests `rows`, in that order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.lengths.device)
        self.layers = [KeyValue(layer.keys[index], layer.values[index]) for layer in self.layers]
        self.lengths = self.lengths[index]

    def visible(self) -> list[KeyValue]:
        """Return each layer's keys and values cut to the longest request."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        return [KeyValue(layer.keys[:, :longest], layer.values[:, :longest]) for layer in self.layers]

    def _grow(self, length: int) -> None:
        capacity = self.layers[0].keys.shape[1]
        if length <= capacity:
            return
        extra = max(length, 2 * capacity, 64) - capacity

        def grown(store: Tensor) -> Tensor:
            return torch.cat((store, store.new_zeros(store.shape[0], extra, *store.shape[2:])), dim=1)

        self.layers = [KeyValue(grown(layer.keys), grown(layer.values)) for layer in self.layers]

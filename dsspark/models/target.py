"""A small decoder-only language model over bytes: the target whose law speculative decoding must reproduce.

Pre-norm transformer with rotary positions, grouped-query attention, RMSNorm of queries and keys, and SwiGLU. Ids 0..255 are bytes,
then BOS, EOS and the drafter's mask; the rest pads the vocabulary to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dsspark._checks import INT_DTYPES, check_dtype, check_shape
from dsspark._dispatch import dispatched
from dsspark.models.cache import PagedKVCache
from dsspark.models.layers import AttentionProjections, RMSNorm, SwiGLU, causal_attention, initialise, rotary_tables
from dsspark.reference import verification as _verification
from dsspark.types import PackedBatch

BOS_ID, EOS_ID, MASK_ID = 256, 257, 258

ragged_attention = dispatched(_verification.ragged_attention)


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target.

    Attributes:
        vocab_size: V, at least 259 (256 bytes, BOS, EOS, mask).
        hidden_size: d.
        num_layers: decoder layers.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: even.
        intermediate_size: of the SwiGLU.
        feature_layers: the layers whose outputs the drafter reads, increasing; never the last one (paper section 3.3).
        rope_base: of the rotary frequencies.
        norm_eps: of every RMSNorm.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    vocab_size: int = 272
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    feature_layers: tuple[int, ...] = (1, 2, 3)
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if self.vocab_size <= MASK_ID:
            raise ValueError(
                f"vocab_size: got {self.vocab_size}, expected at least {MASK_ID + 1}: bytes, BOS, EOS and the mask"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: got {self.num_heads}, expected a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number, which rotary positions pair up")
        layers = self.feature_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers - 1:
            raise ValueError(
                f"feature_layers: got {layers}, expected increasing layers from 0 to {self.num_layers - 2}: never the last one"
            )

    @property
    def feature_size(self) -> int:
        """m * d: the size of the concatenated features of a token."""
        return len(self.feature_layers) * self.hidden_size


class TargetOutput(NamedTuple):
    """Logits [..., V] and features [..., m * d] of each token."""

    logits: Tensor
    features: Tensor


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer; how its queries meet the keys is left to the caller's `attend`."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = AttentionProjections(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
        )
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output from its input x [..., d] and the attention's output [..., heads, head_dim]."""
        x = x + self.self_attn.output(mixed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TargetLM(nn.Module):
    """The target: `forward` for training (dense, causal), `forward_ragged` for decoding (packed tokens, paged cache).

    Args:
        config: sizes.
        generator: draws the initial weights; a fresh generator with seed 0 if None.
    """

    def __init__(self, config: TargetConfig | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config = config or TargetConfig()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self, config.num_layers, generator or torch.Generator().manual_seed(0))

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers, in order."""
        return cast("list[DecoderLayer]", list(self.layers))

    def new_cache(self, num_requests: int = 0, page_size: int = 32) -> PagedKVCache:
        """Return an empty key-value cache for this model, on its device and in its dtype."""
        config, weight = self.config, self.lm_head.weight
        return PagedKVCache(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            num_requests=num_requests,
            dtype=weight.dtype,
            device=weight.device,
        )

    def hidden_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the final normed states [B, T, d], which `lm_head` turns into logits, and the features [B, T, m * d].

        Args:
            tokens: [B, T] ids, positions 0..T-1 of B independent texts.

        Raises:
            ValueError: for a shape that is not [B, T].
            TypeError: for ids that are no integers.
        """
        check_shape("tokens", tokens, ("B", "T"))
        check_dtype("tokens", tokens, INT_DTYPES)
        config = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        tables = rotary_tables(positions, config.head_dim, config.rope_base, x.dtype)
        features = []
        for index, layer in enumerate(self.decoder_layers):
            normed = layer.input_layernorm(x)
            query = layer.self_attn.query(normed, tables)
            x = layer.finish(x, causal_attention(query, *layer.self_attn.key_value(normed, tables)))
            if index in config.feature_layers:
                features.append(x)
        return self.norm(x), torch.cat(features, dim=-1)

    def forward(self, tokens: Tensor) -> TargetOutput:
        """Return logits [B, T, V] and features [B, T, m * d] of tokens [B, T], causally; see `hidden_states` for the errors."""
        hidden, features = self.hidden_states(tokens)
        return TargetOutput(self.lm_head(hidden), features)

    @torch.no_grad()
    def forward_ragged(self, batch: PackedBatch, cache: PagedKVCache) -> TargetOutput:
        """Run the packed tokens of all requests in one pass (paper 5.3) and write their keys and values into the cache.

        Args:
            batch: from `pack`; request r's tokens follow the positions the cache already holds for its row r.
            cache: reserved up to each request's last position in the batch.

        Returns:
            Logits [capacity, V] and features [capacity, m * d]; rows of padding hold nothing of meaning.

        Raises:
            ValueError: if the cache has another number of requests than the batch.

        Numerics: equals `forward` on each request's text up to float rounding.
        """
        hidden, features = self.hidden_ragged(batch, cache)
        return TargetOutput(self.lm_head(hidden), features)

    @torch.no_grad()
    def hidden_ragged(self, batch: PackedBatch, cache: PagedKVCache) -> tuple[Tensor, Tensor]:
        """Return the final normed states [capacity, d] and the features [capacity, m * d]; see `forward_ragged`."""
        if cache.num_requests != batch.num_requests:
            raise ValueError(f"cache: got {cache.num_requests} requests, expected {batch.num_requests} as in the batch")
        config = self.config
        x = self.embed_tokens(batch.tokens)
        tables = rotary_tables(batch.positions, config.head_dim, config.rope_base, x.dtype)
        rows, slots = cache.slots(batch)
        features = []
        for index, layer in enumerate(self.decoder_layers):
            normed = layer.input_layernorm(x)
            query = layer.self_attn.query(normed, tables)
            cache.write(index, slots, *(t[rows] for t in layer.self_attn.key_value(normed, tables)))
            mixed = ragged_attention(
                query, cache.keys[index], cache.values[index], batch, cache.block_table, cache.lengths
            )
            x = layer.finish(x, mixed)
            if index in config.feature_layers:
                features.append(x)
        return self.norm(x), torch.cat(features, dim=-1)


class TargetView:
    """The same target for drafters that read more of it: its features begin with the embedding of the token itself.

    Args:
        target: whose law and cache this is.
        last_hidden: after the embedding come the final normed states (MTP); False: the features of the target's layers (Eagle3).
    """

    def __init__(self, target: TargetLM, *, last_hidden: bool) -> None:
        self.target, self.last_hidden = target, last_hidden

    def new_cache(self, num_requests: int = 0) -> PagedKVCache:
        """Return an empty key-value cache of the target."""
        return self.target.new_cache(num_requests)

    @torch.no_grad()
    def forward_ragged(self, batch: PackedBatch, cache: PagedKVCache) -> TargetOutput:
        """Return the target's own logits, and features [capacity, d + F]; see `TargetLM.forward_ragged`."""
        hidden, features = self.target.hidden_ragged(batch, cache)
        read = hidden if self.last_hidden else features
        return TargetOutput(
            self.target.lm_head(hidden), torch.cat((self.target.embed_tokens(batch.tokens), read), dim=-1)
        )

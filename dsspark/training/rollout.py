"""Text drawn from the target itself: what a drafter meets when it decodes, and what it is partly trained on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dsspark.models.layers import causal_attention, rotary_tables
from dsspark.models.target import TargetLM


@torch.no_grad()
def sample_continuations(
    target: TargetLM, prefixes: Tensor, length: int, generator: torch.Generator, *, greedy: Tensor | None = None
) -> Tensor:
    """Continue each prefix with tokens drawn from the target's law at temperature 1, or with its likeliest tokens.

    Many rows of one length, so the cache is dense and nothing is packed: this is for making training data, not for decoding.

    Args:
        target: the model to draw from.
        prefixes: [N, P] ids, P at least 1.
        length: tokens to draw.
        generator: draws them.
        greedy: [N] bool, the rows that are continued at temperature 0 instead; None for none. Greedy text repeats itself as drawn
            text never does, and a drafter meets both.

    Returns:
        [N, P + length] int64: the prefixes with their continuations.
    """
    config, (count, prefix) = target.config, prefixes.shape
    shape = (count, config.num_kv_heads, prefix + length, config.head_dim)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in target.decoder_layers]
    tokens = torch.cat((prefixes, prefixes.new_zeros(count, length)), dim=1)
    logits = _extend(target, prefixes, 0, caches)
    for position in range(prefix, prefix + length):
        drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        if greedy is not None:
            drawn = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), drawn)
        tokens[:, position] = drawn[:, 0]
        if position + 1 < prefix + length:
            logits = _extend(target, drawn, position, caches)
    return tokens


def _extend(target: TargetLM, tokens: Tensor, start: int, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Run tokens [N, S] at positions start.., write their keys and values, and return the last token's logits [N, V].

    S may exceed 1 only at the start of the texts.
    """
    config, end = target.config, start + tokens.shape[1]
    x = target.embed_tokens(tokens)
    tables = rotary_tables(torch.arange(start, end), config.head_dim, config.rope_base, x.dtype)
    for layer, (key_cache, value_cache) in zip(target.decoder_layers, caches, strict=True):
        normed = layer.input_layernorm(x)
        query = layer.self_attn.query(normed, tables)
        keys, values = layer.self_attn.key_value(normed, tables)
        key_cache[:, :, start:end] = rearrange(keys, "n s k e -> n k s e")
        value_cache[:, :, start:end] = rearrange(values, "n s k e -> n k s e")
        if start == 0:
            mixed = causal_attention(query, keys, values)
        else:
            # The query heads of a key head become its rows: keys are never repeated.
            query = rearrange(query, "n 1 (k g) e -> n k g e", k=config.num_kv_heads)
            mixed = F.scaled_dot_product_attention(query, key_cache[:, :, :end], value_cache[:, :, :end])
            mixed = rearrange(mixed, "n k g e -> n 1 (k g) e")
        x = layer.finish(x, mixed)
    out: Tensor = target.lm_head(target.norm(x[:, -1]))
    return out

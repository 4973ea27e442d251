"""Autoregressive drafters: Eagle3's, and the multi-token-prediction module of DeepSeek-V3 (MTP-1 at gamma = 1).

Both draft token by token with one causal layer. Its input at position i is a *pair*: what is known of the text before token x_i (the
target's features of position i - 1, or the layer's own output where the target has not run yet) and the embedding of x_i itself; its
output predicts x_{i+1}. Slot 0 of a block is the anchor's pair, slot k reads slot k - 1's output and the token drafted there.

They differ in what they read of the target and in how a pair enters the layer:

- Eagle3 (Li et al. 2025): features of several layers, fused by `fc`; the layer attends from [norm(embedding) ; norm(state)], its
  residual stream is the state.
- MTP (DeepSeek-V3 2024, section 2.2): the final normed state; the stream is a projection of [norm(embedding) ; norm(state)].

The LM head and the embedding are the target's. Both are trained over their own rollout with true tokens ("training-time test").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from dsspark._checks import INT_DTYPES, check_dtype, check_shape
from dsspark._dispatch import Backend
from dsspark.models.backbone import BackboneConfig, DraftBackbone, DraftContext, KeyValue, block_attention
from dsspark.models.drafter import TeacherForced, TeacherTexts, draft_block
from dsspark.models.layers import AttentionProjections, RMSNorm, SwiGLU, initialise, rotary_tables
from dsspark.models.target import TargetLM
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Proposal

Kind = Literal["eagle3", "mtp"]


@dataclass(frozen=True)
class AutoregressiveConfig:
    """Sizes of an autoregressive drafter.

    Attributes:
        backbone: sizes; one layer. `feature_size` is m * d for Eagle3 and d for MTP, `block_size` is gamma, 1 for MTP-1.
        kind: "eagle3" or "mtp".

    Raises:
        ValueError: for another kind, or more than one layer.
    """

    backbone: BackboneConfig = field(default_factory=lambda: BackboneConfig(num_layers=1))
    kind: Kind = "eagle3"

    def __post_init__(self) -> None:
        if self.kind not in ("eagle3", "mtp"):
            raise ValueError(f"kind: got {self.kind!r}, expected 'eagle3' or 'mtp'")
        if self.backbone.num_layers != 1:
            raise ValueError(
                f"num_layers: got {self.backbone.num_layers}, expected 1: a deeper layer's context would depend on every earlier pair"
            )


class PairLayer(nn.Module):
    """One causal layer over pairs (state, embedding).

    Args:
        config: sizes.
        kind: how a pair enters.
    """

    def __init__(self, config: BackboneConfig, kind: Kind) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.embed_norm, self.state_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pair_proj = nn.Linear(2 * size, size, bias=False) if kind == "mtp" else None
        self.input_layernorm = RMSNorm(size, eps) if kind == "mtp" else None
        self.self_attn = AttentionProjections(
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            eps,
            input_size=2 * size if kind == "eagle3" else None,
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def enter(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream [..., d] and what the attention reads, of states and embeddings [..., d]."""
        pair = torch.cat((self.embed_norm(embedding), self.state_norm(state)), dim=-1)
        if self.pair_proj is None or self.input_layernorm is None:
            return state, pair
        stream = self.pair_proj(pair)
        return stream, self.input_layernorm(stream)

    def finish(self, stream: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output from its stream and the attention's output [..., heads, head_dim]."""
        stream = stream + self.self_attn.output(mixed)
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class PairBackbone(DraftBackbone):
    """The layer, the fusion of the target's features into its first states, and the final norm.

    Args:
        config: sizes.
        kind: "eagle3" or "mtp".
        generator: draws the initial weights.
    """

    def __init__(self, config: BackboneConfig, kind: Kind, generator: torch.Generator) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False) if kind == "eagle3" else None
        self.layers = nn.ModuleList((PairLayer(config, kind),))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        initialise(self, 1, generator)

    @property
    def layer(self) -> PairLayer:
        """The only layer."""
        return cast("PairLayer", self.layers[0])

    def state(self, features: Tensor) -> Tensor:
        """Return the first states [..., d] of the target's features [..., F] of the position before each pair."""
        features = self.standardise(features)
        return features if self.fc is None else self.fc(features)

    def context_keys(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return the layer's keys and values of verified pairs.

        Args:
            features: [..., d + F]: the embedding of x_i, then the target's features of position i - 1.
            positions: [...], i.
        """
        embedding, before = torch.split(features, [self.config.hidden_size, self.config.feature_size], dim=-1)
        _, read = self.layer.enter(self.state(before), embedding)
        return [KeyValue(*self.layer.self_attn.key_value(read, self._tables(positions, read)))]

    def step(
        self, state: Tensor, embedding: Tensor, anchors: Tensor, context: KeyValue, block: list[KeyValue]
    ) -> Tensor:
        """Run the next slot of every block and append its keys and values to `block`.

        Args:
            state: [B, A, d], the slot before's output, or the fused features for slot 0.
            embedding: [B, A, d] of the slot's own token.
            anchors: positions [B, A]; a block sees the context before its anchor.
            context: [B, S, kv_heads, head_dim].
            block: earlier slots; changed in place.

        Returns:
            The slot's output [B, A, d], before the final norm.
        """
        stream, read = self.layer.enter(state, embedding)
        stream, read, attention = stream[:, :, None], read[:, :, None], self.layer.self_attn
        tables = self._tables(anchors[:, :, None] + len(block), read)
        block.append(KeyValue(*attention.key_value(read, tables)))
        so_far = KeyValue(*(torch.cat(parts, dim=2) for parts in zip(*block, strict=True)))
        mixed = block_attention(attention.query(read, tables), context, so_far, anchors)
        return self.layer.finish(stream, mixed)[:, :, 0]

    def _tables(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.config.head_dim, self.config.rope_base, like.dtype)


class PairContext(DraftContext):
    """Keys and values of verified pairs, and the features of each request's last position, whose pair the next anchor completes.

    Attributes:
        pending: [R, F]; the features' mean before the first position, which standardises to 0.
    """

    def __init__(self, backbone: PairBackbone, num_requests: int) -> None:
        super().__init__(backbone, num_requests)
        self.pending = backbone.feature_mean.expand(num_requests, -1).clone()

    def append(self, backbone: DraftBackbone, features: Tensor, request_ids: Tensor) -> None:
        """Append verified tokens: features [M, d + F] begin with the embedding of each token itself."""
        rows = (request_ids >= 0).nonzero()[:, 0]
        order = rows[request_ids[rows].argsort(stable=True)]
        requests = request_ids[order].to(torch.int64)
        embedding, own = torch.split(
            features[order], [backbone.config.hidden_size, backbone.config.feature_size], dim=-1
        )
        change = requests[1:] != requests[:-1]
        edge = torch.ones_like(requests[:1], dtype=torch.bool)
        first, last = torch.cat((edge, change)), torch.cat((change, edge))
        inside = requests.clamp(max=len(self.pending) - 1)  # a request that does not exist is named by `super().append`
        before = torch.where(first[:, None], self.pending[inside].to(own), own.roll(1, dims=0))
        super().append(backbone, torch.cat((embedding, before), dim=-1), requests)
        self.pending[requests[last]] = own[last].to(self.pending)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the requests `rows`, in that order."""
        super().keep(rows)
        self.pending = self.pending[torch.tensor(list(rows), dtype=torch.int64, device=self.pending.device)]


class AutoregressiveDrafter(nn.Module):
    """Proposes gamma tokens in gamma passes of one layer; has no confidence head.

    It reads a `TargetView` of the target: `dsspark.models.drafters.view_for` returns the right one.

    Args:
        target: its embedding and LM head are used as they are, never trained nor saved here.
        config: sizes and kind.
        generator: draws the initial weights; a fresh generator with seed 0 if None.

    Attributes:
        block_size: gamma.

    Raises:
        ValueError: if the sizes do not fit the target's.
    """

    sts_temperatures: Tensor | None = None

    def __init__(
        self, target: TargetLM, config: AutoregressiveConfig | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.config = config = config or AutoregressiveConfig()
        hidden_size = target.config.hidden_size
        wanted = (hidden_size if config.kind == "mtp" else target.config.feature_size, hidden_size)
        if (config.backbone.feature_size, config.backbone.hidden_size) != wanted:
            raise ValueError(
                f"config: got feature_size, hidden_size {config.backbone.feature_size}, {config.backbone.hidden_size}, "
                f"expected {wanted[0]}, {wanted[1]} as the target's for kind={config.kind!r}"
            )
        # A tuple, so that nn.Module neither registers nor saves what belongs to the target.
        self._shared = (target.embed_tokens, target.lm_head)
        self.block_size = config.backbone.block_size
        self.backbone = PairBackbone(config.backbone, config.kind, generator or torch.Generator().manual_seed(0))

    def new_context(self, num_requests: int) -> PairContext:
        """Return the empty context of R requests."""
        return PairContext(self.backbone, num_requests)

    @torch.no_grad()
    def extend(self, context: PairContext, features: Tensor, request_ids: Tensor) -> None:
        """Append what a `TargetView` said of verified tokens to their requests' contexts.

        Args:
            context: from `new_context`; changed in place.
            features: [M, d + F], each token's embedding and its features.
            request_ids: [M] integers, the request of each row; a request's rows are in the order of its text. Negative: padding.

        Raises:
            ValueError: for shapes that do not belong together or a request that does not exist.
            TypeError: for ids that are no integers.
        """
        backbone = self.config.backbone
        check_shape("features", features, ("M", backbone.hidden_size + backbone.feature_size))
        check_shape("request_ids", request_ids, (features.shape[0],))
        check_dtype("request_ids", request_ids, INT_DTYPES)
        context.append(self.backbone, features, request_ids)

    @torch.no_grad()
    def propose(
        self,
        anchors: Tensor,
        context: PairContext,
        uniforms: Uniforms,
        *,
        temperature: float | Tensor = 1.0,
        keep_logits: bool = True,
        backend: Backend = "auto",
    ) -> Proposal:
        """Draft a block from the anchors, token by token; see `DSparkDrafter.propose`.

        Raises:
            ValueError: as `draft_block` does, or for another number of requests than the context has.
        """
        check_shape("anchors", anchors, (context.lengths.shape[0],))
        check_dtype("anchors", anchors, INT_DTYPES)
        embed, lm_head = self._shared
        tokens, state = anchors.to(torch.int64), self.backbone.state(context.pending)[:, None]
        (keys,), block = context.visible(), list[KeyValue]()
        steps = []
        for k in range(self.block_size):
            state = self.backbone.step(state, embed(tokens)[:, None], context.lengths[:, None], keys, block)
            noise = Uniforms(
                draft=uniforms.draft[:, k : k + 1], accept=uniforms.accept[:, k : k + 1], final=uniforms.final
            )
            logits = lm_head(self.backbone.norm(state))
            steps.append(
                draft_block(
                    logits, tokens, None, noise, temperature=temperature, keep_logits=keep_logits, backend=backend
                )
            )
            tokens = steps[-1].tokens[:, 0]
        return Proposal(_joined(steps), None)

    def teacher_forced(self, texts: TeacherTexts, anchors: Tensor) -> TeacherForced:
        """Return what the drafter says in blocks at `anchors` [B, A]: its own states, the true tokens ("training-time test").

        Differentiable.
        """
        embed, lm_head = self._shared
        own = texts.hidden if self.config.kind == "mtp" else texts.features
        start = self.backbone.feature_mean.to(own).expand(len(own), 1, -1)
        before = torch.cat((start, own[:, :-1]), dim=1)
        pairs = torch.cat((embed(texts.tokens[:, : own.shape[1]]).to(own), before), dim=-1)
        (context,) = self.backbone.context_keys(pairs, torch.arange(own.shape[1]))
        rows = torch.arange(len(own))[:, None]
        state, block, outputs = self.backbone.state(before[rows, anchors]), list[KeyValue](), []
        embedded = embed(texts.blocks(anchors, self.block_size))
        for k in range(self.block_size):
            state = self.backbone.step(state, embedded[:, :, k], anchors, context, block)
            outputs.append(state)
        hidden = self.backbone.norm(rearrange(torch.stack(outputs, dim=2), "b a k d -> (b a) k d"))
        return TeacherForced(lm_head(hidden).float(), None)


def _joined(steps: Sequence[DraftBlock]) -> DraftBlock:
    """Return blocks of one token each as one block: its laws are theirs."""
    names = ("tokens", "token_probs", "row_max", "row_sum", "logits", "base_logits")
    columns = {name: [getattr(step, name) for step in steps] for name in names}
    joined = {name: torch.cat(parts, dim=1) for name, parts in columns.items() if parts[0] is not None}
    return replace(steps[0], **joined)

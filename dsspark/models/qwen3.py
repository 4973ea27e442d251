"""The Qwen3-style DSpark drafter that DeepSpec, speculators, SpecForge and ModelOpt train and release.

The same parallel backbone as `dsspark.models.backbone`, without standardised features: context = hidden_norm(fc(target hidden states)),
given to every layer as it is (only the block passes through `input_layernorm`), RMSNorm of queries and keys per head before the
rotation, full attention inside the block, one final `norm` whose output feeds the LM head, the gate, the RNN and the confidence head.
Load one with `dsspark.checkpoints.load_drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsspark._checks import check_shape
from dsspark._dispatch import Backend
from dsspark.models.backbone import BackboneConfig, DraftContext, DraftLayer, KeyValue, ParallelBackbone
from dsspark.models.drafter import DrafterConfig, DSparkDrafter, confidence_logits, draft_block
from dsspark.models.heads import ConfidenceHead, MarkovHead
from dsspark.models.layers import RMSNorm, rotary_tables
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Proposal


@dataclass(frozen=True, kw_only=True)
class Qwen3DrafterConfig(DrafterConfig):
    """Sizes and conventions of a released drafter.

    Attributes:
        backbone: sizes; its `block_size` is gamma, the tokens drafted a round.
        vocab_size: V, target ids: rows of the embedding and of W1.
        mask_token_id: what fills the slots behind the anchor.
        target_layer_ids: the target layers it reads, increasing: l is the output of layer l, -1 the embedding's.
        draft_vocab_size: rows of the LM head and of W2; V if None.
        confidence_with_markov: the confidence head reads W1[x_{k-1}] beside h_k.

    Raises:
        ValueError: for values that do not fit together.
    """

    vocab_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int | None = None
    confidence_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = tuple(self.target_layer_ids)
        object.__setattr__(self, "target_layer_ids", ids)
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
            raise ValueError(f"target_layer_ids: got {list(ids)}, expected increasing layers, -1 for the embedding")
        if self.backbone.feature_size % len(ids):
            raise ValueError(
                f"target_layer_ids: got {len(ids)} layers, expected a divisor of feature_size {self.backbone.feature_size}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id: got {self.mask_token_id}, expected an id below {self.vocab_size}")
        if self.has_confidence and self.confidence_with_markov and not self.markov_rank:
            raise ValueError(
                "confidence_with_markov: got True with markov_rank 0, expected False; there is no W1 to read"
            )

    @property
    def confidence_rank(self) -> int:
        """How many entries of W1 the confidence head reads."""
        return self.markov_rank if self.confidence_with_markov else 0


class Qwen3Backbone(ParallelBackbone):
    """The backbone with DeepSpec's parameter names: fc, hidden_norm, layers, norm, and no standardisation of features."""

    def __init__(self, config: BackboneConfig) -> None:
        nn.Module.__init__(self)  # the parent's would draw weights and register the standardisation
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def fit_standardisation(self, features: Tensor) -> None:
        """Raise: this backbone reads features as they are."""
        raise RuntimeError(
            "fit_standardisation: got a Qwen3 backbone, expected a ParallelBackbone; it reads raw features"
        )

    def context_keys(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Return the keys and values that the target's features give each layer (paper eq. 2 and 3).

        Args:
            features: [..., m * d] of verified tokens.
            positions: [...] of those tokens in their texts.
        """
        context = self.hidden_norm(self.fc(features))
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_base, context.dtype)
        return [KeyValue(*layer.self_attn.key_value(context, tables)) for layer in self.draft_layers]


class Qwen3Drafter(DSparkDrafter):
    """A released drafter; offers what `dsspark.decoding.generate` asks of one.

    Args:
        config: sizes and conventions.
        embed_tokens: the target's embedding, where the drafter has none of its own; it is used, not registered.
        lm_head: likewise.

    Attributes:
        backbone: fc, hidden_norm, layers, norm.
        embed_tokens: [V, d], or None where the target's is used.
        lm_head: [V_draft, d], or None where the target's is used.
        draft_to_target: [V_draft] int64 strictly increasing target ids, or None where the ids are the same.
        source: what `dsspark.checkpoints` remembers of the files it came from.
    """

    config: Qwen3DrafterConfig
    draft_to_target: Tensor | None

    def __init__(
        self, config: Qwen3DrafterConfig, embed_tokens: nn.Module | None = None, lm_head: nn.Module | None = None
    ) -> None:
        nn.Module.__init__(self)  # the parent's would build a backbone of the other kind
        self.config = config
        self.block_size = config.backbone.block_size
        hidden_size, draft_vocab_size = config.backbone.hidden_size, config.draft_vocab_size or config.vocab_size
        self.backbone = Qwen3Backbone(config.backbone)
        self.embed_tokens = None if embed_tokens is not None else nn.Embedding(config.vocab_size, hidden_size)
        self.lm_head = None if lm_head is not None else nn.Linear(hidden_size, draft_vocab_size, bias=False)
        # A tuple, so that nn.Module neither registers nor saves what belongs to the target.
        self._borrowed = (embed_tokens, lm_head)
        self.markov_head = None
        if config.markov_rank:
            self.markov_head = MarkovHead(
                config.vocab_size, config.markov_rank, config.markov_kind, hidden_size, config.draft_vocab_size
            )
        self.confidence_head = ConfidenceHead(hidden_size, config.confidence_rank) if config.has_confidence else None
        self.register_buffer("sts_temperatures", torch.ones(self.block_size), persistent=False)
        self.register_buffer("draft_to_target", None, persistent=False)
        self.source: Any = None

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs it reads."""
        return self.config.target_layer_ids

    def extend(self, context: DraftContext, features: Tensor, request_ids: Tensor) -> None:
        """Append the target's features of verified tokens; see `DSparkDrafter.extend`."""
        weight = self.backbone.fc.weight
        super().extend(context, features.to(weight.device, weight.dtype), request_ids.to(weight.device))

    def embed_blocks(self, anchors: Tensor) -> Tensor:
        """Return the embeddings of [anchor, mask, ...], [..., slots, d], of anchors [...]."""
        masks = anchors.new_full((*anchors.shape, self.config.num_slots - 1), self.config.mask_token_id)
        embed = self._borrowed[0] if self.embed_tokens is None else self.embed_tokens
        assert embed is not None
        out: Tensor = embed(torch.cat((anchors[..., None], masks), dim=-1))
        return out.to(self.backbone.fc.weight.dtype)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return U [..., gamma, V_draft]: the LM head on h."""
        head = self._borrowed[1] if self.lm_head is None else self.lm_head
        assert head is not None
        out: Tensor = head(hidden)
        return out

    @torch.no_grad()
    def backbone_pass(self, anchors: Tensor, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Run the backbone once for every request (paper 3.1).

        Args:
            anchors: x_0, [R] integers.
            context: what stands strictly before the anchors.

        Returns:
            U [R, gamma, V_draft] and h [R, gamma, d], row k of which predicts x_{k+1}.

        Raises:
            ValueError: for another number of requests than the context has.
        """
        check_shape("anchors", anchors, (context.lengths.shape[0],))
        block = self.embed_blocks(anchors.to(torch.int64))[:, None]
        slots = self.backbone(block, context.lengths[:, None], context.visible())[:, 0]
        hidden = slots[:, self.config.num_slots - self.block_size :]
        return self.base_logits(hidden), hidden

    @torch.no_grad()
    def confidence(self, hidden: Tensor, anchors: Tensor, tokens: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Return confidence logits [R, gamma]; see `DSparkDrafter.confidence`."""
        if self.confidence_head is None or (self.markov_head is not None and self.confidence_head.rank):
            return super().confidence(hidden, anchors, tokens, backend=backend)
        previous = torch.cat((anchors[:, None].to(torch.int64), tokens[:, :-1]), dim=1)
        proj = self.confidence_head.proj
        return confidence_logits(hidden, previous, None, proj.weight, proj.bias, backend=backend)

    @torch.no_grad()
    def propose(
        self,
        anchors: Tensor,
        context: DraftContext,
        uniforms: Uniforms,
        *,
        temperature: float | Tensor = 1.0,
        keep_logits: bool = True,
        backend: Backend = "auto",
    ) -> Proposal:
        """Draft a block from the anchors; see `DSparkDrafter.propose`. The result is on the device of `anchors`."""
        home, device = anchors.device, self.backbone.fc.weight.device
        anchors = anchors.to(device)
        base_logits, hidden = self.backbone_pass(anchors, context)
        draft = draft_block(
            base_logits,
            anchors,
            self.markov_head,
            Uniforms(**{name: getattr(uniforms, name).to(device) for name in ("draft", "accept", "final")}),
            temperature=temperature.to(device) if isinstance(temperature, Tensor) else temperature,
            hidden=hidden,
            draft_to_target=self.draft_to_target,
            keep_logits=keep_logits,
            backend=backend,
        )
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence(hidden, anchors, draft.tokens, backend=backend).to(home)
        return Proposal(draft if home == device else _moved(draft, home), confidence)

    @classmethod
    def fresh(
        cls,
        model: Any,
        target_layer_ids: Sequence[int],
        *,
        mask_token_id: int = 0,
        block_size: int = 7,
        num_layers: int = 2,
        markov_rank: int = 256,
        generator: torch.Generator | None = None,
    ) -> Qwen3Drafter:
        """Return an untrained drafter for a transformers model, with the model's sizes, embedding and LM head.

        Args:
            model: a causal LM of transformers.
            target_layer_ids: the layers it will read; never the last one (paper 3.3).
            mask_token_id: any id that the model's texts do not need.
            block_size: gamma.
            num_layers: draft layers.
            markov_rank: r; 0 leaves the Markov head out.
            generator: draws the weights, N(0, 0.02^2); a fresh generator with seed 0 if None.
        """
        sizes = model.config.get_text_config(decoder=True)
        heads = sizes.num_attention_heads
        backbone = BackboneConfig(
            feature_size=len(target_layer_ids) * sizes.hidden_size,
            hidden_size=sizes.hidden_size,
            block_size=block_size,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
            head_dim=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
            intermediate_size=sizes.intermediate_size,
        )
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        config = Qwen3DrafterConfig(
            backbone=backbone,
            vocab_size=lm_head.weight.shape[0],
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            markov_rank=markov_rank,
            confidence_with_markov=markov_rank > 0,
        )
        drafter = cls(config, embed, lm_head)
        generator = generator or torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if parameter.dim() >= 2:
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
                elif name.endswith("bias"):
                    parameter.zero_()
        return drafter.to(lm_head.weight.device, lm_head.weight.dtype).requires_grad_(False).eval()


def _moved(draft: DraftBlock, device: torch.device) -> DraftBlock:
    """Return the block with every tensor on `device`."""
    tensors = {field.name: getattr(draft, field.name) for field in fields(draft)}
    return replace(draft, **{name: t.to(device) for name, t in tensors.items() if t is not None})

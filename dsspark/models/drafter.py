"""The DSpark drafter: parallel backbone + Markov head + confidence head, over the target's own embedding and LM head (paper 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from dsspark._checks import INT_DTYPES, check_dtype, check_shape
from dsspark._dispatch import Backend, dispatched
from dsspark.models.backbone import BackboneConfig, DraftContext, ParallelBackbone
from dsspark.models.heads import ConfidenceHead, HeadKind, MarkovHead
from dsspark.models.target import MASK_ID, TargetLM
from dsspark.randomness import Uniforms
from dsspark.reference import confidence as _confidence
from dsspark.reference import markov as _markov
from dsspark.types import Proposal

draft_block = dispatched(_markov.draft_block)
confidence_logits = dispatched(_confidence.confidence_logits)


class TeacherTexts(NamedTuple):
    """Texts and what the target says along them: what a drafter is trained on.

    Attributes:
        tokens: [B, T + 1] ids.
        features: [B, T, m * d], of the target's layers.
        hidden: [B, T, d], the target's final normed states: its LM head turns them into its logits.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor

    def blocks(self, anchors: Tensor, block_size: int, shift: int = 0) -> Tensor:
        """Return the tokens at anchor + k + shift, k = 0..gamma - 1, [B, A, gamma]: shift 0 gives each slot's previous token."""
        index = anchors[:, :, None] + torch.arange(block_size) + shift
        return self.tokens.gather(1, rearrange(index, "b a k -> b (a k)")).view_as(index)


class TeacherForced(NamedTuple):
    """What a drafter says in teacher-forced blocks, row b * A + a for block a of text b.

    Attributes:
        logits: [B * A, gamma, V] float32, before temperature.
        confidence_logits: [B * A, gamma] float32; None for a drafter without a confidence head.
    """

    logits: Tensor
    confidence_logits: Tensor | None


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter.

    Attributes:
        backbone: sizes of the parallel backbone.
        markov_rank: r; 0 for a parallel-only drafter, which has no sequential head (DFlash).
        markov_kind: "vanilla", "gated" or "rnn".
        has_confidence: whether there is a confidence head.
        sample_from_anchor: slot 0, the anchor, predicts x_1 (DSpark). False: slot k predicts x_k and slot 0 nothing (DFlash), so a
            pass has gamma + 1 slots.
    """

    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    markov_rank: int = 64
    markov_kind: HeadKind = "vanilla"
    has_confidence: bool = True
    sample_from_anchor: bool = True

    def __post_init__(self) -> None:
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank: got {self.markov_rank}, expected 0 (parallel only) or more")

    @property
    def num_slots(self) -> int:
        """Slots of a backbone pass."""
        return self.backbone.block_size + (not self.sample_from_anchor)


class DSparkDrafter(nn.Module):
    """Proposes a block of gamma tokens in one backbone pass and a short sequential loop.

    Args:
        target: the model whose features it reads; its embedding and LM head are used as they are, never trained nor saved here.
        config: sizes.
        generator: draws the initial weights; a fresh generator with seed 0 if None.

    Attributes:
        block_size: gamma.
        sts_temperatures: [gamma] float32 buffer, T_k of Sequential Temperature Scaling; ones until fitted.

    Raises:
        ValueError: if the sizes do not fit the target's.
    """

    block_size: int
    sts_temperatures: Tensor | None

    def __init__(
        self, target: TargetLM, config: DrafterConfig | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.config = config = config or DrafterConfig()
        wanted = (target.config.feature_size, target.config.hidden_size)
        if (config.backbone.feature_size, config.backbone.hidden_size) != wanted:
            raise ValueError(
                f"config: got feature_size, hidden_size {config.backbone.feature_size}, {config.backbone.hidden_size}, "
                f"expected {wanted[0]}, {wanted[1]} as the target's"
            )
        generator = generator or torch.Generator().manual_seed(0)
        vocab_size, hidden_size, rank = target.config.vocab_size, config.backbone.hidden_size, config.markov_rank
        # A tuple, so that nn.Module neither registers nor saves what belongs to the target.
        self._shared = (target.embed_tokens, target.lm_head)
        self.block_size = config.backbone.block_size
        self.backbone = ParallelBackbone(config.backbone, generator)
        self.markov_head = MarkovHead(vocab_size, rank, config.markov_kind, hidden_size) if rank else None
        self.confidence_head = ConfidenceHead(hidden_size, rank) if config.has_confidence else None
        self.register_buffer("sts_temperatures", torch.ones(self.block_size))
        with torch.no_grad():
            for head in (self.markov_head, self.confidence_head):
                for name, parameter in () if head is None else head.named_parameters():
                    # W2 = 0: a fresh drafter proposes exactly what its parallel-only twin does.
                    scale = {"markov_w1.weight": 0.5, "markov_w2.weight": 0.0}.get(name, 0.02)
                    parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))

    @torch.no_grad()
    def set_sts_temperatures(self, temperatures: Tensor) -> None:
        """Store the fitted T_k, [gamma] floats.

        Raises:
            ValueError: for another length: a file of another block size.
        """
        check_shape("temperatures", temperatures, (self.block_size,))
        self.sts_temperatures = temperatures.to(self.backbone.fc.weight.device, torch.float32)

    def new_context(self, num_requests: int) -> DraftContext:
        """Return the empty context of R requests."""
        return DraftContext(self.backbone, num_requests)

    @torch.no_grad()
    def extend(self, context: DraftContext, features: Tensor, request_ids: Tensor) -> None:
        """Append the target's features of verified tokens to their requests' contexts.

        Args:
            context: from `new_context`; changed in place.
            features: [M, m * d].
            request_ids: [M] integers, the request of each row; a request's rows are in the order of its text. Negative: padding.

        Raises:
            ValueError: for shapes that do not belong together or a request that does not exist.
            TypeError: for ids that are no integers.
        """
        check_shape("features", features, ("M", self.config.backbone.feature_size))
        check_shape("request_ids", request_ids, (features.shape[0],))
        check_dtype("request_ids", request_ids, INT_DTYPES)
        context.append(self.backbone, features, request_ids)

    def embed_blocks(self, anchors: Tensor) -> Tensor:
        """Return the embeddings of [anchor, mask, ...], [..., slots, d], of anchors [...]."""
        embed = self._shared[0]
        masks = anchors.new_full((*anchors.shape, self.config.num_slots - 1), MASK_ID)
        out: Tensor = embed(torch.cat((anchors[..., None], masks), dim=-1))
        return out

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return U [..., gamma, V]: the target's LM head on h."""
        out: Tensor = self._shared[1](hidden)
        return out

    @torch.no_grad()
    def backbone_pass(self, anchors: Tensor, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Run the backbone once for every request (paper 3.1).

        Args:
            anchors: x_0, [R] integers.
            context: what stands strictly before the anchors.

        Returns:
            U [R, gamma, V] and h [R, gamma, d], row k of which predicts x_{k+1}.

        Raises:
            ValueError: for another number of requests than the context has.
        """
        check_shape("anchors", anchors, (context.lengths.shape[0],))
        check_dtype("anchors", anchors, INT_DTYPES)
        block = self.embed_blocks(anchors.to(torch.int64))[:, None]
        slots = self.backbone(block, context.lengths[:, None], context.visible())[:, 0]
        hidden = slots[:, -self.block_size :]
        return self.base_logits(hidden), hidden

    def teacher_forced(self, texts: TeacherTexts, anchors: Tensor) -> TeacherForced:
        """Return what the drafter says in blocks at `anchors` [B, A], all blocks of all texts in one pass (paper 3.3).

        Slot k is corrected with the *true* token before it. Differentiable.
        """
        previous = rearrange(texts.blocks(anchors, self.block_size), "b a k -> (b a) k")
        context = self.backbone.context_keys(texts.features, torch.arange(texts.features.shape[1]))
        slots = self.backbone(self.embed_blocks(texts.tokens.gather(1, anchors)), anchors, context)
        hidden = rearrange(slots[:, :, -self.block_size :], "b a k d -> (b a) k d")
        logits = self.base_logits(hidden).float()
        if self.markov_head is not None:
            logits = logits + self.markov_head(previous, hidden).float()
        if self.confidence_head is None:
            return TeacherForced(logits, None)
        w1 = None if self.markov_head is None else self.markov_head.markov_w1.weight
        with torch.autocast(hidden.device.type, enabled=False):
            return TeacherForced(logits, self.confidence_head(hidden.float(), previous, w1))

    @torch.no_grad()
    def confidence(self, hidden: Tensor, anchors: Tensor, tokens: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Return confidence logits [R, gamma]: position k reads h_k and x_{k-1}, the anchor at k = 1 (paper eq. 7).

        Args:
            hidden: h, [R, gamma, d].
            anchors: x_0, [R].
            tokens: x_1..x_gamma, [R, gamma]; the last one is not read.
            backend: of the component.

        Raises:
            ValueError: for a drafter without a confidence head.
        """
        if self.confidence_head is None:
            raise ValueError(
                "confidence: got a drafter without a confidence head, expected has_confidence=True in its config"
            )
        previous = torch.cat((anchors[:, None].to(torch.int64), tokens[:, :-1]), dim=1)
        w1 = None if self.markov_head is None else self.markov_head.markov_w1.weight
        proj = self.confidence_head.proj
        return confidence_logits(hidden, previous, w1, proj.weight, proj.bias, backend=backend)

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
        """Draft a block from the anchors and say how likely each token is to survive.

        Args:
            anchors: x_0, [R] integers.
            context: what stands strictly before the anchors.
            uniforms: of this round.
            temperature: of the draft, a float or [R].
            keep_logits: see `draft_block`.
            backend: of every component.

        Raises:
            ValueError: as `draft_block` does.
        """
        base_logits, hidden = self.backbone_pass(anchors, context)
        draft = draft_block(
            base_logits,
            anchors,
            self.markov_head,
            uniforms,
            temperature=temperature,
            hidden=hidden,
            keep_logits=keep_logits,
            backend=backend,
        )
        if self.confidence_head is None:
            return Proposal(draft, None)
        return Proposal(draft, self.confidence(hidden, anchors, draft.tokens, backend=backend))

"""Answers as training batches, the loss of a batch, and what greedy decoding would do on known greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from dsspark._dispatch import dispatched
from dsspark.loss_terms import acceptance_label, position_weights, weighted_mean
from dsspark.models.drafter import draft_block
from dsspark.randomness import Uniforms
from dsspark.reference import losses as _losses
from dsspark.smollm2.drafter import SmolLM2Drafter
from dsspark.smollm2.generation import Answer

slot_losses = dispatched(_losses.slot_losses)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Padded answers and the blocks to supervise.

    Attributes:
        tokens: [B, T + gamma] int64.
        features: [B, T, m * d] float32.
        anchors: [B, A] positions; slot k of a block scores token anchor + k + 1.
        supervised: [B, A, gamma] bool.
        final: [S, d] float32, what the target's LM head read at each supervised slot, in row-major order.
        log_norm: [S] float32, logsumexp of the target's logits there.
    """

    tokens: Tensor
    features: Tensor
    anchors: Tensor
    supervised: Tensor
    final: Tensor
    log_norm: Tensor

    def to(self, device: torch.device) -> Blocks:
        """Return the same on another device."""
        return Blocks(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def slots(self, shift: int) -> Tensor:
        """Return the tokens at anchor + k + shift of the supervised slots, [S]: 0 the previous ones, 1 the labels."""
        places = torch.arange(self.supervised.shape[2], device=self.anchors.device)
        index = self.anchors[:, :, None] + places + shift
        return self.tokens.gather(1, index.flatten(1)).view_as(index)[self.supervised]


def make_blocks(answers: Sequence[Answer], block_size: int, count: int, generator: torch.Generator | None) -> Blocks:
    """Return `count` blocks of each answer, anchors at random; all of them, in order, if `generator` is None.

    Args:
        answers: at least one, each with an answer.
        block_size: gamma.
        count: A; an answer with fewer anchors has blocks that are not supervised.
        generator: draws the anchors.
    """
    width = max(len(answer.tokens) for answer in answers)
    tokens = torch.zeros(len(answers), width + block_size, dtype=torch.int64)
    features = torch.zeros(len(answers), width - 1, answers[0].features.shape[1])
    anchors = torch.zeros(len(answers), count, dtype=torch.int64)
    supervised = torch.zeros(len(answers), count, block_size, dtype=torch.bool)
    final, log_norm = [], []
    for row, answer in enumerate(answers):
        length, first = len(answer.tokens), answer.prompt_length - 1
        tokens[row, :length] = answer.tokens
        features[row, : length - 1] = answer.features
        room = length - 1 - first
        chosen = torch.arange(room) if generator is None else torch.randperm(room, generator=generator)
        chosen = chosen[:count]
        scored = chosen[:, None] + torch.arange(block_size)
        anchors[row, : len(chosen)] = first + chosen
        supervised[row, : len(chosen)] = scored < room
        rows = scored[scored < room]
        final.append(answer.final[rows])
        log_norm.append(answer.log_norm[rows])
    return Blocks(
        tokens=tokens,
        features=features,
        anchors=anchors,
        supervised=supervised,
        final=torch.cat(final).float(),
        log_norm=torch.cat(log_norm),
    )


def block_hidden(drafter: SmolLM2Drafter, blocks: Blocks) -> Tensor:
    """Return h of every slot, [B, A, gamma, d], all blocks of an answer in one pass."""
    context = drafter.backbone.context_keys(
        blocks.features, torch.arange(blocks.features.shape[1], device=blocks.features.device)
    )
    before = (blocks.anchors - 1).clamp_min(0)
    last = drafter.backbone.context(
        blocks.features.gather(1, before[..., None].expand(-1, -1, blocks.features.shape[2]))
    )
    last = last.masked_fill((blocks.anchors == 0)[..., None], 0.0)
    start = drafter.start_blocks(blocks.tokens.gather(1, blocks.anchors), last)
    hidden: Tensor = drafter.backbone(start, blocks.anchors, context)
    return hidden


def block_losses(
    drafter: SmolLM2Drafter, blocks: Blocks, *, ce_weight: float, l1_weight: float, confidence_weight: float = 0.3
) -> dict[str, Tensor]:
    """Return the loss of a batch under "loss", and its parts, detached.

    One more token stands for all that the drafter cannot draft: q is 0 there and p what the target gives them together, so that the
    distance is the distance over the whole vocabulary. A label that cannot be drafted has no cross-entropy.
    """
    ids = drafter.draft_to_target
    assert ids is not None
    size, block_size = len(ids), blocks.supervised.shape[2]
    hidden = block_hidden(drafter, blocks)[blocks.supervised]
    previous, labels = blocks.slots(0), blocks.slots(1)
    base = F.linear(hidden, drafter.draft_lm_head.weight)
    if drafter.markov_head is not None:
        base = base + drafter.markov_head(previous[:, None])[:, 0]
    logits = F.pad(base, (0, 1), value=float("-inf"))
    with torch.no_grad():
        target = torch.empty_like(logits)
        torch.matmul(blocks.final, drafter.draft_lm_head.weight.T, out=target[:, :size])
        inside = (target[:, :size].logsumexp(dim=1) - blocks.log_norm).exp()
        target[:, size] = blocks.log_norm + torch.log((1 - inside).clamp_min(0))
        place = torch.searchsorted(ids, labels).clamp_max(size - 1)
        known = ids[place] == labels
        labels = torch.where(known, place, 0)
    cross_entropy, distance = slot_losses(logits, target, labels)
    weights = position_weights(block_size, device=hidden.device).expand(blocks.supervised.shape)[blocks.supervised]
    ce, l1 = weighted_mean(cross_entropy, weights * known), weighted_mean(distance, weights)
    loss = ce_weight * ce + l1_weight * l1
    parts = {"ce": ce.detach(), "acceptance": weighted_mean(acceptance_label(distance), weights)}
    if drafter.confidence_head is not None:
        w1 = None if drafter.markov_head is None else drafter.markov_head.markov_w1.weight.detach()
        confidence = drafter.confidence_head(hidden[:, None], previous[:, None], w1)[:, 0]
        entropy = F.binary_cross_entropy_with_logits(confidence, acceptance_label(distance), reduction="none")
        parts["confidence"] = weighted_mean(entropy, weights).detach()
        loss = loss + confidence_weight * weighted_mean(entropy, weights)
    return {"loss": loss, **parts}


@dataclass(frozen=True, kw_only=True)
class GreedyRounds:
    """What greedy decoding does on texts that the target wrote greedily.

    Attributes:
        rounds: rounds.
        tokens: tokens they emit.
        accepted: [gamma], rounds in which at least k + 1 drafts are accepted.
    """

    rounds: int
    tokens: int
    accepted: list[int]

    @property
    def tokens_per_round(self) -> float:
        """Tokens a round, correction or bonus included."""
        return self.tokens / max(1, self.rounds)

    @property
    def conditional(self) -> list[float]:
        """Acceptance at each position, given that all before it were accepted."""
        before = [self.rounds, *self.accepted[:-1]]
        return [a / b if b else 0.0 for a, b in zip(self.accepted, before, strict=True)]


@torch.no_grad()
def greedy_rounds(drafter: SmolLM2Drafter, answers: Sequence[Answer], length: int | None = None) -> GreedyRounds:
    """Return the rounds that `generate` would go through at temperature 0, without running the target again.

    Exact up to float rounding: at temperature 0 the text is known, so what every anchor's block would have accepted is known too.

    Args:
        drafter: the drafter.
        answers: greedy ones.
        length: drafts verified a round; the whole block if None.
    """
    block_size = drafter.block_size
    length = block_size if length is None else length
    device = drafter.backbone.fc.weight.device
    places = torch.arange(block_size, device=device)
    rounds, tokens, accepted = 0, 0, [0] * block_size
    for answer in answers:
        room = len(answer.tokens) - answer.prompt_length
        blocks = make_blocks([answer], block_size, room, None).to(device)
        hidden = block_hidden(drafter, blocks)[0]
        draft = draft_block(
            drafter.base_logits(hidden),
            blocks.tokens[0, blocks.anchors[0]],
            drafter.markov_head,
            Uniforms.draw(room, block_size, device=device),  # not read at temperature 0
            temperature=0.0,
            hidden=hidden,
            draft_to_target=drafter.draft_to_target,
        )
        index = blocks.anchors[0][:, None] + places + 1
        right = (draft.tokens == blocks.tokens[0, index]) & blocks.supervised[0] & (places < length)
        matches = right.cumprod(dim=1).sum(dim=1).tolist()
        at = 0
        while at < room:
            taken = min(matches[at], room - at - 1)
            rounds, tokens = rounds + 1, tokens + taken + 1
            accepted = [count + (taken > k) for k, count in enumerate(accepted)]
            at += taken + 1
    return GreedyRounds(rounds=rounds, tokens=tokens, accepted=accepted)

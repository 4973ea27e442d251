"""Stage two: train the drafter and its parallel-only twin side by side on teacher-forced blocks at random anchors (paper 3.3).

Twins start from the same backbone and see the same rows and anchors: what differs in the end is what the sequential head is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from rich.console import Console
from torch import Tensor

from dsspark._dispatch import dispatched
from dsspark.models.drafter import DrafterConfig, DSparkDrafter, TeacherTexts
from dsspark.models.drafters import AnyDrafter
from dsspark.models.target import EOS_ID, TargetLM
from dsspark.reference import losses as _losses
from dsspark.reference.losses import POSITION_DECAY, DraftLosses
from dsspark.training.loop import Schedule, train
from dsspark.training.precision import autocast
from dsspark.training.pretrain import Streams, mixed_rows

draft_losses = dispatched(_losses.draft_losses)


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """What the frozen target says about a batch of rows, and the blocks to supervise.

    Attributes:
        texts: the rows and the target's states along them.
        target_logits: [B, A, gamma, V], row k scores the token after slot k.
        anchors: [B, A] positions of the blocks' anchors.
        supervised: [B, A, gamma] bool: no slot after the end of a text.
    """

    texts: TeacherTexts
    target_logits: Tensor
    anchors: Tensor
    supervised: Tensor

    def slots(self, shift: int) -> Tensor:
        """Return the tokens at anchor + k + shift, [B, A, gamma]: 0 gives the previous tokens, 1 the labels."""
        return self.texts.blocks(self.anchors, self.supervised.shape[2], shift)


def draw_anchors(rng: np.random.Generator, rows: int, length: int, block_size: int, count: int) -> Tensor:
    """Return [rows, count] distinct anchor positions a row, each with a whole block after it: 1 .. length - 1 - gamma.

    Raises:
        ValueError: if a row has fewer than `count` such positions.
    """
    room = length - 1 - block_size
    if room < count:
        raise ValueError(
            f"count: got {count} anchors, expected at most {room} in rows of {length} tokens; take longer rows"
        )
    return torch.from_numpy(np.argsort(rng.random((rows, room)), axis=1)[:, :count] + 1)


@torch.no_grad()
def observe(target: TargetLM, tokens: Tensor) -> TeacherTexts:
    """Run the frozen target over rows [B, T + 1] and keep its states, not its logits: they are recomputed where they are needed."""
    with autocast():
        hidden, features = target.hidden_states(tokens[:, :-1])
    return TeacherTexts(tokens, features.float(), hidden.float())


@torch.no_grad()
def block_batch(target: TargetLM, texts: TeacherTexts, anchors: Tensor, block_size: int) -> BlockBatch:
    """Return the blocks at `anchors` [B, A] with the target's logits at the supervised slots."""
    index = anchors[:, :, None] + torch.arange(block_size)
    rows = torch.arange(len(texts.tokens))[:, None, None]
    ended = (texts.blocks(anchors, block_size) == EOS_ID).cumsum(dim=2) > 0
    return BlockBatch(
        texts=texts, target_logits=target.lm_head(texts.hidden[rows, index]), anchors=anchors, supervised=~ended
    )


def teach(target: TargetLM, tokens: Tensor, anchors: Tensor, block_size: int) -> BlockBatch:
    """Run the frozen target over rows [B, T + 1] and return the blocks at `anchors` [B, A]."""
    return block_batch(target, observe(target, tokens), anchors, block_size)


def block_losses(drafter: AnyDrafter, batch: BlockBatch, decay: float = POSITION_DECAY) -> DraftLosses:
    """Return the losses of a drafter on a batch, all blocks of a row in one pass (paper eq. 12).

    Args:
        drafter: any of `dsspark.models.drafters`.
        batch: with blocks of the drafter's gamma.
        decay: of the position weights.
    """
    with autocast():
        said = drafter.teacher_forced(batch.texts, batch.anchors)
    return draft_losses(
        said.logits,
        rearrange(batch.target_logits, "b a k v -> (b a) k v"),
        rearrange(batch.slots(1), "b a k -> (b a) k"),
        said.confidence_logits,
        supervised=rearrange(batch.supervised, "b a k -> (b a) k"),
        decay=decay,
    )


def distillation_rows(streams: Streams, drawn: Tensor, seed: int, step: int, count: int, share_drawn: float) -> Tensor:
    """Return [count, T] rows, a share of them text the target drew and the rest from the corpus: a pure function of (seed, step).

    Args:
        streams: the corpus' training split.
        drawn: [N, T] rows from `sample_continuations`.
        seed: of the choice.
        step: of training.
        count: rows.
        share_drawn: in [0, 1].
    """
    from_target = round(count * share_drawn)
    chosen = np.random.default_rng((seed, step, 1)).integers(len(drawn), size=from_target)
    corpus = mixed_rows(streams, seed + 1, step, count - from_target, drawn.shape[1])
    return torch.cat((drawn[torch.from_numpy(chosen)], corpus))


def train_drafters(
    target: TargetLM,
    streams: Streams,
    drawn: Tensor,
    checkpoint: Path,
    *,
    configs: dict[str, DrafterConfig],
    schedule: Schedule,
    batch_rows: int = 8,
    anchors_per_row: int = 48,
    share_drawn: float = 0.5,
    seed: int = 0,
    resume: bool = True,
    console: Console | None = None,
) -> tuple[dict[str, DSparkDrafter], list[dict[str, float]]]:
    """Train drafters side by side on the same batches and return them with the history of losses and acceptance.

    Args:
        target: frozen here.
        streams: the corpus' training split.
        drawn: [N, T] text drawn from the target.
        checkpoint: file to write and to resume from.
        configs: one drafter each, under its name.
        schedule: steps and learning rate.
        batch_rows: rows a step.
        anchors_per_row: A, blocks a row.
        share_drawn: of the rows that are text drawn from the target.
        seed: of the initial weights, the rows and the anchors.
        resume: continue from `checkpoint` if it exists.
        console: where progress goes.
    """
    target.requires_grad_(False).eval()
    drafters = {
        name: DSparkDrafter(target, config, torch.Generator().manual_seed(seed)) for name, config in configs.items()
    }
    block_size = next(iter(drafters.values())).block_size
    sample = distillation_rows(streams, drawn, seed, 0, 4 * batch_rows, share_drawn)
    with torch.no_grad():
        features = target.hidden_states(sample)[1]
    for drafter in drafters.values():
        drafter.backbone.fit_standardisation(features.flatten(0, 1))

    def losses(step: int) -> dict[str, Tensor]:
        rows = distillation_rows(streams, drawn, seed, step, batch_rows, share_drawn)
        rng = np.random.default_rng((seed, step, 2))
        anchors = draw_anchors(rng, len(rows), rows.shape[1], block_size, anchors_per_row)
        batch = teach(target, rows, anchors, block_size)
        parts: dict[str, Tensor] = {}
        for name, drafter in drafters.items():
            result = block_losses(drafter, batch)
            parts |= {
                name: result.total,
                f"{name} accept": result.acceptance,
                f"{name} conf": result.confidence.detach(),
            }
        return parts

    history = train("drafters", drafters, losses, schedule, checkpoint, resume=resume, console=console)
    for drafter in drafters.values():
        drafter.requires_grad_(False).eval()
    return drafters, history

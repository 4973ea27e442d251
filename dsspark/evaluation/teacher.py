r"""Teacher-forced acceptance: what a drafter would do at *every* position of the target's own text.

Conditional acceptance from rollouts has survivor bias: position k is only reached where k - 1 drafts were good, which are the easy
places. Here slot k gets the true tokens before it wherever it stands, and its acceptance probability

$$\sum_v \min(p_k(v), q_k(v))$$

is computed instead of drawn. At temperature 0 it is whether both argmaxima agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from dsspark.evaluation.counts import Values, summarise, weights
from dsspark.models.drafter import TeacherTexts
from dsspark.models.drafters import AnyDrafter
from dsspark.models.target import EOS_ID, TargetLM
from dsspark.training.corpus import TokenStream
from dsspark.training.rollout import sample_continuations


@torch.no_grad()
def drawn_texts(
    target: TargetLM, stream: TokenStream, *, count: int, prefix: int, length: int, temperature: float, seed: int = 0
) -> TeacherTexts:
    """Return `count` held-out beginnings continued by the target, with its states along them in float32.

    Args:
        target: draws.
        stream: a domain's held-out split.
        count: texts.
        prefix: tokens of each beginning.
        length: tokens the target draws.
        temperature: 1, or 0 for its likeliest tokens.
        seed: of the choice and the draws.

    Raises:
        ValueError: for another temperature.
    """
    if temperature not in (0.0, 1.0):
        raise ValueError(f"temperature: got {temperature}, expected 0 or 1, at which the target draws texts")
    beginnings = torch.from_numpy(stream.rows(np.random.default_rng(seed), count, prefix))
    greedy = torch.full((count,), temperature == 0)
    tokens = sample_continuations(target, beginnings, length, torch.Generator().manual_seed(seed), greedy=greedy)
    hidden, features = target.hidden_states(tokens[:, :-1])
    return TeacherTexts(tokens, features, hidden)


def overlap(draft: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return sum_v min(p, q) of logits [..., V] at a temperature, [...]; 0 compares the argmaxima."""
    if temperature == 0:
        return (draft.argmax(dim=-1) == target.argmax(dim=-1)).float()
    q, p = (draft / temperature).softmax(dim=-1), (target / temperature).softmax(dim=-1)
    return torch.minimum(p, q).sum(dim=-1)


@torch.no_grad()
def teacher_forced_acceptance(
    target: TargetLM,
    drafter: AnyDrafter,
    texts: TeacherTexts,
    *,
    prefix: int,
    temperature: float = 1.0,
    anchors_per_text: int = 16,
    texts_at_once: int = 8,
) -> Values:
    """Return the mean acceptance of each slot in each text, [N, gamma]; NaN where no slot was before the end of the text.

    Args:
        target: frozen.
        drafter: any of `dsspark.models.drafters`.
        texts: from `drawn_texts`.
        prefix: anchors stand at or after this position, evenly spaced.
        temperature: of both laws.
        anchors_per_text: blocks in each text.
        texts_at_once: bounds the memory.

    Raises:
        ValueError: if the texts are too short for a block after the prefix.
    """
    gamma, end = drafter.block_size, texts.features.shape[1] - drafter.block_size
    if end < prefix:
        raise ValueError(
            f"texts: got {texts.features.shape[1]} tokens, expected at least {prefix + gamma}: a block after the prefix"
        )
    places = torch.unique(torch.linspace(prefix, end, anchors_per_text).round().to(torch.int64))
    means = []
    for start in range(0, len(texts.tokens), texts_at_once):
        part = TeacherTexts(*(field[start : start + texts_at_once] for field in texts))
        anchors = places.expand(len(part.tokens), -1)
        said = rearrange(drafter.teacher_forced(part, anchors).logits, "(b a) k v -> b a k v", b=len(anchors))
        rows = torch.arange(len(anchors))[:, None, None]
        logits = target.lm_head(part.hidden[rows, anchors[:, :, None] + torch.arange(gamma)])
        alive = (part.blocks(anchors, gamma) == EOS_ID).cumsum(dim=2) == 0
        accepted = overlap(said, logits, temperature)
        means.append((accepted * alive).sum(dim=1) / alive.sum(dim=1))
    return torch.cat(means).double().numpy()


def summarise_texts(acceptance: Values, resamples: int = 1000) -> dict[str, Any]:
    """Return the mean over texts of [N, gamma] by position, with its bootstrap interval over texts."""
    drawn, present = weights(len(acceptance), resamples), np.isfinite(acceptance)
    return summarise((drawn @ np.where(present, acceptance, 0.0)) / (drawn @ present))

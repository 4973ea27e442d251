"""Rounds on a grid law: draft, survival, schedule, pack, verify, with every stage replaceable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

import dsspark
from dsspark.randomness import Uniforms
from dsspark.testing.grid import GridLaw, drafter_of, logits_of
from dsspark.types import DraftBlock, Verification


class Scheduler(Protocol):
    """Choose how many drafts of each request are verified; may remember earlier steps."""

    def step(self, survival: Tensor, request_ids: Sequence[int]) -> Tensor:
        """Return lengths [R] for survival [R, gamma]."""
        ...


Noise = Callable[[Sequence[Uniforms], Sequence[Tensor]], Uniforms]
SurvivalFn = Callable[[GridLaw, Tensor, DraftBlock], Tensor]


def fresh_noise(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Return this round's own uniforms, the last of `rounds`: what an honest engine uses."""
    return rounds[-1]


def law_survival(law: GridLaw, anchors: Tensor, draft: DraftBlock) -> Tensor:
    """Return the law's own survivals, [N, gamma]."""
    return law.survival(anchors, draft.tokens)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a round is made of.

    Attributes:
        draft: called as `dsspark.draft_block`.
        verify: called as `dsspark.verify`.
        scheduler: makes a new scheduler, given nothing; None verifies whole blocks. It sees one step of R requests at a time.
        noise: which uniforms a round uses, given the independent uniforms [P R, ...] of all rounds so far (the last is
            this round's) and the position [P, R] of each request's anchor at each of them.
        survival: a, [N, gamma], from the law, the anchors and the drafted block.
        temperature, draft_temperature: handed to `verify` and `draft`; logits are scaled so that the laws stay p and q.
        cell: tokens in a cell of the draws.
    """

    draft: Callable[..., DraftBlock] = dsspark.draft_block
    verify: Callable[..., Verification] = dsspark.verify
    scheduler: Callable[[], Scheduler] | None = None
    noise: Noise = fresh_noise
    survival: SurvivalFn = law_survival
    temperature: float = 1.0
    draft_temperature: float = 1.0
    cell: int = 4


@dataclass(frozen=True, kw_only=True)
class Played:
    """One round of P points: tokens [P, R, gamma + 1] padded with -1, num_emitted [P, R], survival [P, R, gamma]."""

    tokens: Tensor
    num_emitted: Tensor
    survival: Tensor


def schedule_points(stages: Stages, survivals: Sequence[Tensor]) -> Tensor:
    """Return the lengths [P, R] of this step for P independent engines of R requests.

    Args:
        stages: whose scheduler is asked.
        survivals: [P, R, gamma] of every step so far; the last is this step's.

    Raises:
        ValueError: if the scheduler returns anything but R lengths in 0..gamma.
    """
    current = survivals[-1]
    num_requests, block_size = current.shape[1:]
    if stages.scheduler is None:
        return torch.full(current.shape[:2], block_size, dtype=torch.int32)
    histories, which = torch.unique(torch.stack(tuple(survivals), dim=1), dim=0, return_inverse=True)
    lengths = []
    for history in histories:  # each distinct history once: schedulers are plain functions of what they saw
        scheduler = stages.scheduler()
        for step in history:
            chosen = scheduler.step(step, list(range(num_requests)))
        lengths.append(check_lengths(chosen, num_requests, block_size))
    return torch.stack(lengths)[which]


def check_lengths(lengths: object, num_requests: int, block_size: int) -> Tensor:
    """Return lengths as int32 [R], or raise `ValueError` that says what a scheduler must return."""
    wanted = f"expected an integer tensor [{num_requests}] of lengths in 0..{block_size}, one a row of survival"
    if not isinstance(lengths, Tensor):
        raise ValueError(f"scheduler: returned {type(lengths).__name__}, {wanted}")
    if lengths.shape != (num_requests,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"scheduler: returned {list(lengths.shape)} of {lengths.dtype}, {wanted}")
    if bool(((lengths < 0) | (lengths > block_size)).any()):
        raise ValueError(f"scheduler: returned {lengths.tolist()}, {wanted}")
    return lengths.to(torch.int32)


def play_round(
    law: GridLaw,
    stages: Stages,
    anchors: Tensor,
    rounds: Sequence[Uniforms],
    survivals: Sequence[Tensor] = (),
    positions: Sequence[Tensor] = (),
) -> Played:
    """Play one round of P points with R requests each.

    Args:
        law: the grid law.
        stages: the stages.
        anchors: the last emitted token of each request, [P, R].
        rounds: uniforms [P R, ...] of every round so far, the last this round's.
        survivals: [P, R, gamma] of the earlier rounds.
        positions: the anchors' positions [P, R] at every round so far; zeros if empty.
    """
    num_points = len(anchors)
    flat = anchors.flatten()
    positions = positions or [torch.zeros_like(anchors)]
    uniforms = stages.noise(rounds, positions)
    block = stages.draft(
        torch.zeros(len(flat), law.block_size, len(law.draft[0])),
        flat,
        drafter_of(law, stages.draft_temperature),
        uniforms,
        temperature=stages.draft_temperature,
        draft_to_target=None if law.draft_to_target is None else torch.tensor(law.draft_to_target),
        cell=stages.cell,
    )
    survival = rearrange(stages.survival(law, flat, block), "(p r) k -> p r k", p=num_points)
    lengths = schedule_points(stages, [*survivals, survival]).flatten()
    batch = dsspark.pack(flat, block.tokens, lengths, positions[-1].flatten())
    # A row after a token that the target does not have is never read: that token is rejected.
    rows = logits_of(law.target)[batch.tokens.clamp(0, law.vocab_size - 1)] * (stages.temperature or 1.0)
    result = stages.verify(rows, batch, block, uniforms, temperature=stages.temperature, cell=stages.cell)
    return Played(
        tokens=rearrange(_emitted(result, len(flat), law), "(p r) k -> p r k", p=num_points),
        num_emitted=rearrange(result.num_emitted.to(torch.int64), "(p r) -> p r", p=num_points),
        survival=survival,
    )


def _emitted(result: Verification, num_rows: int, law: GridLaw) -> Tensor:
    """Return the emitted tokens, -1 past their number, or raise `ValueError` that says what a sampler must return."""
    wanted = f"expected a Verification with tokens [{num_rows}, {law.block_size + 1}] and num_emitted [{num_rows}]"
    tokens, count = getattr(result, "tokens", None), getattr(result, "num_emitted", None)
    if not isinstance(tokens, Tensor) or not isinstance(count, Tensor):
        raise ValueError(f"verify: returned {type(result).__name__}, {wanted}")
    if tuple(tokens.shape) != (num_rows, law.block_size + 1) or tuple(count.shape) != (num_rows,):
        raise ValueError(f"verify: returned tokens {list(tokens.shape)}, num_emitted {list(count.shape)}, {wanted}")
    column = torch.arange(law.block_size + 1)
    return torch.where(column < count[:, None], tokens.to(torch.int64), -1)


def grid_round(
    law: GridLaw, stages: Stages | None = None, anchors: Sequence[int] = (0,)
) -> Callable[[Sequence[Uniforms]], Tensor]:
    """Return the function that `exact_law` enumerates: uniforms of every round -> the texts they emit.

    Args:
        law: the grid law.
        stages: the stages; the library's own if None.
        anchors: the first anchor of each of the R requests.

    Returns:
        A function from a tuple of `Uniforms` [P R, ...], one a round, to texts [P, R, rounds * (gamma + 1)] padded with -1.
    """
    stages = stages or Stages()

    def play(rounds: Sequence[Uniforms]) -> Tensor:
        num_requests = len(anchors)
        num_points = rounds[0].accept.shape[0] // num_requests
        anchor = torch.tensor(anchors).expand(num_points, num_requests)
        texts = torch.full((num_points, num_requests, len(rounds) * (law.block_size + 1)), -1, dtype=torch.int64)
        length = torch.zeros_like(anchor)
        survivals: list[Tensor] = []
        positions: list[Tensor] = []
        for t in range(len(rounds)):
            positions.append(length.clone())
            played = play_round(law, stages, anchor, rounds[: t + 1], survivals, positions)
            survivals.append(played.survival)
            for k in range(law.block_size + 1):
                emitted = k < played.num_emitted
                index = (length + k).clamp(max=texts.shape[2] - 1)[..., None]
                old = texts.gather(2, index)
                texts.scatter_(2, index, torch.where(emitted[..., None], played.tokens[..., k : k + 1], old))
            last = (played.num_emitted - 1).clamp(min=0)[..., None]
            anchor = torch.where(played.num_emitted > 0, played.tokens.gather(2, last)[..., 0], anchor)
            anchor = anchor.clamp(0, law.vocab_size - 1)
            length = length + played.num_emitted
        return texts

    return play

"""Counting what rounds do: tokens a round, acceptance by position, budget and waste."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RoundStatistics:
    """Counts over the rounds of many requests; one "round" is one request's share of a step.

    Attributes:
        block_size: gamma.
        rounds: rounds counted.
        emitted: tokens emitted, corrections and bonuses included.
        verified: [gamma], rounds that verified position k.
        reached: [gamma], of those, rounds that had accepted every earlier position.
        accepted: [gamma], rounds that accepted positions 1..k.
    """

    block_size: int
    rounds: int = 0
    emitted: int = 0
    verified: Tensor = field(init=False)
    reached: Tensor = field(init=False)
    accepted: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.verified, self.reached, self.accepted = (torch.zeros(self.block_size, dtype=torch.int64) for _ in range(3))

    def add(self, lengths: Tensor, num_accepted: Tensor) -> None:
        """Count a step: lengths [R] and num_accepted [R]."""
        position = torch.arange(self.block_size)
        length, accepted = lengths.cpu()[:, None], num_accepted.cpu()[:, None]
        self.rounds += len(lengths)
        self.emitted += int(accepted.sum()) + len(lengths)
        self.verified += (position < length).sum(dim=0)
        self.reached += ((position < length) & (position <= accepted)).sum(dim=0)
        self.accepted += (position < accepted).sum(dim=0)

    @property
    def tokens_per_round(self) -> float:
        """Accepted length tau, correction or bonus included; NaN before the first round."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(x_k accepted | x_1..x_{k-1} accepted and x_k verified), by position; NaN where nothing was counted."""
        return (self.accepted / self.reached).tolist()

    @property
    def cumulative_acceptance(self) -> list[float]:
        """P(x_1..x_k accepted | x_k verified), by position."""
        return (self.accepted / self.verified).tolist()

    @property
    def mean_budget(self) -> float:
        """Verified tokens a round, the anchor included (1 + l)."""
        return 1 + float(self.verified.sum()) / self.rounds if self.rounds else float("nan")

    @property
    def waste(self) -> float:
        """Share of the verified drafts that were not accepted; 0 where none was verified."""
        verified = int(self.verified.sum())
        return 1 - int(self.accepted.sum()) / verified if verified else 0.0

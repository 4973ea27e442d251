"""How many drafts of each request are verified: the policies that `generate` accepts.

A policy is any object with `step(survival, request_ids) -> lengths`. It stays lossless if it is non-anticipating: whether x_k is
verified may depend only on what is known before x_k is drawn. a_k reads x_1 .. x_{k-1}, so a decision about x_k may read
a_1 .. a_k of its own request; across requests the joint condition is stricter, and the two schedulers meet it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import dsspark
from dsspark._checks import check_range
from dsspark.cost_table import CostTable


class Policy(Protocol):
    """Choose the verified length of each request."""

    def step(self, survival: Tensor, request_ids: Sequence[int]) -> Tensor:
        """Return lengths [R] int32 for survival [R, gamma]; `request_ids` name the rows across steps."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Verify the first `length` drafts of every request; 0 is plain autoregressive decoding.

    Raises:
        ValueError: for a negative length.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length: got {self.length}, expected 0 or more drafts")

    def step(self, survival: Tensor, request_ids: Sequence[int]) -> Tensor:
        """Return min(length, gamma) for every request."""
        num_requests, block_size = survival.shape
        return torch.full((num_requests,), min(self.length, block_size), dtype=torch.int32, device=survival.device)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Verify drafts as long as the confidence is at least `threshold` (paper figure 5).

    The decision about x_k reads a_k or c_k, hence x_1 .. x_{k-1} and never x_k, and no other request: it is non-anticipating.
    Stopping at the first position below the threshold matters: a rule that counted the positions above it anywhere in the
    block would let c_{k+1}, which reads x_k, decide whether x_k is verified.

    Args:
        threshold: of the survival a_k, or of the conditional confidence c_k = a_k / a_{k-1}.
        conditional: compare c_k instead of a_k. A fixed bar for c_k goes on as long as each draft is good by itself; one for
            a_k bounds the chance that a verified draft is wasted.

    Raises:
        ValueError: for a threshold outside [0, 1].
    """

    threshold: float
    conditional: bool = False

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0.0, 1.0, "it is a probability")

    def step(self, survival: Tensor, request_ids: Sequence[int]) -> Tensor:
        """Return the number of leading positions whose confidence reaches the threshold."""
        bar: float | Tensor = self.threshold
        if self.conditional:  # c_k >= t, multiplied out: where a_{k-1} = 0 there is no c_k, and 0 >= 0 would go on
            before = torch.cat((torch.ones_like(survival[:, :1]), survival[:, :-1]), dim=1)
            bar = torch.where(before > 0, self.threshold * before, torch.inf)
        return (survival >= bar).cumprod(dim=1).sum(dim=1).to(torch.int32)


@dataclass(frozen=True)
class EarlyStopping:
    """Algorithm 1 (paper 3.2.2): admit by survival across requests until a step no longer improves throughput."""

    cost_table: CostTable
    max_tokens: int | None = None

    def step(self, survival: Tensor, request_ids: Sequence[int]) -> Tensor:
        """Return `dsspark.schedule` of the current survivals."""
        return dsspark.schedule(survival, self.cost_table, max_tokens=self.max_tokens)

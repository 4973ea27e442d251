"""Shared by the tests: exact grid laws and the midpoints that sample them without error."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

TOP = 1 - 2.0**-24
"""The largest uniform."""


def logits_of(numerators: list[int]) -> Tensor:
    """Return float32 logits of the law numerators / sum; -inf for 0."""
    return torch.log(torch.tensor(numerators, dtype=torch.float64)).to(torch.float32)


def midpoints(count: int) -> list[float]:
    """Return (i + 1/2) / count: a lattice whose counts are exactly proportional to any law in count-ths."""
    return [(i + 0.5) / count for i in range(count)]


def every(*axes: list[float]) -> Tensor:
    """Return every combination of the axes' values, [product, axes] float32."""
    return torch.tensor(list(itertools.product(*axes)), dtype=torch.float32)


def law_counts(tokens: Tensor, vocab_size: int) -> list[int]:
    """Return how often each token occurs."""
    return torch.bincount(tokens, minlength=vocab_size).tolist()

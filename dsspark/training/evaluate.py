"""Measure on held-out text what speculative rounds really do: tokens a round, acceptance by position, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsspark.decoding import Drafter, RoundReport, Target, generate
from dsspark.models.target import BOS_ID, EOS_ID
from dsspark.reference.calibration import expected_calibration_error
from dsspark.reference.confidence import survival
from dsspark.statistics import RoundStatistics
from dsspark.training.corpus import Document


def encode(text: bytes) -> list[int]:
    """Return BOS and the bytes of a prompt as ids."""
    return [BOS_ID, *text]


def decode(tokens: Sequence[int]) -> bytes:
    """Return the bytes among ids; BOS, EOS and the rest are left out."""
    return bytes(token for token in tokens if token < 256)


@dataclass
class RoundRecord:
    """Rounds verified at full length.

    Attributes:
        statistics: counts.
        confidence_logits: [S, gamma], uncalibrated; None for a drafter without a confidence head.
        accepted: [S, gamma] bool: drafts 1..k were all accepted.
        tokens: the texts.
    """

    statistics: RoundStatistics
    confidence_logits: Tensor | None
    accepted: Tensor
    tokens: list[list[int]] = field(default_factory=list)


def run_rounds(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Document],
    *,
    max_new_tokens: int = 160,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
) -> RoundRecord:
    """Decode held-out prompts speculatively, verify every block at full length, and record each round.

    The contexts are the target's own text, so acceptance is what decoding meets, not what teacher forcing would show.

    Args:
        target: the model.
        drafter: proposes.
        prompts: from `held_out_prompts`.
        max_new_tokens: a text ends there or at EOS.
        temperature: of both models.
        seed: of the first prompt; the following ones count up.
        batch_size: prompts decoded together.
    """
    logits: list[Tensor] = []
    accepted: list[Tensor] = []
    position = torch.arange(drafter.block_size)
    statistics = RoundStatistics(drafter.block_size)
    texts: list[list[int]] = []

    def record(report: RoundReport) -> None:
        statistics.add(report.lengths, report.verification.num_accepted)
        accepted.append(position < report.verification.num_accepted[:, None])
        if report.proposal is not None and report.proposal.confidence_logits is not None:
            logits.append(report.proposal.confidence_logits)

    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        generation = generate(
            target,
            drafter,
            [encode(document.prompt) for document in part],
            max_new_tokens,
            temperature,
            seeds=range(seed + start, seed + start + len(part)),
            stop_tokens=(EOS_ID,),
            on_round=record,
        )
        texts.extend(generation.tokens)
    return RoundRecord(statistics, torch.cat(logits) if logits else None, torch.cat(accepted), texts)


def calibration_errors(confidence_logits: Tensor, accepted: Tensor, temperatures: Tensor | None) -> list[float]:
    """Return the ECE of the prefix survival at each position (paper 3.2.1), with STS temperatures or without."""
    predicted = survival(confidence_logits, temperatures)
    return [
        float(expected_calibration_error(predicted[:, k].contiguous(), accepted[:, k].contiguous()))
        for k in range(predicted.shape[1])
    ]

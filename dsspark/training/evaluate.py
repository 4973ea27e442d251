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
from dsspark.serving.policies import Policy
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
        lengths: [S] int64, drafts verified.
        prompt_ids: [S] int64, the prompt of each round.
        tokens: the texts.
    """

    statistics: RoundStatistics
    confidence_logits: Tensor | None
    accepted: Tensor
    lengths: Tensor
    prompt_ids: Tensor
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
    policy: Policy | None = None,
) -> RoundRecord:
    """Decode held-out prompts speculatively and record each round.

    The contexts are the target's own text, so acceptance is what decoding meets, not what teacher forcing would show.

    Args:
        target: the model.
        drafter: proposes.
        prompts: from `held_out_prompts`.
        max_new_tokens: a text ends there or at EOS.
        temperature: of both models.
        seed: of the first prompt; the following ones count up.
        batch_size: prompts decoded together.
        policy: how many drafts are verified; whole blocks if None.
    """
    logits: list[Tensor] = []
    accepted: list[Tensor] = []
    lengths: list[Tensor] = []
    prompt_ids: list[int] = []
    position = torch.arange(drafter.block_size)
    statistics = RoundStatistics(drafter.block_size)
    texts: list[list[int]] = []

    def record(report: RoundReport) -> None:
        statistics.add(report.lengths, report.verification.num_accepted)
        accepted.append(position < report.verification.num_accepted[:, None])
        lengths.append(report.lengths.to(torch.int64))
        prompt_ids.extend(start + row for row in report.request_ids)
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
            policy,
            range(seed + start, seed + start + len(part)),
            stop_tokens=(EOS_ID,),
            on_round=record,
        )
        texts.extend(generation.tokens)
    return RoundRecord(
        statistics=statistics,
        confidence_logits=torch.cat(logits) if logits else None,
        accepted=torch.cat(accepted),
        lengths=torch.cat(lengths),
        prompt_ids=torch.tensor(prompt_ids),
        tokens=texts,
    )


def pooled(records: Sequence[RoundRecord]) -> RoundRecord:
    """Return the rounds of several records as one, each record's prompts numbered after the last's."""
    offsets, shift = [], 0
    for record in records:
        offsets.append(record.prompt_ids + shift)
        shift += len(record.tokens)
    logits = [record.confidence_logits for record in records if record.confidence_logits is not None]
    statistics = RoundStatistics(records[0].statistics.block_size)
    for record in records:
        statistics.add(record.lengths, record.accepted.sum(dim=1))
    return RoundRecord(
        statistics=statistics,
        confidence_logits=torch.cat(logits) if logits else None,
        accepted=torch.cat([record.accepted for record in records]),
        lengths=torch.cat([record.lengths for record in records]),
        prompt_ids=torch.cat(offsets),
        tokens=[text for record in records for text in record.tokens],
    )


def split(record: RoundRecord, sizes: Sequence[int]) -> list[RoundRecord]:
    """Return the rounds of the first sizes[0] prompts, of the next sizes[1], ...: the inverse of `pooled`."""
    parts, start = [], 0
    for size in sizes:
        rows = (record.prompt_ids >= start) & (record.prompt_ids < start + size)
        statistics = RoundStatistics(record.statistics.block_size)
        statistics.add(record.lengths[rows], record.accepted[rows].sum(dim=1))
        parts.append(
            RoundRecord(
                statistics=statistics,
                confidence_logits=None if record.confidence_logits is None else record.confidence_logits[rows],
                accepted=record.accepted[rows],
                lengths=record.lengths[rows],
                prompt_ids=record.prompt_ids[rows] - start,
                tokens=record.tokens[start : start + size],
            )
        )
        start += size
    return parts


def calibration_errors(confidence_logits: Tensor, accepted: Tensor, temperatures: Tensor | None) -> list[float]:
    """Return the ECE of the prefix survival at each position (paper 3.2.1), with STS temperatures or without."""
    predicted = survival(confidence_logits, temperatures)
    return [
        float(expected_calibration_error(predicted[:, k].contiguous(), accepted[:, k].contiguous()))
        for k in range(predicted.shape[1])
    ]

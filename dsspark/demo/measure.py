"""What the demo measures of the text: tokens a round, acceptance by position, calibration, greedy equality, the exact law."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import dsspark
from dsspark.decoding import Drafter, RoundReport, Target, TargetCache, generate
from dsspark.reference.calibration import ReliabilityTable, auroc, reliability_table
from dsspark.statistics import RoundStatistics
from dsspark.testing.laws import LawError, law_error
from dsspark.types import PackedBatch

Prompts = Mapping[str, Sequence[Sequence[int]]]
"""Token ids of the prompts of each domain."""
OnTokens = Callable[[int], None]
"""Told how many tokens each round emitted."""

NUM_BINS = 20
"""Bins of the ECE: those that Sequential Temperature Scaling was fitted with."""
DIAGRAM_BINS = 10
_SEED_STRIDE = 1_000_003
_NOISE_DRAWS = 20
_GREEDY_BATCH = 72


def _seeds(seed: int, count: int) -> list[int]:
    return [seed * _SEED_STRIDE + i for i in range(count)]


@dataclass
class Rounds:
    """Full-length rounds of many requests.

    Attributes:
        total: counts over all domains.
        by_domain: the same counts for each domain.
        confidence_logits: [S, gamma] of every round; None for a drafter without a confidence head.
        accepted: [S, gamma] bool, drafts 1..k all accepted.
    """

    total: RoundStatistics
    by_domain: dict[str, RoundStatistics]
    confidence_logits: Tensor | None = None
    accepted: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))


def decode_rounds(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    on_tokens: OnTokens | None = None,
) -> Rounds:
    """Decode all prompts, whole blocks verified every round, and count what happens.

    A domain is a batch of its own: its texts are of like length, so less of the batch is padding. With whole blocks a request's text
    does not depend on its batch.

    Returns:
        The rounds; a domain's counts cover its own requests only.
    """
    block_size = drafter.block_size
    rounds = Rounds(RoundStatistics(block_size), {domain: RoundStatistics(block_size) for domain in prompts})
    seeds = iter(_seeds(seed, sum(len(group) for group in prompts.values())))
    logits: list[Tensor] = []
    accepted: list[Tensor] = []
    position = torch.arange(block_size)

    for domain, group in prompts.items():

        def on_round(report: RoundReport, statistics: RoundStatistics = rounds.by_domain[domain]) -> None:
            num_accepted = report.verification.num_accepted
            for counts in (rounds.total, statistics):
                counts.add(report.lengths, num_accepted)
            if report.proposal is not None and report.proposal.confidence_logits is not None:
                logits.append(report.proposal.confidence_logits)
                accepted.append(position < num_accepted[:, None])
            if on_tokens is not None:
                on_tokens(sum(len(new) for new in report.emitted))

        generate(
            target,
            drafter,
            group,
            max_new_tokens,
            temperature,
            seeds=list(islice(seeds, len(group))),
            stop_tokens=stop_tokens,
            on_round=on_round,
        )
    if logits:
        rounds.confidence_logits, rounds.accepted = torch.cat(logits), torch.cat(accepted)
    return rounds


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How well the predicted survival of each position matches what happened (paper 3.2.1).

    Attributes:
        samples: rounds.
        ece_before, ece_after: ECE of each position, uncalibrated and after STS.
        noise_floor: the ECE that a perfectly calibrated head would show at this sample size, by position.
        auroc: how well the calibrated survival orders the rounds, by position; NaN where all ended alike.
        temperatures: T_k of STS.
        before, after: reliability over all positions together.
    """

    samples: int
    ece_before: list[float]
    ece_after: list[float]
    noise_floor: list[float]
    auroc: list[float]
    temperatures: list[float]
    before: ReliabilityTable
    after: ReliabilityTable


def measure_calibration(confidence_logits: Tensor, accepted: Tensor, temperatures: Tensor | None) -> Calibration:
    """Judge the confidence head on rounds that were verified at full length.

    Args:
        confidence_logits: z, [S, gamma].
        accepted: [S, gamma] bool, drafts 1..k all accepted.
        temperatures: T_k of STS, [gamma]; ones if None.
    """
    before, after = dsspark.survival(confidence_logits), dsspark.survival(confidence_logits, temperatures)

    def by_position(survival: Tensor, outcomes: Tensor) -> list[float]:
        columns = zip(survival.unbind(1), outcomes.unbind(1), strict=True)
        return [float(dsspark.expected_calibration_error(p, y, num_bins=NUM_BINS)) for p, y in columns]

    generator = torch.Generator().manual_seed(0)
    draws = [by_position(after, torch.rand(after.shape, generator=generator) < after) for _ in range(_NOISE_DRAWS)]
    used = torch.ones(confidence_logits.shape[1]) if temperatures is None else temperatures
    return Calibration(
        samples=len(accepted),
        ece_before=by_position(before, accepted),
        ece_after=by_position(after, accepted),
        noise_floor=torch.tensor(draws).mean(dim=0).tolist(),
        auroc=[float(auroc(p, y)) for p, y in zip(after.T.contiguous(), accepted.T.contiguous(), strict=True)],
        temperatures=used.tolist(),
        before=reliability_table(before, accepted, num_bins=DIAGRAM_BINS),
        after=reliability_table(after, accepted, num_bins=DIAGRAM_BINS),
    )


@dataclass(frozen=True, kw_only=True)
class GreedyCheck:
    """Whether greedy text with the drafter is the target's own.

    Attributes:
        prompts: how many were compared.
        tokens: how many tokens that was.
        different: how many texts differ.
    """

    prompts: int
    tokens: int
    different: int


def check_greedy(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    on_tokens: OnTokens | None = None,
) -> GreedyCheck:
    """Decode every prompt greedily, with the drafter and by the target alone, and compare token for token.

    Prompts of like length share a batch: a batch is padded to its longest.
    """

    def on_round(report: RoundReport) -> None:
        if on_tokens is not None:
            on_tokens(sum(len(new) for new in report.emitted))

    ordered, tokens, different = sorted(prompts, key=len), 0, 0
    for start in range(0, len(ordered), _GREEDY_BATCH):
        batch = ordered[start : start + _GREEDY_BATCH]
        drafted, alone = (
            generate(target, which, batch, max_new_tokens, 0.0, stop_tokens=stop_tokens, on_round=on_round).tokens
            for which in (drafter, None)
        )
        tokens += sum(len(text) for text in alone)
        different += sum(a != b for a, b in zip(drafted, alone, strict=True))
    return GreedyCheck(prompts=len(prompts), tokens=tokens, different=different)


class _Recorder:
    """A target that remembers the last step it ran: the rows from which `verify` decided."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.batch: PackedBatch | None = None
        self.logits = torch.zeros(0, 0)

    def new_cache(self, num_requests: int) -> TargetCache:
        return self.target.new_cache(num_requests)

    def forward_ragged(self, batch: PackedBatch, cache: Any) -> tuple[Tensor, Tensor]:
        logits, features = self.target.forward_ragged(batch, cache)
        self.batch, self.logits = batch, logits
        return logits, features


@dataclass(frozen=True)
class DraftRow:
    """The logits behind one drafted token that was reached: the target's, the drafter's, and the target's bonus row, [V] each."""

    target: Tensor
    draft: Tensor
    bonus: Tensor


def collect_rows(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], count: int, *, temperature: float, seed: int
) -> list[DraftRow]:
    """Return `count` rows of real rounds, chosen at random among those that were reached."""
    recorder = _Recorder(target)
    rows: list[DraftRow] = []

    def on_round(report: RoundReport) -> None:
        batch, draft = recorder.batch, report.proposal.draft if report.proposal else None
        if batch is None or draft is None or draft.logits is None:
            return
        for r, (start, end) in enumerate(
            zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
        ):
            length = int(report.lengths[r])
            reached = min(int(report.verification.num_accepted[r]) + 1, length)
            bonus = recorder.logits[end - 1]
            rows.extend(DraftRow(recorder.logits[start + k], draft.logits[r, k], bonus) for k in range(reached))

    generate(
        recorder,
        drafter,
        prompts,
        2 * drafter.block_size,
        temperature,
        seeds=_seeds(seed, len(prompts)),
        on_round=on_round,
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[index] for index in order[:count]]


@dataclass(frozen=True, kw_only=True)
class LawCheck:
    """The worst of many exact laws of a round, against the target's own.

    Attributes:
        rows: how many draft positions were bisected.
        temperature: of the laws.
        max_law_error: largest deviation of a probability.
        max_law_error_in_eps: the same over the float32 epsilon.
        max_threshold_ulps: largest deviation of an acceptance threshold from min(1, p / q), in ulps.
        final_varies: whether a residual or bonus draw depended on the drafted token, which it must not.
        by_domain: max_law_error_in_eps of each domain.
    """

    rows: int
    temperature: float
    max_law_error: float
    max_law_error_in_eps: float
    max_threshold_ulps: float
    final_varies: bool
    by_domain: dict[str, float]


def check_law(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    *,
    rows_per_domain: int,
    temperature: float = 1.0,
    seed: int = 0,
    on_row: Callable[[], None] | None = None,
) -> LawCheck:
    """Bisect the exact law of a round on the models' own logits (see `dsspark.testing.laws.law_error`)."""
    errors: dict[str, list[LawError]] = {}
    for domain, group in prompts.items():
        errors[domain] = []
        for row in collect_rows(target, drafter, group, rows_per_domain, temperature=temperature, seed=seed):
            errors[domain].append(law_error(row.target, row.draft, row.bonus, temperature=temperature))
            if on_row is not None:
                on_row()
    found = [error for group in errors.values() for error in group]
    return LawCheck(
        rows=len(found),
        temperature=temperature,
        max_law_error=max(error.max_law_error for error in found),
        max_law_error_in_eps=max(error.in_eps for error in found),
        max_threshold_ulps=max(error.max_threshold_ulps for error in found),
        final_varies=any(error.final_varies for error in found),
        by_domain={domain: max(error.in_eps for error in group) for domain, group in errors.items()},
    )

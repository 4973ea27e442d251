"""What the drafter does on held-out chats: tokens a round with intervals, acceptance by position, calibration, and greedy equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dsspark.decoding import Drafter, RoundReport, generate
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.reference.calibration import auroc, brier_score, expected_calibration_error, fit_sts
from dsspark.reference.confidence import survival
from dsspark.smollm2.drafter import SmolLM2Drafter
from dsspark.smollm2.generation import held_out_chats
from dsspark.smollm2.model import SmolLM2, encode_chat
from dsspark.smollm2.prompts import prompts
from dsspark.statistics import RoundStatistics
from dsspark.training.corpus import DOMAINS

NEW_TOKENS = 112
TEMPERATURES = (0.0, 1.0)
CALIBRATION_SEED = 77
"""Of the chats that the STS temperatures are fitted on: training prompts, never held-out ones."""


@dataclass
class Rollouts:
    """Rounds of a set of chats, whole blocks verified.

    Attributes:
        statistics: counts over all of them.
        rounds: of each chat.
        emitted: tokens of each chat.
        texts: the tokens.
        confidence_logits: [S, gamma], one row a round.
        accepted: [S, gamma] bool, drafts 1..k all accepted.
    """

    statistics: RoundStatistics
    rounds: list[int]
    emitted: list[int]
    texts: list[list[int]] = field(default_factory=list)
    confidence_logits: Tensor | None = None
    accepted: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))

    def interval(self, seed: int = 0, draws: int = 2000) -> tuple[float, float]:
        """Return the 95 % interval of tokens a round, by resampling chats."""
        chosen = np.random.default_rng(seed).integers(len(self.rounds), size=(draws, len(self.rounds)))
        ratios = np.array(self.emitted)[chosen].sum(axis=1) / np.array(self.rounds)[chosen].sum(axis=1)
        low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
        return low, high


def roll_out(
    target: HuggingFaceTarget,
    drafter: Drafter,
    chats: Sequence[Sequence[int]],
    temperature: float,
    stop_tokens: Sequence[int],
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
) -> Rollouts:
    """Decode chats speculatively, whole blocks verified every round, and record the rounds."""
    found = Rollouts(RoundStatistics(drafter.block_size), [0] * len(chats), [0] * len(chats))
    logits: list[Tensor] = []
    accepted: list[Tensor] = []
    position = torch.arange(drafter.block_size)

    def record(report: RoundReport) -> None:
        found.statistics.add(report.lengths, report.verification.num_accepted)
        accepted.append(position < report.verification.num_accepted[:, None])
        if report.proposal is not None and report.proposal.confidence_logits is not None:
            logits.append(report.proposal.confidence_logits)
        for row, emitted in zip(report.request_ids, report.emitted, strict=True):
            found.rounds[row] += 1
            found.emitted[row] += len(emitted)

    seeds = range(seed, seed + len(chats))
    result = generate(
        target, drafter, chats, new_tokens, temperature, seeds=seeds, stop_tokens=stop_tokens, on_round=record
    )
    found.texts = result.tokens
    found.accepted = torch.cat(accepted)
    found.confidence_logits = torch.cat(logits) if logits else None
    return found


def calibrate(smollm2: SmolLM2, target: HuggingFaceTarget, drafter: SmolLM2Drafter, count: int) -> dict[str, Any]:
    """Fit the STS temperatures on greedy rounds of training prompts, store them in the drafter, and return the errors.

    Greedy rounds, because a confidence trained on p and q says how often a draft drawn at temperature 1 survives, and greedy drafts
    survive more often.
    """
    messages = [text for domain in DOMAINS for text in prompts(domain, count, CALIBRATION_SEED)]
    found = roll_out(target, drafter, encode_chat(smollm2.tokenizer, messages), 0.0, smollm2.stop_tokens)
    assert found.confidence_logits is not None
    fit = fit_sts(found.confidence_logits, found.accepted)
    drafter.set_sts_temperatures(fit.temperatures)
    return {"rounds": len(found.accepted), "temperatures": [round(t, 4) for t in fit.temperatures.tolist()]}


def evaluate(smollm2: SmolLM2, drafter: SmolLM2Drafter, count: int, console: Console) -> dict[str, Any]:
    """Measure a drafter on held-out chats of every domain.

    Args:
        smollm2: the target.
        drafter: its STS temperatures are fitted first, where it has a confidence head.
        count: chats a domain.
        console: where the progress goes.
    """
    target = HuggingFaceTarget(smollm2.model, drafter.target_layer_ids)
    alone = HuggingFaceTarget(smollm2.model)
    results: dict[str, Any] = {"chats": count, "new_tokens": NEW_TOKENS}
    if drafter.confidence_head is not None:
        results["sts"] = calibrate(smollm2, target, drafter, count)
    for domain in DOMAINS:
        chats = held_out_chats(domain, count, smollm2.tokenizer)
        for temperature in TEMPERATURES:
            found = roll_out(target, drafter, chats, temperature, smollm2.stop_tokens)
            entry = summary(found, drafter.sts_temperatures)
            if temperature == 0:
                greedy = generate(alone, None, chats, NEW_TOKENS, 0.0, stop_tokens=smollm2.stop_tokens).tokens
                entry["texts_equal_to_plain"] = sum(a == b for a, b in zip(found.texts, greedy, strict=True))
            results[f"{domain} at {temperature:g}"] = entry
            low, high = entry["interval"]
            console.print(
                f"{domain} at temperature {temperature:g}: {entry['tokens_per_round']:.2f} tokens a round "
                f"({low:.2f} to {high:.2f}), {len(chats)} chats"
            )
    return results


def summary(found: Rollouts, temperatures: Tensor | None) -> dict[str, Any]:
    """Return the numbers of a set of rollouts, ready for JSON."""
    statistics = found.statistics
    entry: dict[str, Any] = {
        "chats": len(found.rounds),
        "rounds": statistics.rounds,
        "tokens_per_round": round(sum(found.emitted) / sum(found.rounds), 4),
        "interval": [round(end, 4) for end in found.interval()],
        "conditional_acceptance": [round(value, 4) for value in statistics.conditional_acceptance],
    }
    if found.confidence_logits is not None:
        for name, scale in (("before", None), ("after", temperatures)):
            predicted = survival(found.confidence_logits, scale)
            columns = list(zip(predicted.T.contiguous(), found.accepted.T.contiguous(), strict=True))
            entry[f"ece_{name}"] = [round(float(expected_calibration_error(*column)), 4) for column in columns]
            entry[f"brier_{name}"] = [round(float(brier_score(*column)), 4) for column in columns]
        entry["auroc"] = [round(float(auroc(*column)), 4) for column in columns]
    return entry

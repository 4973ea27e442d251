"""How good the confidence head is: reliability, ECE, AUC and Brier score by position, before and after STS (paper 3.2.1, figure 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsspark.evaluation.counts import as_json, summarise, weights
from dsspark.reference.calibration import auroc, brier_score, expected_calibration_error, reliability_table
from dsspark.reference.confidence import survival
from dsspark.training.evaluate import RoundRecord

METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ece": expected_calibration_error,
    "auc": auroc,
    "brier": brier_score,
}
DIAGRAM_BINS = 10
_RESAMPLES = 200


def judge_confidence(record: RoundRecord, temperatures: Tensor | None, resamples: int = _RESAMPLES) -> dict[str, Any]:
    """Judge predicted prefix survival against "drafts 1..k were all accepted", on rounds verified at full length.

    Args:
        record: of a drafter with a confidence head.
        temperatures: T_k of STS, [gamma]; ones if None.
        resamples: bootstrap samples over prompts.

    Returns:
        "before" and "after", each with "ece", "auc", "brier" by position (value, low, high) and "reliability", a list a position
        of {"count", "mean_probability", "mean_outcome"} over equal bins; "temperatures"; "rounds".

    Raises:
        ValueError: for a record without confidences.
    """
    if record.confidence_logits is None:
        raise ValueError("record: got rounds of a drafter without a confidence head, expected confidences to judge")
    logits, accepted = record.confidence_logits, record.accepted
    stages = {"before": survival(logits), "after": survival(logits, temperatures)}
    used = torch.ones(logits.shape[1]) if temperatures is None else temperatures
    result: dict[str, Any] = {"rounds": len(accepted), "temperatures": as_json(used)}
    samples = _resampled_rounds(record.prompt_ids, resamples)
    for stage, predicted in stages.items():
        columns = list(zip(predicted.T.contiguous(), accepted.T.contiguous(), strict=True))
        judged: dict[str, Any] = {}
        for name, metric in METRICS.items():
            values = [[float(metric(p[rows], y[rows])) for p, y in columns] for rows in samples]
            judged[name] = summarise(np.asarray(values), pivotal=name == "ece")
        judged["reliability"] = [_bins(p, y) for p, y in columns]
        result[stage] = judged
    return result


def _resampled_rounds(prompt_ids: Tensor, resamples: int) -> list[Tensor]:
    """Return the rounds of each bootstrap sample of prompts; the first is every round once."""
    of_prompt = [(prompt_ids == prompt).nonzero()[:, 0] for prompt in torch.unique(prompt_ids)]
    drawn = weights(len(of_prompt), resamples).astype(np.int64)
    return [
        torch.cat([rows.repeat(int(times)) for rows, times in zip(of_prompt, row, strict=True) if times])
        for row in drawn
    ]


def _bins(probabilities: Tensor, outcomes: Tensor) -> dict[str, Any]:
    table = reliability_table(probabilities, outcomes, num_bins=DIAGRAM_BINS)
    return {
        "count": table.count.tolist(),
        "mean_probability": as_json(table.mean_probability),
        "mean_outcome": as_json(table.mean_outcome),
    }

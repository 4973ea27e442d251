"""Rounds of any drafter as the traces that `python -m dsspark simulate --traces FILE` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsspark.reference.confidence import survival
from dsspark.training.evaluate import RoundRecord


def traces_of(records: Mapping[str, RoundRecord], temperatures: Tensor | None = None) -> dict[str, Any]:
    """Return {domain: {"survival": [[a_1, ...], ...], "accepted": [...]}} of rounds that verified whole blocks.

    Args:
        records: by domain.
        temperatures: T_k of STS, [gamma]; ones if None.

    Without a confidence head every survival is 1, as in `generate`.
    """
    rounds = {}
    for domain, record in records.items():
        if record.confidence_logits is None:
            predicted = torch.ones(record.accepted.shape)
        else:
            predicted = survival(record.confidence_logits, temperatures)
        rounds[domain] = {
            # Rounded to 4 digits along the row, which cannot make it rise.
            "survival": [[round(a, 4) for a in row] for row in predicted.tolist()],
            "accepted": record.accepted.sum(dim=1).tolist(),
        }
    return rounds

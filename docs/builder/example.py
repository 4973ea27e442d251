"""One real round of the shipped models: what the diagrams of the cycle and of packing show."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

import dsspark
from dsspark.decoding import RoundReport, generate
from dsspark.models.pretrained import load_pretrained
from dsspark.models.target import BOS_ID
from dsspark.serving.policies import EarlyStopping

PROMPTS = ("Question: Compute 12 + 30.\nAnswer:", "def add(a, b):\n    ", "Question: What is a list?\nAnswer:")
SHOWN = 2
"""Which round is shown, counted from 0: the first ones begin a text."""


@dataclass(frozen=True, kw_only=True)
class ExampleRound:
    """Drafts, survivals and fate of one round.

    Attributes:
        anchors: [R].
        positions: [R], of the anchors.
        report: the round.
        batch: what the target saw.
    """

    anchors: Tensor
    positions: Tensor
    report: RoundReport
    batch: dsspark.PackedBatch


def character(token: int) -> str:
    """Return a byte as a visible character."""
    return {10: "↵", 32: "␣"}.get(token, chr(token) if 32 < token < 127 else "·")


@functools.cache
def example_round() -> ExampleRound:
    """Decode a little and return round `SHOWN`; verifying a draft costs a twelfth of a request's own token."""
    target, drafter, _ = load_pretrained()
    limit = len(PROMPTS) * (drafter.block_size + 1)
    table = dsspark.CostTable(1.0 / (1.0 + torch.arange(limit + 1, dtype=torch.float64) / 12))
    reports: list[RoundReport] = []
    prompts = [[BOS_ID, *prompt.encode()] for prompt in PROMPTS]
    with torch.random.fork_rng(devices=[]):
        generate(target, drafter, prompts, 40, policy=EarlyStopping(table), on_round=reports.append)
    anchors = torch.tensor([emitted[-1] for emitted in reports[SHOWN - 1].emitted])
    before = [sum(len(report.emitted[r]) for report in reports[:SHOWN]) for r in range(len(PROMPTS))]
    positions = torch.tensor([len(prompt) - 1 + count for prompt, count in zip(prompts, before, strict=True)])
    report = reports[SHOWN]
    if report.proposal is None or len(report.request_ids) != len(PROMPTS):
        raise RuntimeError(f"round {SHOWN}: a prompt has ended or nothing was drafted; choose an earlier round")
    batch = dsspark.pack(anchors, report.proposal.draft.tokens, report.lengths, positions)
    return ExampleRound(anchors=anchors, positions=positions, report=report, batch=batch)

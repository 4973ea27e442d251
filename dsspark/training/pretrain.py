"""Stage one: train the target on the mixture of math, code and chat by next-byte cross-entropy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from dsspark.models.target import TargetConfig, TargetLM
from dsspark.training.corpus import DOMAINS, TokenStream, documents
from dsspark.training.loop import Schedule, train
from dsspark.training.precision import autocast

MIXTURE = {"math": 0.5, "code": 0.25, "chat": 0.25}
"""Share of the rows of a batch; math is the domain the small target can learn well."""

Streams = dict[str, TokenStream]


def load_streams(*, held_out: bool, num_math: int = 20_000) -> Streams:
    """Return the token stream of every domain's split."""
    return {domain: TokenStream(documents(domain, held_out=held_out, num_math=num_math), domain) for domain in DOMAINS}


def mixed_rows(streams: Streams, seed: int, step: int, count: int, length: int) -> Tensor:
    """Return [count, length] int64 rows of the mixture: a pure function of (seed, step)."""
    rng = np.random.default_rng((seed, step))
    chosen = rng.choice(len(DOMAINS), size=count, p=[MIXTURE[domain] for domain in DOMAINS])
    rows = [streams[domain].rows(rng, int((chosen == index).sum()), length) for index, domain in enumerate(DOMAINS)]
    return torch.from_numpy(np.concatenate(rows))


def next_byte_loss(target: TargetLM, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of rows [B, T + 1], its products in `product_dtype`."""
    with autocast():
        logits = target(rows[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(target: TargetLM, streams: Streams, length: int, count: int = 32) -> dict[str, float]:
    """Return the held-out cross-entropy of each domain in nats a byte."""
    rng = np.random.default_rng(1)
    return {
        domain: float(next_byte_loss(target, torch.from_numpy(stream.rows(rng, count, length + 1))))
        for domain, stream in streams.items()
    }


def train_target(
    streams: Streams,
    checkpoint: Path,
    *,
    config: TargetConfig | None = None,
    schedule: Schedule,
    batch_rows: int = 8,
    row_length: int = 384,
    seed: int = 0,
    resume: bool = True,
    console: Console | None = None,
) -> tuple[TargetLM, list[dict[str, float]]]:
    """Train a target from scratch (or from its checkpoint) and return it with its loss history.

    Args:
        streams: the training split.
        checkpoint: file to write and to resume from.
        config: sizes of the target.
        schedule: steps and learning rate.
        batch_rows: rows a step.
        row_length: T, tokens a row.
        seed: of the initial weights and of the batches.
        resume: continue from `checkpoint` if it exists.
        console: where progress goes.
    """
    target = TargetLM(config, torch.Generator().manual_seed(seed))

    def losses(step: int) -> dict[str, Tensor]:
        return {"target": next_byte_loss(target, mixed_rows(streams, seed, step, batch_rows, row_length + 1))}

    history = train("target", {"target": target}, losses, schedule, checkpoint, resume=resume, console=console)
    return target.eval(), history

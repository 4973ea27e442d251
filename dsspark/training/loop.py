"""The training loop: Muon and AdamW with a cosine schedule, checkpoints written atomically, and a resume that changes no bit.

A step's batch is a pure function of (seed, step) and the models have no dropout, so a run that was interrupted and resumed ends
with the very weights of one that was not (same machine, same number of threads).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from dsspark.training.optimiser import Muon

Losses = Mapping[str, Tensor]
Optimisers = list[tuple[torch.optim.Optimizer, float]]
"""Optimisers with their peak learning rates."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train: linear warm-up, then a cosine down to a hundredth of the peak.

    Attributes:
        steps: optimiser steps.
        peak_lr: the largest learning rate of AdamW: embeddings, heads, vectors.
        peak_matrix_lr: the largest learning rate of Muon: the matrices inside the layers.
        warmup: steps of warm-up.
        weight_decay: of matrices; vectors are not decayed.
        checkpoint_every: steps between checkpoints.
    """

    steps: int
    peak_lr: float
    peak_matrix_lr: float = 5e-3
    warmup: int = 50
    weight_decay: float = 0.05
    checkpoint_every: int = 100

    def scale(self, step: int) -> float:
        """Return what the peak learning rates are multiplied by at step 0, 1, ..."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def write_atomically(path: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write a neighbouring file and move it over `path`: an interrupt leaves the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save(partial)
    os.replace(partial, path)


def make_optimisers(modules: Mapping[str, nn.Module], schedule: Schedule) -> Optimisers:
    """Return Muon for the matrices inside the layers and AdamW for all other trainable parameters."""
    named = [item for module in modules.values() for item in module.named_parameters() if item[1].requires_grad]
    inside = [p for name, p in named if p.dim() == 2 and "layers." in name]
    outside = [p for name, p in named if p.dim() == 2 and "layers." not in name]
    adamw = torch.optim.AdamW(
        [
            {"params": outside, "weight_decay": schedule.weight_decay},
            {"params": [p for _, p in named if p.dim() != 2], "weight_decay": 0.0},
        ],
        lr=schedule.peak_lr,
        betas=(0.9, 0.95),
    )
    optimisers: Optimisers = [(adamw, schedule.peak_lr)]
    if inside:
        muon = Muon(inside, lr=schedule.peak_matrix_lr, weight_decay=schedule.weight_decay)
        optimisers.insert(0, (muon, schedule.peak_matrix_lr))
    return optimisers


def train(
    label: str,
    modules: Mapping[str, nn.Module],
    losses: Callable[[int], Losses],
    schedule: Schedule,
    checkpoint: Path,
    *,
    resume: bool = True,
    console: Console | None = None,
) -> list[dict[str, float]]:
    """Train modules side by side, each on its own loss and with its own gradient clipping, from one batch a step.

    Args:
        label: names the stage in the progress bar and in the checkpoint.
        modules: what to train; only parameters that require a gradient.
        losses: step -> the loss of each module under the module's name; other entries are only recorded.
        schedule: steps and learning rate.
        checkpoint: file to write every `schedule.checkpoint_every` steps and at the end.
        resume: continue from `checkpoint` if it exists.
        console: where progress goes.

    Returns:
        The recorded losses, one dict a step, and the "seconds" it took.

    Raises:
        ValueError: if the checkpoint belongs to another stage or schedule.
    """
    parameters = {name: [p for p in module.parameters() if p.requires_grad] for name, module in modules.items()}
    optimisers = make_optimisers(modules, schedule)
    history: list[dict[str, float]] = []
    if resume and checkpoint.exists():
        history = _restore(label, modules, optimisers, schedule, checkpoint)
    shown_losses = TextColumn("{task.fields[shown]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown_losses)
    with Progress(*columns, console=console, disable=console is not None and console.quiet) as progress:
        task = progress.add_task(label, total=schedule.steps, completed=len(history), shown="")
        for step in range(len(history), schedule.steps):
            begun = time.perf_counter()
            parts = losses(step)
            for optimiser, peak in optimisers:
                optimiser.zero_grad(set_to_none=True)
                for group in optimiser.param_groups:
                    group["lr"] = peak * schedule.scale(step)
            torch.stack([parts[name] for name in modules]).sum().backward()  # type: ignore[no-untyped-call]
            for group_parameters in parameters.values():
                nn.utils.clip_grad_norm_(group_parameters, 1.0)
            for optimiser, _ in optimisers:
                optimiser.step()
            record = {name: float(value.detach()) for name, value in parts.items()}
            shown = "  ".join(f"{name} {value:.3f}" for name, value in record.items())
            history.append(record | {"seconds": time.perf_counter() - begun})
            progress.update(task, advance=1, shown=shown)
            if (step + 1) % schedule.checkpoint_every == 0 or step + 1 == schedule.steps:
                _save(label, modules, optimisers, schedule, checkpoint, history)
    return history


def _save(
    label: str,
    modules: Mapping[str, nn.Module],
    optimisers: Optimisers,
    schedule: Schedule,
    checkpoint: Path,
    history: list[dict[str, float]],
) -> None:
    payload: dict[str, Any] = {
        "label": label,
        "steps": schedule.steps,
        "modules": {name: module.state_dict() for name, module in modules.items()},
        "optimisers": [optimiser.state_dict() for optimiser, _ in optimisers],
        "history": history,
    }
    write_atomically(checkpoint, lambda path: torch.save(payload, path))


def _restore(
    label: str, modules: Mapping[str, nn.Module], optimisers: Optimisers, schedule: Schedule, checkpoint: Path
) -> list[dict[str, float]]:
    payload = torch.load(checkpoint, weights_only=True)
    if payload["label"] != label or payload["steps"] != schedule.steps:
        raise ValueError(
            f"checkpoint: got {payload['label']!r} of {payload['steps']} steps, expected {label!r} of {schedule.steps}; "
            "choose another output folder or pass resume=False"
        )
    for name, module in modules.items():
        module.load_state_dict(payload["modules"][name])
    for (optimiser, _), state in zip(optimisers, payload["optimisers"], strict=True):
        optimiser.load_state_dict(state)
    history: list[dict[str, float]] = payload["history"]
    return history

"""Training the drafter for as long as there is time: the schedule follows the clock, and a run that was stopped goes on.

Shards are picked up as they appear, so training may begin while the data is still being written.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dsspark.smollm2.blocks import block_losses, greedy_rounds, make_blocks
from dsspark.smollm2.drafter import SmolLM2Drafter, drafter_config
from dsspark.smollm2.generation import Answer, load_answers
from dsspark.training.loop import write_atomically

STANDARDISED_ON = 20_000
"""Generated tokens from which the features' means and standard deviations come."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How the drafter is trained.

    Attributes:
        minutes: of training, all sittings together.
        peak_lr: of AdamW, for matrices; vectors take the same.
        answers: a step.
        anchors: blocks of each answer.
        ce_weight: of the cross-entropy.
        l1_weight: of |q - p|_1. The paper's 0.1 and 0.9 are for long runs; the cross-entropy finds the mode sooner.
        weight_decay: of matrices.
        draft_vocab_size: ids that can be drafted.
        block_size: gamma.
        markov_rank: r.
        num_layers: draft layers.
        log_every: steps between two lines.
        check_every: steps between two checks on held-out answers, each with a checkpoint.
        seed: of everything.
    """

    minutes: float = 60.0
    peak_lr: float = 1.5e-3
    answers: int = 8
    anchors: int = 32
    ce_weight: float = 0.5
    l1_weight: float = 0.5
    weight_decay: float = 0.02
    draft_vocab_size: int = 4096
    block_size: int = 4
    markov_rank: int = 64
    num_layers: int = 2
    log_every: int = 20
    check_every: int = 100
    seed: int = 0

    def scale(self, step: int, minutes: float) -> float:
        """Return what the learning rate is multiplied by: a warm-up of 50 steps, then a cosine over the clock."""
        progress = min(1.0, minutes / self.minutes)
        return min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Shards:
    """The answers in a folder, read once, refreshed when asked.

    Args:
        folder: of `generate_shards`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: list[Answer] = []
        self._read: set[str] = set()
        self.refresh()
        if not self.answers:
            raise FileNotFoundError(
                f"smollm2: no shards in {folder}, expected some; run `python -m dsspark smollm2 prepare`"
            )

    def refresh(self) -> None:
        """Read what is new."""
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            if path.name not in self._read:
                self._read.add(path.name)
                self.answers += [
                    answer for answer in load_answers(path) if len(answer.tokens) - answer.prompt_length >= 8
                ]


def draft_vocabulary(answers: Sequence[Answer], size: int, vocab_size: int) -> Tensor:
    """Return the `size` ids that the answers use most, increasing; lower ids, which the tokenizer merged first, fill up."""
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer.tokens[answer.prompt_length :].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(order[:size]))


def fit_standardisation(drafter: SmolLM2Drafter, answers: Sequence[Answer], generator: torch.Generator) -> None:
    """Take the features' means and deviations from generated tokens: a text's first token is the one with the huge values."""
    parts: list[Tensor] = []
    for index in torch.randperm(len(answers), generator=generator).tolist():
        answer = answers[index]
        parts.append(answer.features[answer.prompt_length :].float())
        if sum(len(part) for part in parts) >= STANDARDISED_ON:
            break
    drafter.backbone.fit_standardisation(torch.cat(parts))


def train_drafter(
    model: Any,
    shards: Shards,
    held_out: dict[str, list[Answer]],
    folder: Path,
    plan: TrainingPlan,
    console: Console,
) -> tuple[SmolLM2Drafter, list[dict[str, Any]]]:
    """Train until the plan's minutes are spent and return the drafter with its history.

    Args:
        model: the frozen target; its embedding and LM head.
        shards: the training answers.
        held_out: greedy answers to held-out prompts, by domain.
        folder: of the checkpoint and the history.
        plan: how.
        console: where the progress goes.
    """
    checkpoint = folder / "checkpoint.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    generator = torch.Generator().manual_seed(plan.seed)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    size = min(plan.draft_vocab_size, vocab_size)
    ids = saved["ids"] if saved else draft_vocabulary(shards.answers, size, vocab_size)
    config = drafter_config(
        model,
        size,
        block_size=plan.block_size,
        num_layers=plan.num_layers,
        markov_rank=plan.markov_rank,
    )
    drafter = SmolLM2Drafter(config, model, ids, generator)
    named = dict(drafter.named_parameters())
    optimiser = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": plan.weight_decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    history: list[dict[str, Any]] = []
    minutes = 0.0
    if saved:
        drafter.load_state_dict(saved["drafter"])
        optimiser.load_state_dict(saved["optimiser"])
        history, minutes = saved["history"], saved["minutes"]
    else:
        fit_standardisation(drafter, shards.answers, generator)
    step = history[-1]["step"] if history else 0
    recent: list[dict[str, float]] = []
    latest: dict[str, float] = {}
    while minutes < plan.minutes:
        begun = time.perf_counter()
        recent.append(_step(drafter, optimiser, named, shards.answers, plan, step, minutes))
        step += 1
        if step % plan.log_every == 0:
            means = {name: sum(r[name] for r in recent) / len(recent) for name in recent[0]}
            recent = []
            text = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            console.print(f"step {step}  {minutes:.1f} min  {len(shards.answers)} answers  {text}")
            minutes += (time.perf_counter() - begun) / 60
            begun = time.perf_counter()
            latest = {name: round(value, 4) for name, value in means.items()}
        minutes += (time.perf_counter() - begun) / 60
        if step % plan.check_every == 0 or minutes >= plan.minutes:
            found = _check(drafter, held_out)
            console.print(f"step {step}  {minutes:.1f} min  held-out tokens a round {found}")
            history.append({"step": step, "minutes": round(minutes, 2), **latest, "tokens_per_round": found})
            _save(checkpoint, drafter, optimiser, ids, history, minutes, plan)
            shards.refresh()
    (folder / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    return drafter.requires_grad_(False).eval(), history


def _step(
    drafter: SmolLM2Drafter,
    optimiser: torch.optim.Optimizer,
    named: dict[str, torch.nn.Parameter],
    answers: Sequence[Answer],
    plan: TrainingPlan,
    step: int,
    minutes: float,
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    chosen = torch.randint(len(answers), (plan.answers,), generator=generator).tolist()
    blocks = make_blocks([answers[i] for i in chosen], plan.block_size, plan.anchors, generator)
    for group in optimiser.param_groups:
        group["lr"] = plan.peak_lr * plan.scale(step, minutes)
    parts = block_losses(drafter, blocks, ce_weight=plan.ce_weight, l1_weight=plan.l1_weight)
    optimiser.zero_grad(set_to_none=True)
    parts["loss"].backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
    optimiser.step()
    return {name: float(value.detach()) for name, value in parts.items()} | {"norm": float(norm)}


def _check(drafter: SmolLM2Drafter, held_out: dict[str, list[Answer]]) -> dict[str, float]:
    return {domain: round(greedy_rounds(drafter, answers).tokens_per_round, 3) for domain, answers in held_out.items()}


def _save(
    path: Path,
    drafter: SmolLM2Drafter,
    optimiser: torch.optim.Optimizer,
    ids: Tensor,
    history: list[dict[str, Any]],
    minutes: float,
    plan: TrainingPlan,
) -> None:
    payload = {
        "drafter": drafter.state_dict(),
        "optimiser": optimiser.state_dict(),
        "ids": ids,
        "history": history,
        "minutes": minutes,
        "plan": asdict(plan),
    }
    write_atomically(path, lambda file: torch.save(payload, file))

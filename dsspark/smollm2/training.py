"""Training the drafter for as long as there is time: the schedule follows the clock, and a run that was stopped goes on.

Shards are picked up as they appear, so training may begin while the data is still being written.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dsspark.smollm2.batching import coarse_products
from dsspark.smollm2.blocks import block_losses, greedy_rounds, make_blocks
from dsspark.smollm2.drafter import SmolLM2Drafter, drafter_config
from dsspark.smollm2.generation import Answer, load_answers
from dsspark.training.loop import write_atomically

FITTED_ON = 20_000
"""Generated tokens that `fit_start` looks at."""
MEAN_SHARE = 3.0
"""Root mean square of the mean's direction in a slot's vector, beside 1 of the anchor and 1/2 of the context before it."""


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
    anchors: int = 20
    ce_weight: float = 0.5
    l1_weight: float = 0.5
    weight_decay: float = 0.02
    draft_vocab_size: int = 8192
    block_size: int = 6
    markov_rank: int = 64
    num_layers: int = 2
    log_every: int = 20
    check_every: int = 200
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


@torch.no_grad()
def fit_start(drafter: SmolLM2Drafter, answers: Sequence[Answer], generator: torch.Generator) -> None:
    """Take from generated tokens what training had better not look for: the features' scale, and where the final states lie.

    A text's first token is the one with the huge values, so it is left out. The slots' vectors begin on the mean of what the target's LM
    head reads: the first proposals are then those of an average token, not of a random state.
    """
    features: list[Tensor] = []
    final: list[Tensor] = []
    for index in torch.randperm(len(answers), generator=generator).tolist():
        features.append(answers[index].features[answers[index].prompt_length :].float())
        final.append(answers[index].final.float())
        if sum(len(part) for part in features) >= FITTED_ON:
            break
    backbone = drafter.backbone
    backbone.fit_standardisation(torch.cat(features).to(backbone.fc.weight.device))
    towards = torch.cat(final).mean(dim=0).to(backbone.norm.weight.device) / backbone.norm.weight
    backbone.slots.add_(MEAN_SHARE * towards / towards.pow(2).mean().sqrt())


class _Run:
    """A drafter in training: what a checkpoint holds."""

    def __init__(self, model: Any, shards: Shards, checkpoint: Path, plan: TrainingPlan) -> None:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True) if checkpoint.exists() else None
        self.plan, self.checkpoint, self.answers = plan, checkpoint, shards.answers
        generator = torch.Generator().manual_seed(plan.seed)
        vocab_size = model.get_output_embeddings().weight.shape[0]
        size = min(plan.draft_vocab_size, vocab_size)
        self.ids = saved["ids"] if saved else draft_vocabulary(shards.answers, size, vocab_size)
        config = drafter_config(
            model,
            len(self.ids),
            block_size=plan.block_size,
            num_layers=plan.num_layers,
            markov_rank=plan.markov_rank,
        )
        self.drafter = SmolLM2Drafter(config, model, self.ids.to(model.device), generator).to(model.device)
        parameters = list(self.drafter.parameters())
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": plan.weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        self.history: list[dict[str, Any]] = []
        self.step, self.minutes = 0, 0.0
        if saved is None:
            fit_start(self.drafter, shards.answers, generator)
            return
        self.drafter.load_state_dict(saved["drafter"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.history, self.minutes, self.step = saved["history"], saved["minutes"], saved["history"][-1]["step"]

    def advance(self) -> dict[str, float]:
        """Take a step, on a batch that depends on the seed, the step and the answers there are."""
        plan = self.plan
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + self.step)
        chosen = torch.randint(len(self.answers), (plan.answers,), generator=generator).tolist()
        blocks = make_blocks([self.answers[i] for i in chosen], plan.block_size, plan.anchors, generator)
        blocks = blocks.to(self.drafter.backbone.fc.weight.device)
        for group in self.optimiser.param_groups:
            group["lr"] = plan.peak_lr * plan.scale(self.step, self.minutes)
        parts = block_losses(self.drafter, blocks, ce_weight=plan.ce_weight, l1_weight=plan.l1_weight)
        self.optimiser.zero_grad(set_to_none=True)
        parts["loss"].backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        return {name: float(value.detach()) for name, value in parts.items()} | {"norm": float(norm)}

    def save(self) -> None:
        """Write the checkpoint."""
        payload = {
            "drafter": self.drafter.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "ids": self.ids,
            "history": self.history,
            "minutes": self.minutes,
            "plan": asdict(self.plan),
        }
        write_atomically(self.checkpoint, lambda file: torch.save(payload, file))


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
        model: the frozen target; its embedding and LM head are borrowed.
        shards: the training answers.
        held_out: greedy answers to held-out prompts, by domain.
        folder: of the checkpoint and the history.
        plan: how.
        console: where the progress goes.
    """
    run = _Run(model, shards, folder / "checkpoint.pt", plan)
    recent: list[dict[str, float]] = []
    means: dict[str, float] = {}
    while run.minutes < plan.minutes:
        begun = perf_counter()
        with coarse_products():
            recent.append(run.advance())
        run.minutes += (perf_counter() - begun) / 60  # checks on held-out answers are not training
        if run.step % plan.log_every == 0 or run.minutes >= plan.minutes:
            means = {name: round(statistics.fmean(part[name] for part in recent), 4) for name in recent[0]}
            recent = []
            text = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            console.print(f"step {run.step}  {run.minutes:.1f} min  {len(shards.answers)} answers  {text}")
        if run.step % plan.check_every == 0 or run.minutes >= plan.minutes:
            found = {
                domain: round(greedy_rounds(run.drafter, answers).tokens_per_round, 3)
                for domain, answers in held_out.items()
            }
            console.print(f"step {run.step}  {run.minutes:.1f} min  held-out tokens a round {found}")
            entry = {"step": run.step, "minutes": round(run.minutes, 2), "answers": len(shards.answers)}
            run.history.append({**entry, **means, "tokens_per_round": found})
            run.save()
            shards.refresh()
    (folder / "history.json").write_text(json.dumps(run.history, indent=1) + "\n", encoding="utf-8")
    return run.drafter.requires_grad_(False).eval(), run.history

"""All stages in order: target, text drawn from it, drafters, calibration, measurement, files."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from dsspark.models.backbone import BackboneConfig
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.pretrained import round_to_bfloat16, save_pretrained
from dsspark.models.target import TargetConfig, TargetLM
from dsspark.reference.calibration import fit_sts
from dsspark.training.corpus import DOMAINS, Document, documents, held_out_prompts
from dsspark.training.distill import train_drafters
from dsspark.training.evaluate import RoundRecord, calibration_errors, pooled, run_rounds
from dsspark.training.loop import Schedule, write_atomically
from dsspark.training.pretrain import MIXTURE, Streams, held_out_losses, load_streams, mixed_rows, train_target
from dsspark.training.rollout import sample_continuations


@dataclass(frozen=True)
class Plan:
    """Everything a training run depends on besides the code and the Python that ships the corpus."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    target_schedule: Schedule = field(default_factory=lambda: Schedule(steps=1000, peak_lr=2e-3, warmup=100))
    drafter_schedule: Schedule = field(default_factory=lambda: Schedule(steps=550, peak_lr=2e-3))
    batch_rows: int = 8
    row_length: int = 384
    anchors_per_row: int = 48
    drawn_rows: int = 512
    drawn_greedy_every: int = 4
    drawn_prefix: int = 128
    num_math: int = 20_000
    calibration_prompts: int = 96
    max_new_tokens: int = 160
    seed: int = 0


def small_plan() -> Plan:
    """Return a plan that runs in seconds and teaches nothing: for tests and for trying the command."""
    target = TargetConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
        feature_layers=(0,),
    )
    backbone = BackboneConfig(
        feature_size=32,
        hidden_size=32,
        block_size=3,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
    )
    schedule = Schedule(steps=6, peak_lr=1e-3, warmup=2, checkpoint_every=2)
    return Plan(
        target=target,
        drafter=DrafterConfig(backbone, markov_rank=8),
        target_schedule=schedule,
        drafter_schedule=schedule,
        batch_rows=4,
        row_length=48,
        anchors_per_row=8,
        drawn_rows=8,
        drawn_prefix=16,
        num_math=50,
        calibration_prompts=2,
        max_new_tokens=6,
    )


def run_training(
    out: Path | str,
    *,
    resume: bool = True,
    small: bool = False,
    target_steps: int | None = None,
    drafter_steps: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train, calibrate, measure and save; return the provenance, which is also saved.

    Args:
        out: folder for checkpoints and, under `weights/`, the files that `load_pretrained` reads.
        resume: continue an interrupted run with the same plan in `out`.
        small: use `small_plan`.
        target_steps: instead of the plan's.
        drafter_steps: likewise.
        seed: of everything.
        console: where progress goes.

    Raises:
        ValueError: for steps below 1, or a checkpoint in `out` that belongs to another plan.
    """
    plan = replace(small_plan() if small else Plan(), seed=seed)
    plan = replace(
        plan,
        target_schedule=_with_steps("target_steps", plan.target_schedule, target_steps),
        drafter_schedule=_with_steps("drafter_steps", plan.drafter_schedule, drafter_steps),
    )
    out, console = Path(out), console or Console()
    clock = _Clock()

    console.print("Reading the standard library and generating arithmetic ...")
    streams = load_streams(held_out=False, num_math=plan.num_math)
    held_out = load_streams(held_out=True, num_math=max(50, plan.num_math // 10))
    clock.lap("corpus")
    target, history = train_target(
        streams,
        out / "target.pt",
        config=plan.target,
        schedule=plan.target_schedule,
        batch_rows=plan.batch_rows,
        row_length=plan.row_length,
        seed=seed,
        resume=resume,
        console=console,
    )
    round_to_bfloat16(target)  # what ships: the drafter must imitate these very numbers
    clock.lap("target", history)
    drawn = _drawn_text(target, streams, plan, out / "drawn.pt", resume)
    clock.lap("drawn text")
    twins = {"drafter": plan.drafter, "parallel_only": replace(plan.drafter, markov_rank=0)}
    drafters, drafter_history = train_drafters(
        target,
        streams,
        drawn,
        out / "drafters.pt",
        configs=twins,
        schedule=plan.drafter_schedule,
        batch_rows=plan.batch_rows,
        anchors_per_row=plan.anchors_per_row,
        seed=seed,
        resume=resume,
        console=console,
    )
    for drafter in drafters.values():
        round_to_bfloat16(drafter)
    clock.lap("drafters", drafter_history)
    console.print("Calibrating and measuring on held-out text ...")
    measured = calibrate_and_measure(target, drafters["drafter"], drafters["parallel_only"], plan)
    clock.lap("calibration and measurement")
    provenance = {
        "seed": seed,
        "commit": commit_of_code(),
        "plan": asdict(plan),
        "mixture": MIXTURE,
        "corpus": _corpus_sizes(plan),
        "held_out_nats_per_byte": held_out_losses(target, held_out, plan.row_length),
        "loss_curves": {"target": _curve(history), "drafters": _curve(drafter_history)},
        **measured,
        "minutes": clock.minutes,
        "machine": describe_machine(),
    }
    save_pretrained(out / "weights", target, drafters["drafter"], drafters["parallel_only"], provenance)
    return provenance


def _with_steps(name: str, schedule: Schedule, steps: int | None) -> Schedule:
    if steps is None:
        return schedule
    if steps < 1:
        raise ValueError(f"{name}: got {steps}, expected 1 or more")
    return replace(schedule, steps=steps)


def _drawn_text(target: TargetLM, streams: Streams, plan: Plan, path: Path, resume: bool) -> Tensor:
    """Return text the target draws after training prefixes, [drawn_rows, row_length + 1]; kept in a file for a resumed run."""
    if resume and path.exists():
        kept: Tensor = torch.load(path, weights_only=True)
        return kept
    prefixes = mixed_rows(streams, plan.seed + 7, 0, plan.drawn_rows, plan.drawn_prefix)
    length = plan.row_length + 1 - plan.drawn_prefix
    generator = torch.Generator().manual_seed(plan.seed)
    greedy = (
        torch.arange(plan.drawn_rows) % plan.drawn_greedy_every == 0
    )  # of every domain: the rows come domain by domain
    drawn = sample_continuations(target, prefixes, length, generator, greedy=greedy)
    write_atomically(path, lambda partial: torch.save(drawn, partial))
    return drawn


def calibrate_and_measure(
    target: TargetLM, drafter: DSparkDrafter, parallel_only: DSparkDrafter, plan: Plan
) -> dict[str, Any]:
    """Fit both drafters' STS temperatures on half of the held-out prompts and measure on the other half.

    Returns:
        `tokens_per_round` (domain -> temperature -> drafter), `acceptance_by_position` (domain -> drafter), `ece_before`,
        `ece_after` by position (all domains together), and their number of rounds.
    """
    half = plan.calibration_prompts
    drafters = {"drafter": drafter, "parallel_only": parallel_only}
    fitting: dict[str, list[RoundRecord]] = {name: [] for name in drafters}
    testing: dict[str, list[RoundRecord]] = {name: [] for name in drafters}
    tokens_per_round: dict[str, dict[str, dict[str, float]]] = {}
    acceptance: dict[str, dict[str, list[float]]] = {}
    for index, domain in enumerate(DOMAINS):
        prompts = held_out_prompts(domain, 2 * half)
        parts: dict[str, Sequence[Document]] = {"fit": prompts[:half], "test": prompts[half:]}
        tokens_per_round[domain] = {"0": {}, "1": {}}
        acceptance[domain] = {}
        for name, model in drafters.items():

            def rounds(
                prompts: Sequence[Document], temperature: float, model: DSparkDrafter = model, base: int = index
            ) -> RoundRecord:
                return run_rounds(
                    target,
                    model,
                    prompts,
                    max_new_tokens=plan.max_new_tokens,
                    temperature=temperature,
                    seed=(base + 1) * 100_000,
                )

            if name == "drafter":
                fitting[name].append(rounds(parts["fit"], 1.0))
            testing[name].append(rounds(parts["test"], 1.0))
            tokens_per_round[domain]["1"][name] = testing[name][-1].statistics.tokens_per_round
            acceptance[domain][name] = testing[name][-1].statistics.conditional_acceptance
            greedy = rounds(parts["test"], 0.0)
            tokens_per_round[domain]["0"][name] = greedy.statistics.tokens_per_round

    fitted, tested = pooled(fitting["drafter"]), pooled(testing["drafter"])
    assert fitted.confidence_logits is not None
    assert tested.confidence_logits is not None
    temperatures = fit_sts(fitted.confidence_logits, fitted.accepted).temperatures
    drafter.set_sts_temperatures(temperatures)
    logits, accepted = tested.confidence_logits, tested.accepted
    return {
        "tokens_per_round": tokens_per_round,
        "acceptance_by_position": acceptance,
        "sts_temperatures": temperatures.tolist(),
        "ece_before": calibration_errors(logits, accepted, None),
        "ece_after": calibration_errors(logits, accepted, temperatures),
        "rounds": {"fitted": sum(len(r.accepted) for r in fitting["drafter"]), "tested": len(accepted)},
    }


class _Clock:
    """Minutes of each stage; a resumed stage counts its earlier steps too."""

    def __init__(self) -> None:
        self.minutes: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str, history: Sequence[Mapping[str, float]] = ()) -> None:
        now = time.perf_counter()
        seconds = sum(step["seconds"] for step in history) if history else now - self._last
        self.minutes[stage], self._last = round(seconds / 60, 2), now


def _curve(history: Sequence[Mapping[str, float]], points: int = 10) -> list[dict[str, float]]:
    """Return the mean of each recorded value over `points` stretches of the run."""
    size = max(1, len(history) // points)
    stretches = [history[start : start + size] for start in range(0, len(history), size)]
    return [
        {"step": float(min((index + 1) * size, len(history)))}
        | {name: round(sum(step[name] for step in part) / len(part), 4) for name in part[0] if name != "seconds"}
        for index, part in enumerate(stretches)
    ]


def _corpus_sizes(plan: Plan) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for domain in DOMAINS:
        train, held_out = (documents(domain, held_out=flag, num_math=plan.num_math) for flag in (False, True))
        sizes[domain] = {
            "train_documents": len(train),
            "train_bytes": sum(len(document.text) for document in train),
            "held_out_documents": len(held_out),
            "held_out_bytes": sum(len(document.text) for document in held_out),
        }
    return sizes


def commit_of_code() -> str | None:
    """Return the commit of the checkout this file lies in; None outside one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def describe_machine() -> dict[str, Any]:
    """Return what a measurement was made on."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }

"""Train and measure every drafter of a study; what is finished is kept, a second start goes on from there, and several starts share."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from dsspark.evaluation.latency import measure_latency
from dsspark.experiments.fit import fit_drafter, new_drafter, observe_pool
from dsspark.experiments.measure import Exam, measure_drafter
from dsspark.experiments.plan import Spec, Study, lengths
from dsspark.experiments.results import Json, Runs, assemble, tokens_per_round
from dsspark.models.drafter import TeacherTexts
from dsspark.models.target import TargetLM
from dsspark.training.corpus import DOMAINS, held_out_prompts
from dsspark.training.evaluate import encode
from dsspark.training.loop import write_atomically
from dsspark.training.pretrain import load_streams
from dsspark.training.run import commit_of_code, describe_machine


def run_experiments(
    target: TargetLM, out: Path | str, study: Study, *, again: bool = False, console: Console | None = None
) -> dict[str, Json]:
    """Run a study and return its results by name; they are also written to `out/results`.

    Processes with the same `out` share the drafters: each trains one that no other is at, and the one that ends last measures latencies
    and has all results.

    Args:
        target: frozen.
        out: folder; `runs/` keeps one file a trained drafter.
        study: what to do.
        again: measure the latencies again even if `out` has them.
        console: where progress goes.

    Raises:
        ValueError: if `out` holds runs of another study.
    """
    out, console = Path(out), console or Console()
    _same_study(out, study)
    missing = [(spec, seed) for spec, seed in study.runs if not _file(out, spec, seed).exists()]
    if missing:
        console.print(f"{len(missing)} of {len(study.runs)} drafters to train; reading texts ...")
        pool, exam = observe_pool(target, load_streams(held_out=False), study), Exam(target, study)
        for spec, seed in missing:
            with _claimed(out, spec, seed) as claimed:
                if claimed and not _file(out, spec, seed).exists():
                    _run_one(target, pool, exam, out, study, spec, seed, console)
    timings = out / "latency.json"
    unfinished = sum(not _file(out, spec, seed).exists() for spec, seed in study.runs)
    if unfinished:
        console.print(f"{unfinished} drafters are still being trained by another process, which will have all results")
    elif again or not timings.exists():
        _write(timings, time_drafters(target, study))
    return write_results(out, study)


def _run_one(
    target: TargetLM, pool: TeacherTexts, exam: Exam, out: Path, study: Study, spec: Spec, seed: int, console: Console
) -> None:
    """Train and measure one drafter and keep the measurement."""
    checkpoint = out / "checkpoints" / f"{spec.key}_s{seed}.pt"
    drafter, history = fit_drafter(target, pool, spec, study, seed, checkpoint, console)
    measured = measure_drafter(exam, spec, drafter, seed)
    run = _facts(spec, seed, history, sum(p.numel() for p in drafter.parameters())) | measured
    _write(_file(out, spec, seed), run)
    checkpoint.unlink()  # the measurement is what is kept
    shown = ", ".join(f"{d} {tokens_per_round(run['rounds'][d]['1']):.2f}" for d in DOMAINS)
    console.print(f"{spec.key}, seed {seed}: tokens a round at temperature 1: {shown}")


@contextmanager
def _claimed(out: Path, spec: Spec, seed: int) -> Iterator[bool]:
    """Say whether this process may train the drafter: no other is at it. A claim ends with its process, however that ends."""
    path = out / "claims" / f"{spec.key}_s{seed}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def write_results(out: Path, study: Study) -> dict[str, Json]:
    """Assemble, write and return the results of the runs that `out` holds, finished or not."""
    timings = out / "latency.json"
    latency = json.loads(timings.read_text(encoding="utf-8")) if timings.exists() else None
    runs = load_runs(out, study)
    measured = [sum(len(seeds) for seeds in runs.values()), len(study.runs)]
    facts = {
        "study": asdict(study),
        "measured_drafters": measured,
        "made": {"commit": commit_of_code(), "machine": describe_machine()},
    }
    results = {name: facts | content for name, content in assemble(runs, study, latency).items()}
    for name, content in results.items():
        _write(out / "results" / f"{name}.json", content)
    return results


def load_runs(out: Path, study: Study) -> Runs:
    """Return key -> seed -> run of the files that `out` holds so far."""
    runs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for spec, seed in study.runs:
        path = _file(out, spec, seed)
        if path.exists():
            runs.setdefault(spec.key, {})[seed] = json.loads(path.read_text(encoding="utf-8"))
    return runs


def time_drafters(target: TargetLM, study: Study) -> Json:
    """Return batch -> drafter -> gamma -> milliseconds and shares; untrained drafters take as long as trained ones."""
    documents = [encode(document.prompt) for document in held_out_prompts("math", max(study.latency_batches))]
    return {
        str(batch): {
            name: {
                str(spec.block_size): measure_latency(
                    target,
                    new_drafter(target, spec, study, 0).requires_grad_(False),
                    documents[:batch],
                    max_new_tokens=24,
                )
                for spec in lengths(name, study.reduced)
            }
            for name in ("dflash", "dspark", "eagle3")
        }
        for batch in study.latency_batches
    }


def _facts(spec: Spec, seed: int, history: list[dict[str, float]], parameters: int) -> Json:
    tail = history[-max(1, len(history) // 10) :]
    return {
        "drafter": spec.name,
        "block_size": spec.block_size,
        "num_layers": spec.num_layers,
        "seed": seed,
        "parameters": parameters,
        "steps": len(history),
        "seconds": round(sum(step["seconds"] for step in history), 1),
        "training_acceptance": round(sum(step["accept"] for step in tail) / len(tail), 4),
    }


def _file(out: Path, spec: Spec, seed: int) -> Path:
    return out / "runs" / f"{spec.key}_s{seed}.json"


def _write(path: Path, content: Any) -> None:
    text = json.dumps(content, separators=(",", ":")) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def _same_study(out: Path, study: Study) -> None:
    """Remember the study in `out`, or refuse a folder that holds another one's runs."""
    path, wanted = out / "study.json", json.loads(json.dumps(asdict(study)))
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != wanted:
        raise ValueError(
            f"out: got {str(out)!r}, which holds runs of another study, expected a new folder or the same study"
        )
    _write(path, wanted)

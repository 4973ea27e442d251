"""Print the configurations that are fastest on this GPU, as the table that a `choose_config` should hold.

    python -m benchmarks.tune [--task TASK ...] [--out FILE]

From what `choose_config` returns, one field at a time is doubled and halved as long as the kernel gets faster: a coordinate descent, for
the fields hardly interact and the grid of all of them would take hours. A configuration that does not compile, or whose result does not
agree with the reference, is dropped, with its reason. Nothing is changed: whoever reads the table edits `choose_config`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import KERNEL, REFERENCE, Case
from benchmarks.provenance import provenance
from benchmarks.sizes import sizes
from benchmarks.tasks import TASKS

PLACES = {
    "markov": "draft_plan",
    "markov, recomputed": "draft_plan",
    "confidence": "confidence",
    "calibration": "calibration",
    "scheduler": "scheduler",
    "verification, pack": "packing",
    "verification, attention": "verification",
    "rejection": "rejection_plan",
    "losses": "losses",
}
"""The module of `dsspark.kernels` in which a task looks its `choose_config` up."""

GAIN = 1.02
"""A configuration must be faster by this factor to replace another: less is noise."""

Clock = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a search found.

    Attributes:
        chosen: what `choose_config` returns.
        best: the fastest.
        seconds: (chosen, best).
        dropped: configurations that failed, and why.
    """

    chosen: Any
    best: Any
    seconds: tuple[float, float]
    dropped: dict[str, str]


def neighbours(config: Any) -> Iterator[Any]:
    """Return the configurations that differ in one integer field by a factor of two."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            continue
        yield replace(config, **{entry.name: 2 * value})
        if value > 1:
            yield replace(config, **{entry.name: value // 2})


def chosen_config(task: str, case: Case) -> Any:
    """Return what `choose_config` gives for a case."""
    module, seen = importlib.import_module(f"dsspark.kernels.{PLACES[task]}"), []
    choose = module.choose_config

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(choose(*args, **named))
        return seen[-1]

    with mock.patch.object(module, "choose_config", watched):
        case.contenders[KERNEL].run(case.inputs)
    if not seen:
        raise RuntimeError(f"{task}: got no call of choose_config in {module.__name__}, expected one; correct PLACES")
    return seen[-1]


def tune(task: str, case: Case, clock: Clock) -> Tuned:
    """Search from the chosen configuration."""
    module = importlib.import_module(f"dsspark.kernels.{PLACES[task]}")
    expected = case.contenders[REFERENCE].run(case.inputs)
    dropped: dict[str, str] = {}
    tried: dict[Any, float] = {}

    def seconds(config: Any) -> float:
        if config not in tried:
            tried[config] = float("inf")
            with mock.patch.object(module, "choose_config", return_value=config):
                try:
                    case.agree(case.contenders[KERNEL].run(case.inputs), expected)
                    tried[config] = clock(lambda: case.contenders[KERNEL].run(case.inputs))
                except Exception as error:  # whatever a compiler or a launcher refuses: the next one may do
                    dropped[str(config)] = f"{type(error).__name__}: {str(error)[:120]}"
        return tried[config]

    chosen = best = chosen_config(task, case)
    first = seconds(chosen)
    if first == float("inf"):
        raise RuntimeError(f"{task}: the chosen configuration fails: {dropped[str(chosen)]}")
    improved = True
    while improved:
        improved = False
        for config in list(neighbours(best)):
            if seconds(config) * GAIN < seconds(best):
                best, improved = config, True
    return Tuned(chosen=chosen, best=best, seconds=(first, tried[best]), dropped=dropped)


def gpu_clock(run: Callable[[], object]) -> float:
    """Return the median seconds of 20 calls by events, after three that do not count."""
    from benchmarks.harness import timed

    for _ in range(3):
        run()
    return statistics.median(timed(run, "cuda") for _ in range(20))


def line(task: str, case: Case, tuned: Tuned) -> str:
    """Return what differs, as one line of the table."""
    changes = {
        name: (value, getattr(tuned.best, name))
        for name, value in asdict(tuned.chosen).items()
        if value != getattr(tuned.best, name)
    }
    text = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items()) or "as chosen"
    before, after = tuned.seconds
    return f"| {task} | {case.size.label} | {text} | {1e6 * before:.1f} us | {1e6 * after:.1f} us |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument(
        "--task", nargs="+", choices=sorted(PLACES), default=list(PLACES), help="which; all if left out"
    )
    parser.add_argument("--out", type=Path, help="write the findings as JSON too")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: a configuration cannot be timed in the interpreter")
        return 2
    print("| task | size | choose_config should say | chosen | best |", "| --- | --- | --- | ---: | ---: |", sep="\n")
    found = []
    for task in args.task:
        component, build = TASKS[task]
        for size in sizes(component, "cuda"):
            case = build(size, "cuda")
            tuned = tune(task, case, gpu_clock)
            print(line(task, case, tuned), flush=True)
            found.append({"task": task, "size": size.label, **{k: v for k, v in asdict(tuned).items()}})
    if args.out:
        args.out.write_text(
            json.dumps({"provenance": provenance("cuda"), "tuned": found}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

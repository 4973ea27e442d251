"""`python -m dsspark demo`: arguments, the order of the measurements, and the two files they end in."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

import dsspark
from dsspark.decoding import Drafter, Target
from dsspark.demo import measure, terminal, timing
from dsspark.demo.prompts import DOMAINS, MAX_POSITIONS, Domain, Prompt, held_out, user_prompts
from dsspark.demo.results import Results, summary
from dsspark.demo.text import harmless
from dsspark.demo.transcripts import Transcript, transcribe
from dsspark.models.target import EOS_ID
from dsspark.serving.policies import EarlyStopping

STOP = (EOS_ID,)
THREADS = 1
"""Of the shipped models. Most of their operations take microseconds: a second thread waits longer for the first than it works."""
Models = tuple[Target, Drafter, Drafter]
"""Target, drafter, and the parallel-only twin."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        prompts: held-out prompts a domain.
        tokens: decoded for each of them, at most.
        greedy_tokens: likewise in the greedy check.
        sizes: batch tokens of the cost table.
        repeats: timed steps a size.
        counts: numbers of requests the schedulers see.
        steps: steps counted at each of them.
        pairs: timed pairs a domain.
        pair_tokens: tokens of each timed text.
        law_rows: bisected rows a domain.
    """

    prompts: int = 68
    tokens: int = 64
    greedy_tokens: int = 32
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    repeats: int = 3
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    steps: int = 6
    pairs: int = 1
    pair_tokens: int = 64
    law_rows: int = 4


QUICK = Effort(
    prompts=4,
    tokens=24,
    greedy_tokens=16,
    sizes=(1, 4, 8, 16, 32),
    repeats=1,
    counts=(1, 4),
    steps=3,
    pairs=1,
    pair_tokens=16,
    law_rows=1,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    parser.add_argument(
        "--model",
        choices=("bytes", "smollm2"),
        default="bytes",
        help="bytes: the small models of this package; smollm2: a real chat model from a wheel, see the page on SmolLM2 (%(default)s)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", action="extend", metavar="TEXT", help="text to continue, one or more")
    source.add_argument("--prompt-file", metavar="F", help="a file to continue; any bytes will do")
    parser.add_argument(
        "--domain",
        choices=DOMAINS,
        help="measure on this domain's held-out text only; a prompt of yours is put into its form (a question, for math and chat)",
    )
    parser.add_argument(
        "--out", default="demo-output", metavar="DIR", help="folder of report.html and summary.json (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=160, metavar="N", help="bytes of each text shown (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of target and draft; 0 is greedy (1; with --model smollm2, 0)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all texts (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few prompts only: to see that it works, not to measure")


def run(args: argparse.Namespace) -> int:
    """Run the demo and return 0, or 1 if a check of losslessness failed."""
    started = time.perf_counter()
    if args.temperature is None:
        args.temperature = 0.0 if args.model == "smollm2" else 1.0
    _check_numbers(args)
    if args.model == "smollm2":
        from dsspark.smollm2.demo import run as run_smollm2

        return run_smollm2(args, _writable_folder(args.out))
    prompts = user_prompts(args.prompt or [], args.prompt_file, args.domain, args.max_new_tokens)
    out = _writable_folder(args.out)
    from dsspark.demo.report import render_report
    from dsspark.models.pretrained import load_pretrained

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an output that knows no UTF-8 must not end the run
    torch.set_num_threads(THREADS)
    console = Console(highlight=False)
    results = measure_all(load_pretrained(), prompts, args, QUICK if args.quick else Effort(), console, started)
    found = summary(results)
    (out / "summary.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render_report(results), encoding="utf-8")
    console.print(terminal.findings(results))
    folder = harmless(os.fsencode(out))
    console.print(Text(f"report.html and summary.json are in {folder}, {results.seconds:.0f} s after the start"))
    return 0 if found["greedy_matches_target"] and not results.law.final_varies else 1


def _check_numbers(args: argparse.Namespace) -> None:
    if not 1 <= args.max_new_tokens <= MAX_POSITIONS // 2:
        raise ValueError(
            f"--max-new-tokens: got {args.max_new_tokens}, expected 1 to {MAX_POSITIONS // 2}; the default is a good start"
        )
    if not 0 <= args.temperature <= 100:
        raise ValueError(f"--temperature: got {args.temperature}, expected 0 (greedy) to 100; 1 is the model's own law")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed: got {args.seed}, expected 0 to {2**31 - 1}; any of them will do")


def _writable_folder(name: str) -> Path:
    """Return the folder, made if it was missing, after a test that files can be written to it."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(
            f"--out: got {name!r} ({reason}), expected a folder that can be written to; choose another"
        ) from error
    return folder


def measure_all(
    models: Models, prompts: list[Prompt], args: argparse.Namespace, effort: Effort, console: Console, started: float
) -> Results:
    """Decode, show and measure everything.

    Args:
        models: target, drafter, parallel-only twin.
        prompts: the user's; held-out ones are shown if there are none.
        args: of the command line.
        effort: how much to measure.
        console: where it is shown.
        started: `time.perf_counter` at the start of the run.
    """
    target, drafter, _ = models
    domains: tuple[Domain, ...] = DOMAINS if args.domain is None else (args.domain,)
    texts = held_out(domains, effort.prompts)
    shown = prompts or [group[0] for group in texts.values()]
    transcripts = _show(target, drafter, shown, args, console)

    tokens = {domain: [prompt.tokens for prompt in group] for domain, group in texts.items()}
    every = [prompt for group in zip(*tokens.values(), strict=False) for prompt in group]
    stages, temperature = terminal.Stages(console), args.temperature
    console.print(Text("\nMeasuring on held-out text", "bold"))
    with stages.stage("cost table of this machine", len(effort.sizes) * (effort.repeats + 1)) as advance:
        table = timing.profile_costs(
            target, drafter, every, effort.sizes, repeats=effort.repeats, on_step=lambda: advance(1)
        )
    rounds, parallel = _decode_both(models, tokens, args, effort, stages)
    calibration = None
    if rounds.confidence_logits is not None:
        calibration = measure.measure_calibration(rounds.confidence_logits, rounds.accepted, drafter.sts_temperatures)
    with stages.stage("schedulers, by number of requests", len(effort.counts)) as advance:
        sweep = timing.sweep_schedulers(
            target,
            drafter,
            every,
            table,
            effort.counts,
            steps=effort.steps,
            temperature=temperature,
            seed=args.seed,
            on_point=lambda: advance(1),
        )
    speeds = _time_all(target, drafter, tokens, table, args, effort, stages)
    checked = [*every, *(prompt.tokens for prompt in prompts)]
    with stages.stage("greedy text against the target's own", 2 * len(checked) * effort.greedy_tokens) as advance:
        greedy = measure.check_greedy(
            target, drafter, checked, max_new_tokens=effort.greedy_tokens, stop_tokens=STOP, on_tokens=advance
        )
    with stages.stage("the exact law of a round, by bisection", len(tokens) * effort.law_rows) as advance:
        law = measure.check_law(
            target,
            drafter,
            {domain: group[: effort.law_rows] for domain, group in tokens.items()},
            rows_per_domain=effort.law_rows,
            temperature=temperature or 1.0,  # at 0 the law is one token, and greedy equality is its check
            seed=args.seed,
            on_row=lambda: advance(1),
        )
    return Results(
        transcripts=transcripts,
        rounds=rounds,
        rounds_parallel_only=parallel,
        calibration=calibration,
        cost_table=table,
        sweep=sweep,
        speeds=speeds,
        greedy=greedy,
        law=law,
        settings={
            "domains": list(domains),
            "held_out_prompts": {domain: len(group) for domain, group in tokens.items()},
            "tokens_per_prompt": effort.tokens,
            "temperature": temperature,
            "seed": args.seed,
            "quick": bool(args.quick),
            "block_size": drafter.block_size,
        },
        environment=environment(),
        provenance=provenance(),
        seconds=time.perf_counter() - started,
    )


def _show(
    target: Target, drafter: Drafter, prompts: list[Prompt], args: argparse.Namespace, console: Console
) -> list[Transcript]:
    from dsspark.training.run import Plan

    transcripts, trained = [], Plan().row_length
    console.print(terminal.legend())
    if any(len(prompt.tokens) + args.max_new_tokens > trained for prompt in prompts):
        console.print(
            Text(f"The model was trained on texts of {trained} bytes: longer ones get worse, their law stays exact.")
        )
    for index, prompt in enumerate(prompts):
        with terminal.live_transcript(console) as update:
            found = transcribe(
                target,
                drafter,
                prompt,
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                seed=args.seed + index,
                stop_tokens=STOP,
                on_update=update,
            )
            update(found)
        transcripts.append(found)
    return transcripts


def _decode_both(
    models: Models, tokens: measure.Prompts, args: argparse.Namespace, effort: Effort, stages: terminal.Stages
) -> tuple[measure.Rounds, measure.Rounds]:
    target, drafter, parallel_only = models
    count = sum(len(group) for group in tokens.values())

    def decode(text: str, used: Drafter) -> measure.Rounds:
        with stages.stage(text, count * effort.tokens) as advance:
            return measure.decode_rounds(
                target,
                used,
                tokens,
                max_new_tokens=effort.tokens,
                temperature=args.temperature,
                seed=args.seed,
                stop_tokens=STOP,
                on_tokens=advance,
            )

    return decode("rounds with the Markov head", drafter), decode("rounds of the parallel-only twin", parallel_only)


def _time_all(
    target: Target,
    drafter: Drafter,
    tokens: measure.Prompts,
    table: dsspark.CostTable,
    args: argparse.Namespace,
    effort: Effort,
    stages: terminal.Stages,
) -> list[timing.Speed]:
    """Time whole blocks first (the headline), then Algorithm 1, then greedy decoding."""
    prompts = [prompt for group in tokens.values() for prompt in group[: effort.pairs]]
    ways: list[dict[str, Any]] = [
        {"temperature": args.temperature},
        {"temperature": args.temperature, "policy": EarlyStopping(table), "policy_name": "Algorithm 1"},
    ]
    if args.temperature > 0:
        ways.append({"temperature": 0.0})
    with stages.stage("wall-clock, in alternating pairs", len(ways) * len(prompts)) as advance:
        on_pair: Callable[[], None] = lambda: advance(1)  # noqa: E731
        return [
            timing.time_pairs(
                target, drafter, prompts, new_tokens=effort.pair_tokens, seed=args.seed, on_pair=on_pair, **way
            )
            for way in ways
        ]


def provenance() -> dict[str, Any]:
    """Return what the shipped weights say about themselves; empty where they say nothing."""
    from dsspark.models.pretrained import load_provenance

    try:
        return load_provenance()
    except FileNotFoundError:
        return {}


def environment() -> dict[str, str]:
    """Return the machine and the versions, without names or paths."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dsspark": dsspark.__version__,
    }


def _processor() -> str:
    """Return the processor's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()

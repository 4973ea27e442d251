"""`python -m dsspark evaluate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsspark.evaluation.run import REDUCED, Protocol, evaluate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--weights", type=Path, metavar="DIR", help="from `train`; the shipped ones by default")
    parser.add_argument(
        "--out", type=Path, default=Path("evaluation-output"), help="folder for evaluate.json and figures"
    )
    parser.add_argument("--reduced", action="store_true", help="a third of the prompts")
    parser.add_argument("--prompts", type=int, metavar="N", help="of each domain (default 48)")
    parser.add_argument("--no-latency", action="store_true", help="time nothing, for a machine that is not quiet")


def run(args: argparse.Namespace) -> int:
    """Measure, write, draw and print; return the exit status."""
    from dsspark.evaluation.plots import draw

    console = Console()
    protocol = REDUCED if args.reduced else Protocol()
    if args.prompts is not None:
        protocol = replace(protocol, prompts=args.prompts)
    if args.no_latency:
        protocol = replace(protocol, latency_batches=())
    args.out.mkdir(parents=True, exist_ok=True)
    result = evaluate(args.weights, protocol, console)
    (args.out / "evaluate.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, args.out)
    print_report(result, console)
    console.print(f"Written to {args.out}: evaluate.json and figures")
    return 0


def shown(estimate: Mapping[str, Any], scale: float = 1.0) -> str:
    """Return an estimate with its interval as text."""
    if estimate["value"] is None:
        return "-"
    value, low, high = (scale * estimate[name] for name in ("value", "low", "high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """Print the tables: accepted length, acceptance by position, confidence, thresholds, latency."""
    for name, measured in result["drafters"].items():
        table = Table(title=f"{name}: held-out rollouts (95 % bootstrap intervals over prompts)")
        for column in ("domain", "T", "tokens a round", "acceptance by position", "teacher-forced"):
            table.add_column(column)
        for domain, by_temperature in measured["rounds"].items():
            for temperature, found in by_temperature.items():
                forced = measured["teacher_forced"][domain].get(temperature)
                table.add_row(
                    domain,
                    temperature,
                    shown(found["tokens_per_round"]),
                    _percentages(found["conditional_acceptance"]["value"]),
                    "-" if forced is None else _percentages(forced["value"]),
                )
        console.print(table)
        if "confidence" in measured:
            _print_confidence(name, measured, console)
        for batch, times in measured["latency"].items():
            console.print(
                f"{name}, batch {batch}: {times['round_ms']:.2f} ms a round; drafting {100 * times['draft_share']:.0f} %, "
                f"of which the sequential head {100 * times['sequential_share']:.1f} % of the round"
            )


def _percentages(values: list[float | None]) -> str:
    return " ".join("-" if value is None else f"{100 * value:.0f}" for value in values)


def _print_confidence(name: str, measured: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{name}: confidence at temperature 1, all domains")
    for column in ("position", "ECE % before STS", "after", "AUC", "Brier"):
        table.add_column(column)
    before, after = measured["confidence"]["before"], measured["confidence"]["after"]

    def at(judged: Mapping[str, Any], k: int) -> dict[str, Any]:
        return {end: judged[end][k] for end in ("value", "low", "high")}

    for k in range(len(before["ece"]["value"])):
        errors = (shown(at(stage["ece"], k), 100) for stage in (before, after))
        table.add_row(str(k + 1), *errors, shown(at(after["auc"], k)), shown(at(after["brier"], k)))
    console.print(table)
    for domain, points in measured["thresholds"].items():
        parts = (f"{p['threshold']:g}: {100 * (p['acceptance_rate']['value'] or 0):.0f} %" for p in points)
        console.print(f"{domain}: share of verified drafts accepted by threshold: {', '.join(parts)}")

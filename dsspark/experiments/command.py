"""`python -m dsspark experiments`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsspark.experiments.plan import TABLE_1, full_study, reduced_study
from dsspark.training.corpus import DOMAINS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "--out", type=Path, default=Path("experiments-output"), help="folder; a second start goes on from what it holds"
    )
    parser.add_argument(
        "--reduced", action="store_true", help="a quarter of an hour on two idle cores instead of three hours"
    )
    parser.add_argument("--weights", type=Path, metavar="DIR", help="whose target to use; the shipped one by default")
    parser.add_argument("--again", action="store_true", help="measure latencies again, on a quiet machine")


def run(args: argparse.Namespace) -> int:
    """Train, measure, draw and print; return the exit status."""
    from dsspark.experiments.figures import draw
    from dsspark.experiments.run import run_experiments
    from dsspark.models.pretrained import load_pretrained

    console = Console()
    target = load_pretrained(args.weights)[0]
    study = reduced_study() if args.reduced else full_study()
    results = run_experiments(target, args.out, study, again=args.again, console=console)
    draw(results, args.out / "results")
    print_table(results["table1"], console)
    for result in results.values():
        print_claims(result["claims"], console)
    console.print(f"Results and figures written to {args.out / 'results'}")
    return 0


def shown(statistic: Mapping[str, Any] | None) -> str:
    """Return a value with its interval as text."""
    if statistic is None:
        return "-"
    if statistic["low"] is None:
        return f"{statistic['value']:.2f}"
    return f"{statistic['value']:.2f} [{statistic['low']:.2f}, {statistic['high']:.2f}]"


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """Print Table 1: tokens a round, mean and 95 % interval over the seeds."""
    table = Table(title="Tokens a round (mean of the seeds and 95 % interval)")
    table.add_column("drafter")
    columns = [(domain, temperature) for domain in DOMAINS for temperature in ("0", "1")]
    for domain, temperature in columns:
        table.add_column(f"{domain}, T = {temperature}")
    for spec in TABLE_1:
        table.add_row(spec.key, *(shown(result["tokens_per_round"][d][t][spec.key]) for d, t in columns))
    console.print(table)


def print_claims(claims: list[dict[str, Any]], console: Console) -> None:
    """Print what each claim came to."""
    for claim in claims:
        console.print(f"{claim['verdict']:>12}  {claim['claim']}: {shown(claim['difference'])}", highlight=False)

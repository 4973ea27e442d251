"""`python -m dsspark experiments`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from dsspark.experiments.pages import results_page
from dsspark.experiments.plan import full_study, reduced_study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "--out", type=Path, default=Path("experiments-output"), help="folder; a second start goes on from what it holds"
    )
    parser.add_argument(
        "--reduced", action="store_true", help="meant for a quarter of an hour on two idle cores instead of three hours"
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
    page = results_page(results)
    (args.out / "results" / "experiments.md").write_text(page, encoding="utf-8")
    console.print(Markdown(page))
    console.print(f"Results and figures written to {args.out / 'results'}")
    return 0

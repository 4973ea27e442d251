"""`python -m dsspark evaluate`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from dsspark.evaluation.pages import evaluation_page
from dsspark.evaluation.run import REDUCED, Protocol, evaluate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--weights", type=Path, metavar="DIR", help="from `train`; the shipped ones by default")
    parser.add_argument(
        "--out", type=Path, default=Path("evaluation-output"), help="folder for evaluate.json and figures"
    )
    parser.add_argument("--reduced", action="store_true", help="a tenth of the work")
    parser.add_argument("--prompts", type=int, metavar="N", help="of each domain (default 24)")
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
    (args.out / "evaluate.json").write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    draw(result, args.out)
    page = evaluation_page(result)
    (args.out / "evaluate.md").write_text(page, encoding="utf-8")
    console.print(Markdown(page))
    console.print(f"Written to {args.out}: evaluate.json, evaluate.md and figures")
    return 0

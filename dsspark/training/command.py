"""`python -m dsspark train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from dsspark.models.pretrained import WEIGHTS_DIRECTORY
from dsspark.training.run import run_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--out", type=Path, default=Path("training-output"), help="folder for checkpoints and weights")
    parser.add_argument(
        "--fresh", action="store_true", help="start again instead of resuming from the checkpoints in --out"
    )
    parser.add_argument("--small", action="store_true", help="tiny models, a few steps: try the command in seconds")
    parser.add_argument("--target-steps", type=int, metavar="N", help="optimiser steps of the target")
    parser.add_argument("--drafter-steps", type=int, metavar="N", help="optimiser steps of the drafters")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the batches and the arithmetic's choice of rows"
    )


def run(args: argparse.Namespace) -> int:
    """Train and print what was measured; return the exit status."""
    console = Console()
    provenance = run_training(
        args.out,
        resume=not args.fresh,
        small=args.small,
        target_steps=args.target_steps,
        drafter_steps=args.drafter_steps,
        seed=args.seed,
        console=console,
    )
    for domain, by_temperature in provenance["tokens_per_round"].items():
        for temperature, by_drafter in by_temperature.items():
            shown = ", ".join(f"{name} {value:.2f}" for name, value in by_drafter.items())
            console.print(f"{domain}, temperature {temperature}: tokens a round: {shown}")
    for name in ("ece_before", "ece_after"):
        values = provenance[name]
        console.print(f"{name}: {100 * sum(values) / len(values):.2f} % averaged over positions")
    console.print(
        f"Weights written to {args.out / 'weights'} in {sum(provenance['minutes'].values()):.1f} minutes; "
        f"copy them over the package's {WEIGHTS_DIRECTORY.name}/ folder to ship them."
    )
    return 0

"""`python -m dsspark smollm2 prepare | train | evaluate`: the drafter of a real model, from nothing to measured numbers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

STEPS = ("prepare", "train", "evaluate")
HELD_OUT_PROMPTS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `smollm2`."""
    parser.add_argument(
        "step", choices=STEPS, help="prepare: let the model write; train: the drafter; evaluate: on held-out prompts"
    )
    parser.add_argument(
        "--folder", default="smollm2-run", metavar="DIR", help="of data, checkpoints and results (%(default)s)"
    )
    parser.add_argument(
        "--shards", type=int, default=32, metavar="N", help="prepare: shards of 256 answers (%(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, metavar="M", help="train: of training in all (%(default)s)"
    )
    parser.add_argument(
        "--markov-rank", type=int, default=64, metavar="R", help="train: 0 is the parallel-only twin (%(default)s)"
    )
    parser.add_argument(
        "--name", default="drafter", metavar="NAME", help="train, evaluate: subfolder of the drafter (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="T", help="of torch; 0 leaves its choice")
    parser.add_argument("--device", default="cpu", metavar="D", help="prepare, train: cpu or cuda (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and training (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run a step and return 0."""
    if args.shards < 1:
        raise ValueError(f"--shards: got {args.shards}, expected 1 or more")
    if not args.minutes > 0:
        raise ValueError(f"--minutes: got {args.minutes}, expected a positive number")
    if args.markov_rank < 0:
        raise ValueError(f"--markov-rank: got {args.markov_rank}, expected 0 (parallel only) or more")
    if args.threads > 0:
        torch.set_num_threads(args.threads)
    from dsspark.smollm2.model import load_smollm2

    if args.device not in ("cpu", "cuda") or (args.device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device: got {args.device!r}, expected cpu, or cuda where there is a GPU; leave it out")
    device = "cpu" if args.step == "evaluate" else args.device
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(args.folder)
    {"prepare": _prepare, "train": _train, "evaluate": _evaluate}[args.step](
        args, load_smollm2(device), folder, console
    )
    return 0


def _prepare(args: argparse.Namespace, smollm2: Any, folder: Path, console: Console) -> None:
    from dsspark.smollm2.generation import Plan, generate_held_out, generate_shards

    plan = Plan(shards=args.shards, seed=args.seed)
    generate_held_out(folder / "held-out", smollm2, HELD_OUT_PROMPTS, plan.max_new_tokens, console)
    generate_shards(folder / "train", smollm2, plan, console)


def _train(args: argparse.Namespace, smollm2: Any, folder: Path, console: Console) -> None:
    from dsspark.smollm2.drafter import save_drafter
    from dsspark.smollm2.generation import load_answers
    from dsspark.smollm2.training import Shards, TrainingPlan, train_drafter

    plan = TrainingPlan(minutes=args.minutes, markov_rank=args.markov_rank, seed=args.seed)
    held_out = {path.stem: load_answers(path) for path in sorted((folder / "held-out").glob("*.safetensors"))}
    shards = Shards(folder / "train")
    drafter, history = train_drafter(smollm2.model, shards, held_out, folder / args.name, plan, console)
    provenance = {"training": {**vars(plan), "answers": len(shards.answers)}, "last": history[-1]}
    save_drafter(folder / args.name, drafter, provenance)
    console.print(f"{folder / args.name} has the drafter; measure it with `python -m dsspark smollm2 evaluate`")


def _evaluate(args: argparse.Namespace, smollm2: Any, folder: Path, console: Console) -> None:
    from dsspark.smollm2.drafter import load_drafter, save_drafter
    from dsspark.smollm2.evaluation import evaluate

    drafter, provenance = load_drafter(folder / args.name, smollm2.model)
    results = evaluate(smollm2, drafter, HELD_OUT_PROMPTS, console)
    save_drafter(folder / args.name, drafter, provenance | {"evaluation": results})
    (folder / args.name / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

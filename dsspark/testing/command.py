"""`python -m dsspark audit`: is a sampler, a scheduler or a source of noise lossless?

    python -m dsspark audit my_engine.sampling:verify --kind sampler
    python -m dsspark audit dsspark:DelayedScheduler --kind scheduler
    python -m dsspark audit dsspark:Uniforms.from_seeds --kind rng
    python -m dsspark audit --mutants

Exit status 0: lossless, or every mutant killed; 1: a leak, or a mutant that survives.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from dsspark.testing.audit import AuditReport, OutsideSampler, audit_rng, audit_sampler, audit_scheduler
from dsspark.testing.mutants import MUTANTS, healthy_complaints, kill_all
from dsspark.testing.search import require_hypothesis

_CALLED_AS = {
    "sampler": "dsspark.verify(target_logits, batch, draft, uniforms, *, temperature, cell), unless it is an OutsideSampler",
    "scheduler": "f(survival, cost_table) -> lengths, or C(cost_table, block_size).step(survival, request_ids) -> lengths",
    "rng": "f(seeds, rounds, block_size) -> Uniforms",
}
"""How each kind of subject is called."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("subject", nargs="?", metavar="package.module:name", help="what to audit")
    parser.add_argument("--kind", choices=sorted(_CALLED_AS), help="what it is")
    parser.add_argument("--mutants", action="store_true", help="run the kit on its own planted faults instead")
    parser.add_argument("--seed", type=int, default=0, help="of the search for a counterexample (default 0)")
    parser.add_argument("--examples", type=int, help="cases tried a check (default: the audit's own)")
    parser.add_argument(
        "--seeds", type=int, default=5, help="with --mutants: under how many each kill must repeat (default 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Raises:
        ValueError: for arguments that do not belong together, or a subject that cannot be found or called.
        RuntimeError: without Hypothesis.
    """
    if args.mutants:
        if args.subject is not None:
            raise ValueError(
                f"subject: got {args.subject!r} with --mutants, expected one or the other; the mutants are built in"
            )
        return _run_mutants(args.seeds)
    if args.subject is None or args.kind is None:
        raise ValueError(
            "subject, --kind: expected both, as in: dsspark audit my_engine:verify --kind sampler (or --mutants alone)"
        )
    require_hypothesis()
    subject = load(args.subject)
    try:
        report = _audit(args.kind, subject, args)
    except TypeError as error:
        raise ValueError(
            f"subject: {args.subject} failed with {error}; expected to be called as {_CALLED_AS[args.kind]}"
        ) from error
    print(report)
    return 0 if report.passed else 1


def _audit(kind: str, subject: Any, args: argparse.Namespace) -> AuditReport:
    options: dict[str, Any] = {"name": args.subject}
    if kind == "rng":
        return audit_rng(subject, **options)
    options["seed"] = args.seed
    if args.examples is not None:
        options["max_examples"] = args.examples
    return audit_sampler(subject, **options) if kind == "sampler" else audit_scheduler(subject, **options)


def load(path: str) -> Callable[..., Any] | OutsideSampler:
    """Return the object that `package.module:name` (name may have dots) stands for; modules of the current folder count.

    Raises:
        ValueError: if there is no such module or name.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"subject: got {path!r}, expected package.module:name, such as dsspark:schedule")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"subject: got {path!r}, but {module_name} cannot be imported ({error}); run this where it can"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"subject: got {path!r}, but {module_name} has no {name}; check the spelling")
        found = getattr(found, part)
    result: Callable[..., Any] | OutsideSampler = found
    return result


def _run_mutants(num_seeds: int) -> int:
    """Print what became of every mutant, and whether the library without one passes; return the exit status."""
    if num_seeds < 1:
        raise ValueError(f"--seeds: got {num_seeds}, expected 1 or more; a kill has to repeat")
    seeds = range(num_seeds)
    complaints = healthy_complaints(seeds)
    for complaint in complaints:
        print(f"WRONG    the library without a mutant fails: {complaint}")
    killings = []
    for mutant in MUTANTS:
        killings += kill_all(seeds, [mutant])
        verdict = "killed  " if killings[-1].killed else "SURVIVES"
        print(f"{verdict} {mutant.name}  [{mutant.check}]  {killings[-1].complaint}", flush=True)
    killed = sum(killing.killed for killing in killings)
    print(f"killed {killed} of {len(killings)}")
    return 0 if killed == len(killings) and not complaints else 1

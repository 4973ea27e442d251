"""`python -m dsspark simulate`: a serving engine under load, policy by policy, with common random numbers.

    python -m dsspark simulate                                      # V4-Flash-like and V4-Pro-like, closed loop
    python -m dsspark simulate --model v4-flash --sensitivity
    python -m dsspark simulate --cost-table table.json --traces shipped --users 1 4 16
    python -m dsspark simulate --profile --traces shipped --users 1 4 16 32
    python -m dsspark simulate --model v4-flash --users 1024 --rate 100 200 400

Writes simulate.json, simulate.md, points.md and PNG figures into --out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsspark.cost_table import CostTable
from dsspark.serving import assumptions, plots, report
from dsspark.serving.acceptance import Parametric, RoundPool, load_traces, parametric_pools
from dsspark.serving.experiment import (
    BASELINE,
    POLICIES,
    SUBJECT,
    Load,
    System,
    best_at_speed,
    match,
    measured_system,
    roofline_system,
    run_point,
    verdicts,
)
from dsspark.serving.report import SystemReport
from dsspark.serving.sensitivity import VARIANTS, run_sensitivity
from dsspark.serving.simulated import make_policy
from dsspark.serving.simulator import Outcome

DEFAULT_USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHIPPED_TRACES = Path(__file__).resolve().parent / "traces" / "shipped.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model", nargs="+", choices=sorted(assumptions.MODELS), help="rooflines to simulate (default both)"
    )
    engine.add_argument("--cost-table", metavar="FILE", help="a measured CostTable instead of a roofline")
    engine.add_argument(
        "--profile", action="store_true", help="measure the shipped models on this machine and simulate those"
    )
    engine.add_argument("--block-size", type=int, default=5, help="gamma of the DSpark-like drafter (default 5)")
    engine.add_argument(
        "--traces", metavar="FILE", help='measured rounds, or "shipped"; the parametric model if left out'
    )
    engine.add_argument(
        "--policies", nargs="+", default=list(POLICIES), metavar="NAME", help=f"default: {' '.join(POLICIES)}"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--users", nargs="+", type=int, default=list(DEFAULT_USERS), help="of a closed loop, one point each"
    )
    load.add_argument(
        "--rate", nargs="+", type=float, help="requests a second of a Poisson process; --users is then the places"
    )
    load.add_argument("--requests", type=int, help="of each point (default 4 a user, at least 400)")
    load.add_argument(
        "--prompt-tokens", type=float, default=assumptions.PROMPT_TOKENS.value, help="mean (default 1024)"
    )
    load.add_argument("--output-tokens", type=float, default=assumptions.OUTPUT_TOKENS.value, help="mean (default 200)")
    load.add_argument(
        "--output-spread", choices=("exponential", "fixed"), default="exponential", help="of the output length"
    )
    load.add_argument("--mix", help="shares of the domains, such as math=1,code=1,chat=2 (default equal)")
    load.add_argument("--seed", type=int, default=0, help="of requests and rounds (default 0)")
    parser.add_argument(
        "--target-speed", type=float, metavar="TOKENS", help="report the throughput at this speed of a user"
    )
    parser.add_argument("--sensitivity", action="store_true", help="repeat the comparison with each assumption moved")
    parser.add_argument(
        "--out", type=Path, default=Path("simulate-output"), help="folder to write (default simulate-output)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Raises:
        ValueError: for arguments that do not belong together, a bad table or traces, or a target that cannot be reached.
        RuntimeError: without Matplotlib.
    """
    started = time.perf_counter()
    loads = _loads(args)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out: got {str(args.out)!r}, which is a file, expected a folder")
    plots.new_figure()  # without Matplotlib, say so before an hour of simulation
    pools = _pools(args)
    known = dict.fromkeys(("none", "mtp", "dspark"), CostTable([1.0, 1.0]))
    for name in args.policies:
        make_policy(name, known)  # type: ignore[arg-type]
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    systems = []
    for key, system in _systems(args, pools, max(load.users for load in loads), console):
        systems.append(_one(args, key, system, loads, console))
    settings = {
        name: value for name, value in vars(args).items() if isinstance(value, (str, int, float, list, type(None)))
    }
    seconds = time.perf_counter() - started
    report.write_json(args.out / "simulate.json", systems, settings, seconds)
    (args.out / "simulate.md").write_text(report.markdown(systems), encoding="utf-8")
    (args.out / "points.md").write_text(report.points_markdown(systems), encoding="utf-8")
    console.print(f"{seconds:.0f} s; wrote {args.out / 'simulate.json'}, simulate.md and the figures", soft_wrap=True)
    return 0


def _loads(args: argparse.Namespace) -> list[Load]:
    if min(args.users) < 1 or len(set(args.users)) != len(args.users):
        raise ValueError(f"--users: got {args.users}, expected distinct numbers of 1 or more")
    if args.requests is not None and args.requests < 1:
        raise ValueError(f"--requests: got {args.requests}, expected 1 or more")
    if args.rate is not None and len(args.users) != 1:
        raise ValueError(
            f"--rate: got it with {len(args.users)} numbers of --users, expected one, the places in the batch; add e.g. --users 1024"
        )
    load = Load(
        users=args.users[0],
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        output_spread=args.output_spread,
        mix=_mix(args.mix),
        seed=args.seed,
    )
    if args.rate is not None:
        return [replace(load, rate=rate) for rate in sorted(args.rate)]
    return [replace(load, users=users) for users in sorted(args.users)]


def _mix(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        return {name.strip(): float(share) for name, _, share in (part.partition("=") for part in text.split(","))}
    except ValueError as error:
        raise ValueError(f"--mix: got {text!r}, expected shares such as math=1,code=1,chat=2") from error


def _pools(args: argparse.Namespace) -> tuple[RoundPool, RoundPool]:
    if not 1 <= args.block_size <= 32:
        raise ValueError(f"--block-size: got {args.block_size}, expected 1 to 32")
    if args.traces is None:
        return parametric_pools(Parametric.stated(), args.block_size, seed=args.seed)
    pool = load_traces(SHIPPED_TRACES if args.traces == "shipped" else args.traces)
    return pool.first(args.block_size), pool.first(1)


def _systems(
    args: argparse.Namespace, pools: tuple[RoundPool, RoundPool], users: int, console: Console
) -> Iterator[tuple[str, System]]:
    """Yield (key, system) for everything asked for."""
    if sum(map(bool, (args.model, args.cost_table, args.profile))) > 1:
        raise ValueError("--model, --cost-table, --profile: got more than one, expected one of them")
    if args.cost_table or args.profile:
        table = CostTable.load(args.cost_table) if args.cost_table else _profiled(args, console)
        name = Path(args.cost_table).stem if args.cost_table else "shipped models on this machine"
        yield "measured", measured_system(table, pools, max_requests=users, name=name)
        return
    for key in args.model or assumptions.MODELS:
        context = args.prompt_tokens + args.output_tokens / 2
        yield key, roofline_system(assumptions.MODELS[key], pools, max_requests=users, context=context)


def _profiled(args: argparse.Namespace, console: Console) -> CostTable:
    from dsspark.serving.profiling import DEFAULT_SIZES, profile_shipped

    repeats = 7
    with _bar(console, "profiling the shipped models", len(DEFAULT_SIZES) * (repeats + 1)) as bar:
        table = profile_shipped(repeats=repeats, on_step=lambda: bar(1))
    table.save(args.out / "cost_table.json")
    table.plot(args.out / "cost_table.png", title="Whole steps of the shipped models")
    return table


@contextmanager
def _bar(console: Console, text: str, total: int) -> Iterator[_Advance]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield _Advance(progress, task)


class _Advance:
    """Move a progress bar on."""

    def __init__(self, progress: Progress, task: object) -> None:
        self.progress, self.task = progress, task

    def __call__(self, steps: int) -> None:
        self.progress.advance(self.task, steps)  # type: ignore[arg-type]


def _one(args: argparse.Namespace, key: str, system: System, loads: Sequence[Load], console: Console) -> SystemReport:
    """Simulate one system, draw it and print it."""
    curves: dict[str, list[Outcome]] = {}
    with _bar(console, f"{system.name}: requests", sum(load.count for load in loads) * len(args.policies)) as bar:
        for policy in args.policies:
            curves[policy] = [run_point(system, load, policy, bar) for load in loads]
    found = SystemReport(
        name=system.name,
        curves=curves,
        sources=assumptions.all_sources(assumptions.MODELS[key])
        if key in assumptions.MODELS
        else dict(system.costs["dspark"].table.provenance),
    )
    if BASELINE in curves and SUBJECT in curves:
        found = replace(found, matches=match(curves[BASELINE], curves[SUBJECT]))
    paper = assumptions.PAPER_SPEEDUP.get(key), assumptions.PAPER_THROUGHPUT_GAIN.get(key)
    found = replace(found, verdicts=verdicts(curves, found.matches, *paper))
    if args.target_speed is not None:
        found = replace(found, at_speed=best_at_speed(curves, args.target_speed))
    if args.sensitivity and key in assumptions.MODELS and args.traces is None:
        with _bar(console, f"{system.name}: sensitivity", len(VARIANTS)) as bar:
            swept = run_sensitivity(
                assumptions.MODELS[key], block_size=args.block_size, seed=args.seed, on_variant=lambda: bar(1)
            )
        found = replace(found, sensitivity=swept)
    plots.figure_7(curves, system.name, args.out / f"{key}_figure7.png")
    plots.figure_8(curves, system.name, args.out / f"{key}_figure8.png")
    _draw_staircase(system, loads, args.out / f"{key}_staircase.png")
    _print(found, console)
    return found


def _draw_staircase(system: System, loads: Sequence[Load], path: Path) -> None:
    """Draw one step of the middle load."""
    pool, table = system.pools["dspark"], system.costs["dspark"].table
    users = min(loads[len(loads) // 2].users, table.max_tokens)
    rows = pool.survival.reshape(-1, pool.block_size)
    survival = rows[:: max(1, len(rows) // users)][:users]
    plots.figure_staircase(survival, table, f"{system.name}: one step of {len(survival)} requests", path)


def _print(found: SystemReport, console: Console) -> None:
    table = Table(title=f"{found.name} (simulated)", box=box.SIMPLE, pad_edge=False)
    for name in ("R", "policy", "tok/s", "/user", "1 + l", "a round", "waste", "p50 ms", "p95 ms"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in report.outcome_rows(found.curves):
        table.add_row(*row)
    console.print(table)
    console.print(report.markdown([found]), markup=False, highlight=False, soft_wrap=True)

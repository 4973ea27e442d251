"""`python -m dsspark compile`: compile every kernel in every variant a launcher can choose, without a GPU, and inspect the result.

It fails on a variant that does not compile, spills on sm_90, multiplies in tf32, asks for more shared memory than there is, or
loads a vocabulary-sized operand in less than 16 bytes where sizes and strides are multiples of 16, finds a row by a product of 32
bits, or has an instruction that waits for another program.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import pkgutil
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import dsspark.kernels
from dsspark.kernels.compile_worker import Job
from dsspark.kernels.inspection import SHARED_LIMITS, Report

if TYPE_CHECKING:
    from dsspark.kernels.launch import Variant

ARCHITECTURES = tuple(SHARED_LIMITS)


def kernel_variants(component: str | None = None) -> list[Variant]:
    """Return the variants of every module in `dsspark.kernels`, or of one component.

    Raises:
        ValueError: for a component that has no kernels, or two variants of one name.
        RuntimeError: where Triton is not installed.
    """
    _triton_version()
    listed = {}
    for module in pkgutil.iter_modules(dsspark.kernels.__path__):
        if component in (None, module.name):
            offer = getattr(importlib.import_module(f"dsspark.kernels.{module.name}"), "variants", None)
            if offer is not None:
                listed[module.name] = offer()
    if component is not None and component not in listed:
        raise ValueError(f"component: got {component!r}, expected a module of dsspark.kernels that has kernels")
    found = [variant for name in sorted(listed) for variant in listed[name]]
    names = [variant.name for variant in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"variants: got {repeated} more than once, expected distinct names")
    return found


def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError as error:
        raise RuntimeError("triton: not installed, expected it to compile kernels; install triton (Linux)") from error
    return str(triton.__version__)


def one_per_kernel(variants: Sequence[Variant]) -> list[Variant]:
    """Return the first variant listed of each kernel."""
    first: dict[int, Variant] = {}
    for variant in variants:
        first.setdefault(id(variant.kernel), variant)
    return list(first.values())


def compile_variants(
    variants: Sequence[Variant],
    arch: str | Sequence[str] = "sm_90",
    *,
    jobs: int = 2,
    cache: str | None = None,
    on_report: Callable[[Report], object] | None = None,
) -> list[Report]:
    """Compile variants ahead of time, in processes of their own, without a GPU.

    The kernels may have been decorated for the interpreter here: the processes import their modules again, without it.

    Args:
        variants: what to compile; each kernel must be an attribute of the module that defines it.
        arch: one or several of `ARCHITECTURES`.
        jobs: how many processes.
        cache: a folder where Triton keeps what it has compiled, by a key of all that it depends on; None for a temporary one.
        on_report: called with each report as it comes, from any thread.

    Returns:
        A report for each variant and architecture, architectures outermost, in the given order.

    Raises:
        ValueError: for an architecture that is not listed.
    """
    archs = [arch] if isinstance(arch, str) else list(arch)
    unknown = sorted(set(archs) - set(ARCHITECTURES))
    if unknown:
        raise ValueError(f"arch: got {unknown}, expected some of {', '.join(ARCHITECTURES)}")
    tasks = [_job(variant, name) for name in archs for variant in variants]
    reports: list[Report | None] = [None] * len(tasks)
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tasks)):
        pending.put(index)
    with tempfile.TemporaryDirectory(prefix="dsspark-compile-") as temporary:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # Lines of the source in the binary take time and change no instruction.
        environment |= {"TRITON_CACHE_DIR": os.path.abspath(cache or temporary), "TRITON_DISABLE_LINE_INFO": "1"}
        workers = [_Worker(environment) for _ in range(min(jobs, len(tasks)))]
        threads = [
            threading.Thread(target=_drain, args=(worker, tasks, pending, reports, on_report), daemon=True)
            for worker in workers
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for worker in workers:
                worker.stop()
    if any(report is None for report in reports):
        raise RuntimeError(
            "compile: a thread that feeds the compiling processes died, expected a report for every variant"
        )
    return [report for report in reports if report is not None]


def _drain(
    worker: _Worker,
    tasks: Sequence[Job],
    pending: queue.SimpleQueue[int],
    reports: list[Report | None],
    on_report: Callable[[Report], object] | None,
) -> None:
    """Let one process compile until nothing is pending."""
    while True:
        try:
            index = pending.get_nowait()
        except queue.Empty:
            return
        report = worker.compile(tasks[index])
        reports[index] = report
        if on_report is not None:
            on_report(report)


class _Worker:
    """A compiling process, replaced when the compiler takes it down."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def compile(self, job: Job) -> Report:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsspark.kernels.compile_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
            )
        to_process: Any = self.process.stdin
        try:
            pickle.dump(job, to_process)
            to_process.flush()
            report: Report = pickle.load(self.process.stdout)  # type: ignore[arg-type]
        except (EOFError, BrokenPipeError):
            status = self.process.wait()
            self.stop()
            problem = f"does not compile: the compiling process died with status {status}"
            return Report(variant=job.variant, arch=job.arch, problems=(problem,))
        return report

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None


def _job(variant: Variant, arch: str) -> Job:
    function = getattr(variant.kernel, "fn", variant.kernel)
    return Job(
        variant=variant.name,
        module=function.__module__,
        path=function.__code__.co_filename,
        function=function.__name__,
        signature=variant.signature,
        constexprs=variant.constexprs,
        aligned=variant.aligned,
        wide_loads=variant.wide_loads,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        arch=arch,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m dsspark compile`."""
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), help="default: all")
    parser.add_argument("--component", metavar="NAME", help="only one module of dsspark.kernels")
    parser.add_argument("--one-per-kernel", action="store_true", help="only the first variant of each kernel")
    parser.add_argument("--jobs", type=int, default=2, help="compiling processes (default: 2)")
    parser.add_argument(
        "--cache", metavar="DIR", help="keep what is compiled there, for the next time (default: nowhere)"
    )
    parser.add_argument("--brief", action="store_true", help="print problems and sums only")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")


def run(args: argparse.Namespace) -> int:
    """Compile, print, and return 1 if a report has a problem."""
    if args.jobs < 1:
        raise ValueError(f"--jobs: got {args.jobs}, expected at least 1")
    variants = kernel_variants(args.component)
    if args.one_per_kernel:
        variants = one_per_kernel(variants)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("compiling", total=len(variants) * len(args.arch))
        reports = compile_variants(
            variants, args.arch, jobs=args.jobs, cache=args.cache, on_report=lambda report: progress.advance(bar)
        )
    failed = sum(1 for report in reports if report.problems)
    if args.json:
        summary = {"triton": _triton_version(), "compiled": len(reports), "failed": failed}
        print(json.dumps({**summary, "reports": [asdict(report) for report in reports]}, indent=1))
    else:
        _print(reports, brief=args.brief)
    return 1 if failed else 0


def _print(reports: Sequence[Report], *, brief: bool = False) -> None:
    """Print a table of all reports, unless `brief`, then the problems, then what each architecture took."""
    console = Console()
    if not console.is_terminal:
        console.width = 200
    if not brief:
        console.print(_table(reports))
    for report in reports:
        for problem in report.problems:
            console.print(f"{report.variant} on {report.arch}: {problem}", style="red", markup=False, highlight=False)
    for arch in dict.fromkeys(report.arch for report in reports):
        mine = [report for report in reports if report.arch == arch]
        seconds, spilling = sum(report.seconds for report in mine), sum(1 for report in mine if report.spilled_bytes)
        console.print(
            f"{arch}: {len(mine)} variants in {seconds:.0f} processor seconds, {spilling} spill", highlight=False
        )
    failed = sum(1 for report in reports if report.problems)
    console.print(f"{len(reports)} compiled with Triton {_triton_version()}, {failed} with a problem", highlight=False)


def _table(reports: Sequence[Report]) -> Table:
    table = Table("variant", "arch", "registers", "spilled", "shared", "bytes a load, by pointer")
    for report in reports:
        loads = "  ".join(f"{name} {'/'.join(str(w) for w in widths)}" for name, widths in report.loads.items())
        numbers = (str(n) for n in (report.registers, report.spilled_bytes, report.shared_bytes))
        table.add_row(report.variant, report.arch, *numbers, loads, style="red" if report.problems else None)
    return table

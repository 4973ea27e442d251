"""One timed benchmark: parity first, then the clock, then what else belongs beside it."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cases import COMPETENT, COMPILED, KERNEL, PUBLIC, REFERENCE, Case, Contender, copied
from benchmarks.eager import count_eager
from benchmarks.peers import peers_of
from benchmarks.sizes import Size, sizes
from benchmarks.tasks import TASKS
from benchmarks.tasks_round import whole_round

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPH = ", CUDA graph"
_ROUNDS = 5
"""Timed calls a laptop makes of each contender."""
TIMED = {**TASKS, "round": ("round", whole_round)}
_L2_BYTES = 256 << 20
"""Written between two timed calls on a GPU: more than any second-level cache, so that nothing of the call before is left in it."""
_EVENTS, _EVENT_SECONDS = 50, 0.3
"""Timed calls on a GPU: so many, or as many as take so long, but 5 at least."""
_COMPILED_TASKS = ("confidence", "scheduler", "verification, pack")
"""Tasks whose reference a laptop compiles within seconds."""
_COMPILED_REQUESTS = 32
"""The size at which a GPU compiles every reference but those that read values: one, for a size takes half a minute."""
MEASURED = Path(__file__).parents[1] / ".benchmarks" / "measured.jsonl"
"""A line for each measurement as it is made, for pytest-benchmark writes its file at the end: a run that is cut short is not lost."""


def points(task: str) -> list[Any]:
    """Return pytest parameters (size, contender) of a task on this machine; what cannot run here says why."""
    component, _ = TIMED[task]
    names = [REFERENCE] if task == "round" else [REFERENCE, COMPILED, PUBLIC, COMPETENT]
    found = []
    for size in sizes(component, DEVICE):
        for name in names if DEVICE == "cpu" else [*names, KERNEL, KERNEL + GRAPH]:
            reason = _reason(task, size, name)
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            if not reason or "no C++" in reason:
                found.append(pytest.param(size, name, id=f"{size.label}-{name}", marks=marks))
    for peer in peers_of(task):
        for size in sizes(component, DEVICE) if peer.reason is None else [None]:
            marks = [] if peer.reason is None else [pytest.mark.skip(reason=peer.reason)]
            found.append(pytest.param(size, peer.name, id=f"{size.label if size else 'any'}-{peer.name}", marks=marks))
    return found


def _reason(task: str, size: Size, name: str) -> str | None:
    """Return why a contender does not run here, or None."""
    if task == "calibration" and name in (COMPILED, KERNEL + GRAPH):
        return "the fit reads values on the host"
    if name == COMPILED:
        if DEVICE == "cpu" and (task not in _COMPILED_TASKS or size != sizes(TIMED[task][0], DEVICE)[-1]):
            return "compiles too long for a laptop"
        if DEVICE == "cuda" and size != next(
            s for s in sizes(TIMED[task][0], DEVICE) if s.num_requests == _COMPILED_REQUESTS
        ):
            return f"compiled at R = {_COMPILED_REQUESTS} only"
        if shutil.which("g++") is None and shutil.which("clang++") is None:
            return "no C++ compiler for torch.compile"
    return None


@functools.lru_cache(maxsize=1)
def case_of(task: str, size: Size) -> Case:
    """Return a case; one at a time is kept, for the largest take gigabytes."""
    return TIMED[task][1](size, DEVICE)


def rotated(case: Case) -> list[SimpleNamespace]:
    """Return the inputs, on a GPU and where they are small with a copy, so that no call meets what the last one left in a cache."""
    if DEVICE == "cpu" or case.floor_bytes > _L2_BYTES:
        return [case.inputs]
    return [case.inputs, copied(case.inputs)]


@functools.cache
def _flushed() -> torch.Tensor:
    return torch.empty(_L2_BYTES, dtype=torch.uint8, device="cuda")


@functools.cache
def copy_bandwidth(device: str, entries: int = 0) -> float:
    """Return bytes a second of copying a large tensor on this device, measured now: what a share of bandwidth is a share of."""
    source = torch.ones(entries or (1 << 28 if device == "cuda" else 1 << 25), device=device)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), device) for _ in range(7)]
    return 2 * source.numel() * source.element_size() / statistics.median(seconds[2:])


def timed(run: Any, device: str) -> float:
    """Return the seconds of a call; on a GPU by events, so that launching it from the host does not count."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _flushed().zero_()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def captured(run: Any, inputs: list[SimpleNamespace]) -> list[Any]:
    """Return replays of one CUDA graph an input, after a warm-up on a side stream."""
    stream, replays = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs[0])
    torch.cuda.current_stream().wait_stream(stream)
    for entry in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(entry)
        replays.append(graph.replay)
    return replays


def _launches(run: Any) -> int:
    """Return how many kernels a call launches on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return len([event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA])


def _facts(case: Case, name: str, run: Any) -> dict[str, Any]:
    """Return bytes, launches and peak memory of one call."""
    facts: dict[str, Any] = {"floor_bytes": case.floor_bytes, **case.facts}
    if name not in (COMPILED, KERNEL, KERNEL + GRAPH):
        with count_eager() as eager:
            run()
        facts |= {"moved_bytes": eager.total, "launches": eager.operations, "peak_bytes": eager.peak}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        facts |= {"peak_bytes": torch.cuda.max_memory_allocated() - before, "launches": _launches(run)}
    return facts


def device_times(turns: Any) -> tuple[float, list[float]]:
    """Return the median seconds by device events, and their quartiles."""
    events: list[float] = []
    while len(events) < 5 or (len(events) < _EVENTS and sum(events) < _EVENT_SECONDS):
        events.append(timed(next(turns), DEVICE))
    return statistics.median(events), statistics.quantiles(events, n=4)[::2]


def _contender(case: Case, task: str, name: str) -> Contender:
    """Return a contender that agrees with the reference, or skip where a peer does not, or cannot be called."""
    peer = next((peer for peer in peers_of(task) if peer.name == name), None)
    if peer is None:
        case.check(name.removesuffix(GRAPH))
        return case.contenders[name.removesuffix(GRAPH)]
    try:
        peer.check(case)
        return peer.prepare(case)
    except Exception as error:  # whatever another package raises must not cost the rest of the run
        pytest.skip(f"{type(error).__name__}: {error}")


def _record(facts: dict[str, Any]) -> None:
    MEASURED.parent.mkdir(exist_ok=True)
    with MEASURED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def measure(benchmark: Any, task: str, size: Size, name: str) -> None:
    """Check a contender, time it, and record what it moved."""
    case = case_of(task, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile warns of what it does not fuse
        run = _contender(case, task, name).run
        inputs = rotated(case)
        runs = captured(run, inputs) if name.endswith(GRAPH) else [functools.partial(run, entry) for entry in inputs]
        facts = _facts(case, name, runs[0])
        turns = itertools.cycle(runs)

        def call() -> None:
            next(turns)()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark.group = f"{task}, {size.label}"
        benchmark.name = f"{name} [{size.label}]"
        if DEVICE == "cpu":
            benchmark.pedantic(call, rounds=_ROUNDS, warmup_rounds=1)
            seconds, spread = benchmark.stats.stats.median, [benchmark.stats.stats.q1, benchmark.stats.stats.q3]
        else:
            benchmark(call)
            seconds, spread = device_times(turns)
    bandwidth = case.floor_bytes / seconds
    benchmark.extra_info.update(
        task=task,
        size=size.label,
        contender=name,
        device_seconds=seconds,
        device_spread=spread,
        floor_bandwidth=bandwidth,
        share_of_copy=bandwidth / copy_bandwidth(DEVICE),
        **facts,
    )
    _record(benchmark.extra_info)

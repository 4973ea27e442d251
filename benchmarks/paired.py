"""Ratios of two ways to do one task, from pairs of calls made one after the other: a busy machine slows both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What pairs of calls took.

    Attributes:
        ours, theirs: median seconds on the wall clock.
        ratio: median of theirs / ours, pair by pair.
        low, high: the quartiles of those ratios.
        cpu_ratio: the same median from processor time, which other processes do not disturb.
    """

    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def paired(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    pairs: int = 7,
    timed: Callable[[Callable[[], object]], tuple[float, float]] = _timed,
) -> Paired:
    """Time both in turn, the first to go changing from pair to pair, after one call each that does not count.

    Args:
        ours: one way.
        theirs: the other.
        pairs: how many, 2 or more.
        timed: returns the wall and processor seconds of a call.
    """
    if pairs < 2:
        raise ValueError(f"pairs: got {pairs}, expected 2 or more; one pair has no spread")
    ours()
    theirs()
    times = []
    for index in range(pairs):
        if index % 2:
            second, first = timed(theirs), timed(ours)
        else:
            first, second = timed(ours), timed(theirs)
        times.append((first, second))
    ratios = [second[0] / first[0] for first, second in times]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Paired(
        ours=statistics.median(first[0] for first, _ in times),
        theirs=statistics.median(second[0] for _, second in times),
        ratio=median,
        low=low,
        high=high,
        cpu_ratio=statistics.median(second[1] / max(first[1], 1e-9) for first, second in times),
    )

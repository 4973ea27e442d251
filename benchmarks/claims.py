"""What the references must be on a CPU, measured in one run: ratios to the eager baselines at the sizes the claims are made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from benchmarks.cases import COMPETENT, PUBLIC, REFERENCE, Case
from benchmarks.eager import count_eager
from benchmarks.paired import paired
from benchmarks.sizes import Size
from benchmarks.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The reference of `task` is at least `ratio` times as fast as `other` at `size`.

    Attributes:
        memory: the largest share of the other's peak memory that it may take; None says nothing.
        pairs: how many pairs of calls.
        same: whether both must return the very same numbers, beyond the parity that every contender is checked for.
    """

    task: str
    other: str
    ratio: float
    size: Size
    memory: float | None = None
    pairs: int = 7
    same: bool = False


_BLOCK = Size(num_requests=64)

CLAIMS = (
    Claim(task="markov", other=PUBLIC, ratio=6.0, size=_BLOCK, pairs=5),
    Claim(task="markov", other=COMPETENT, ratio=1.2, size=_BLOCK),
    Claim(task="rejection", other=PUBLIC, ratio=2.5, size=_BLOCK, memory=0.5),
    Claim(task="rejection", other=COMPETENT, ratio=1.0, size=_BLOCK),
    Claim(task="calibration", other=PUBLIC, ratio=2.5, size=Size(num_requests=1, samples=200_000), pairs=5, same=True),
    Claim(task="scheduler", other=COMPETENT, ratio=1.0, size=Size(num_requests=1024, block_size=16), pairs=101),
)


def peak_memory(case: Case, name: str) -> int:
    """Return the most bytes that a contender holds at once, inputs apart."""
    with count_eager() as eager:
        case.contenders[name].run(case.inputs)
    return eager.peak


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(claim: Claim) -> dict[str, object]:
    """Check parity, time the pairs with torch's own number of threads and with one, count the memory; the record of one claim."""
    case = TASKS[claim.task][1](claim.size, "cpu")
    case.check(claim.other)
    runs = [lambda name=name: case.contenders[name].run(case.inputs) for name in (REFERENCE, claim.other)]
    if claim.same and not torch.equal(*(run() for run in runs)):
        raise AssertionError(f"{claim.task}: {REFERENCE} and {claim.other} do not return the same numbers")
    times = paired(*runs, pairs=claim.pairs)
    with one_thread():
        alone = paired(*runs, pairs=max(3, claim.pairs // 2))
    memory = None if claim.memory is None else peak_memory(case, REFERENCE) / peak_memory(case, claim.other)
    holds = times.ratio >= claim.ratio and (claim.memory is None or memory is None or memory < claim.memory)
    return {
        "task": claim.task,
        "size": claim.size.label if claim.task != "calibration" else f"{claim.size.samples} samples",
        "other": claim.other,
        "claimed": claim.ratio,
        "claimed_memory": claim.memory,
        "holds": holds,
        "memory": memory,
        "pairs": claim.pairs,
        **asdict(times),
        "threads": torch.get_num_threads(),
        "one_thread": alone.ratio,
        **case.facts,
    }


def measure_all() -> Iterator[dict[str, object]]:
    """Measure every claim, one after the other."""
    for claim in CLAIMS:
        yield measure(claim)

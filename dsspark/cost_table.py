"""How fast the engine steps at each batch size: the cost table of the scheduler (paper 3.2.2 and 5.2)."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_FLAT = 1.05
"""A curve whose slowest size takes at most this many times its fastest is called flat."""


@dataclass(frozen=True, eq=False, init=False)
class CostTable:
    """Engine steps per second at every number of batch tokens B (paper 3.2.2: SPS(B), profiled once).

    Attributes:
        sps: [max_tokens + 1] float64, steps per second at B = 0..max_tokens; given as a tensor or a sequence. Entry 0
            is present but never read with R >= 1 (no step runs without tokens): 0 is fine there, and a value that is
            not finite is replaced by entry 1. Flat is allowed: it says that drafts are free.
        provenance: where the numbers come from (machine, model, date), saved with them.

    Raises:
        ValueError: for fewer than two entries, or one past entry 0 that is not a positive finite number.
        TypeError: for a provenance that is no mapping of str to str.

    Example:
        >>> table = CostTable([1.0, 1.0, 0.5, 0.45])  # paper Appendix A
        >>> table.max_tokens, table.seconds.tolist()[2]
        (3, 2.0)
    """

    sps: Tensor
    provenance: Mapping[str, str]

    def __init__(self, sps: Tensor | Sequence[float], provenance: Mapping[str, str] | None = None) -> None:
        given = sps.detach() if isinstance(sps, Tensor) else torch.tensor(sps, dtype=torch.float64)
        rates = given.to(torch.float64, copy=True)
        if rates.dim() != 1 or rates.shape[0] < 2:
            raise ValueError(
                f"sps: got shape {list(rates.shape)}, expected [max_tokens + 1] with max_tokens >= 1; "
                "entry B is the rate at B tokens"
            )
        _check_positive(
            "sps[1:]", rates[1:].tolist(), "profile the engine again, or leave the sizes that failed out of from_points"
        )
        rates[0] = torch.where(rates[0].isfinite(), rates[0], rates[1])
        if not bool(rates[0] >= 0):
            raise ValueError(f"sps[0]: got {rates[0].item()}, expected 0 or more; it is never read, so 0 will do")
        provenance = {} if provenance is None else dict(provenance)
        if not all(isinstance(text, str) for pair in provenance.items() for text in pair):
            raise TypeError(
                "provenance: got an entry that is no str, expected a mapping of str to str; convert it with str(...)"
            )
        object.__setattr__(self, "sps", rates)
        object.__setattr__(self, "provenance", provenance)

    @property
    def seconds(self) -> Tensor:
        """Seconds a step takes at B = 0..max_tokens, [max_tokens + 1] float64."""
        return 1.0 / self.sps

    @property
    def max_tokens(self) -> int:
        """The largest B the table knows; the scheduler admits nothing beyond it."""
        return int(self.sps.shape[0]) - 1

    def to(self, device: torch.device | str) -> CostTable:
        """Return the table on another device."""
        return self if self.sps.device == torch.device(device) else CostTable(self.sps.to(device), self.provenance)

    @classmethod
    def from_points(
        cls,
        sizes: Sequence[int],
        seconds: Sequence[float],
        *,
        graph_limit: int | None = None,
        provenance: Mapping[str, str] | None = None,
    ) -> CostTable:
        """Build the staircase of an engine that pads every batch up to the next captured size (paper 5.2).

        Args:
            sizes: the measured B, distinct, 1 or more each, in any order.
            seconds: what a step took at each size, positive.
            graph_limit: the largest size that a graph is captured for, one of `sizes`. Beyond it the engine runs batches as
                they are, so the seconds there are interpolated linearly. None: every size is captured.
            provenance: as the attribute.

        Returns:
            A table up to the largest size: B costs what the smallest size >= B does, B = 0 what the first does; above
            `graph_limit`, what lies between its neighbours.

        Raises:
            ValueError: for no sizes, sizes that repeat or are below 1, lists of different lengths, seconds that are not
                positive and finite, a graph_limit that was not measured.

        Example:
            >>> CostTable.from_points([2, 4], [0.5, 1.0]).seconds.tolist()
            [0.5, 0.5, 0.5, 1.0, 1.0]
            >>> CostTable.from_points([2, 4], [0.5, 1.0], graph_limit=2).seconds.tolist()
            [0.5, 0.5, 0.5, 0.75, 1.0]
        """
        if len(sizes) != len(seconds):
            raise ValueError(
                f"seconds: got {len(seconds)} entries, expected {len(sizes)}, one a size; measure every size"
            )
        _check_sizes(sizes)
        _check_positive(
            "seconds", [float(value) for value in seconds], "measure again with a clock that is fine enough"
        )
        _check_graph_limit(graph_limit, sizes)
        points = sorted(zip(sizes, seconds, strict=True))
        measured = torch.tensor([size for size, _ in points])
        taken = torch.tensor([value for _, value in points], dtype=torch.float64)
        batch_tokens = torch.arange(int(measured[-1]) + 1)
        above = torch.searchsorted(measured, batch_tokens)
        rates = (1.0 / taken)[
            above
        ]  # not 1 / seconds of the interpolation: measured rates stay bitwise what was measured
        if graph_limit is not None:
            below = (above - 1).clamp(min=0)
            share = (batch_tokens - measured[below]) / (measured[above] - measured[below]).clamp(min=1)
            between = 1.0 / (taken[below] + share * (taken[above] - taken[below]))
            rates = torch.where((batch_tokens > graph_limit) & (batch_tokens < measured[above]), between, rates)
        return cls(rates, provenance)

    @classmethod
    def profile(
        cls,
        step: Callable[[int], object],
        sizes: Sequence[int],
        repeats: int = 5,
        *,
        warmup: int = 1,
        graph_limit: int | None = None,
        device: torch.device | str | None = None,
        provenance: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> CostTable:
        """Measure the staircase: the median time of `step` at each size.

        Args:
            step: runs one engine step on B batch tokens; what it returns is dropped.
            sizes: the B to measure, as `from_points`.
            repeats: timed calls a size, 1 or more.
            warmup: calls a size that are not timed, 0 or more.
            graph_limit: as `from_points`.
            device: where the step runs. For a CUDA or ROCm device the clock is read with the device idle; without it an
                asynchronous step would be timed at its launch only.
            provenance: as the attribute; sizes, repeats, graph limit, device, machine, date and torch version are added.
            clock: returns seconds.

        Returns:
            The table of `from_points` over the medians.

        Raises:
            ValueError: for no sizes, sizes that repeat or are below 1, or a median that is not positive and finite.

        Warns:
            UserWarning: when the curve is flat (slowest within 5 % of fastest): the scheduler would verify every draft.
        """
        _check_sizes(sizes)
        _check_graph_limit(graph_limit, sizes)
        if repeats < 1 or warmup < 0:
            raise ValueError(f"repeats, warmup: got {repeats}, {warmup}, expected at least 1 and 0")
        medians = []
        for size in sizes:
            for _ in range(warmup):
                step(size)
            medians.append(statistics.median(_timed(step, size, device, clock) for _ in range(repeats)))
        _check_positive(
            "step", medians, "use a finer clock or a step that does the work, and pass device= if it is asynchronous"
        )
        if max(medians) <= _FLAT * min(medians):
            warnings.warn(
                f"CostTable.profile: the step takes {min(medians):.3g} to {max(medians):.3g} s at every size from "
                f"{min(sizes)} to {max(sizes)}: a flat curve says that drafts are free, and the scheduler will verify "
                "all of them. Profile larger sizes, or pass device= if the step is asynchronous",
                UserWarning,
                stacklevel=2,
            )
        facts = {
            "sizes": " ".join(map(str, sizes)),
            "repeats": str(repeats),
            "graph_limit": str(graph_limit),
            "device": str(device or "cpu"),
            "machine": _machine(device),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "torch": torch.__version__,
        }
        return cls.from_points(sizes, medians, graph_limit=graph_limit, provenance={**facts, **(provenance or {})})

    def plot(self, path: str | Path, *, title: str = "Cost table") -> None:
        """Draw seconds a step and batch tokens a second against B into an image; its suffix chooses the format.

        Raises:
            RuntimeError: without Matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise RuntimeError(
                "CostTable.plot: got no Matplotlib, expected it installed; pip install 'dsspark[plots]'"
            ) from error
        batch_tokens = list(range(1, self.max_tokens + 1))
        seconds = self.seconds[1:].cpu()
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.step(batch_tokens, (1e3 * seconds).tolist(), where="mid")
        left.set(xlabel="batch tokens B", ylabel="milliseconds a step", ylim=(0, None), title=title)
        right.step(batch_tokens, (torch.tensor(batch_tokens) / seconds).tolist(), where="mid")
        right.set(xlabel="batch tokens B", ylabel="batch tokens a second, B SPS(B)", ylim=(0, None))
        figure.savefig(path, dpi=110)

    def save(self, path: str | Path) -> None:
        """Write the table as JSON: {"sps": [...], "provenance": {...}}; floats survive exactly."""
        content = {"sps": self.sps.tolist(), "provenance": dict(self.provenance)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read what `save` wrote.

        Raises:
            ValueError: for a file that is no such JSON, or a table that is not valid.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rates = [float(rate) for rate in content["sps"]]
            provenance = {str(key): str(text) for key, text in content.get("provenance", {}).items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"path: got {str(path)!r}, which is no cost table ({error}), expected JSON with a list 'sps' and an "
                "object 'provenance'; write one with CostTable.save"
            ) from error
        return cls(rates, provenance)


def _timed(
    step: Callable[[int], object], size: int, device: torch.device | str | None, clock: Callable[[], float]
) -> float:
    asynchronous = device is not None and torch.device(device).type == "cuda"
    if asynchronous:
        torch.cuda.synchronize(device)
    start = clock()
    step(size)
    if asynchronous:
        torch.cuda.synchronize(device)
    return clock() - start


def _machine(device: torch.device | str | None) -> str:
    """Return the name of what runs the step."""
    if device is not None and torch.device(device).type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _check_graph_limit(graph_limit: int | None, sizes: Sequence[int]) -> None:
    if graph_limit is not None and graph_limit not in sizes:
        raise ValueError(
            f"graph_limit: got {graph_limit}, expected one of the sizes {sorted(sizes)}; measure it, or leave it out"
        )


def _check_sizes(sizes: Sequence[int]) -> None:
    if len(sizes) == 0:
        raise ValueError("sizes: got none, expected at least one batch size; measure from R up to R (1 + gamma)")
    if min(sizes) < 1 or len(set(sizes)) != len(sizes):
        raise ValueError(f"sizes: got {list(sizes)}, expected distinct batch sizes of 1 or more; drop the others")


def _check_positive(name: str, values: Sequence[float], remedy: str) -> None:
    for index, value in enumerate(values):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}: got {value} at index {index}, expected positive finite numbers; {remedy}")

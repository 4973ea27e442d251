"""The results as PNG, one file each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsspark.serving.plots import new_figure
from dsspark.training.corpus import DOMAINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
_STYLE = {
    "mtp-1": ("tab:brown", "x", ":"),
    "eagle3": ("tab:orange", "s", "--"),
    "dflash": ("tab:red", "^", "-."),
    "dspark": ("tab:blue", "o", "-"),
}


def style_of(key: str) -> dict[str, Any]:
    """Return the line style of a drafter's name or key."""
    colour, marker, line = _STYLE.get(key.partition("_")[0], ("tab:gray", "d", ":"))
    return {"color": colour, "marker": marker, "linestyle": line, "markersize": 4, "linewidth": 1.3}


def error_line(
    axes: Axes, x: Sequence[float], statistics: Sequence[Mapping[str, Any] | None], label: str, **style: Any
) -> None:
    """Draw values with their intervals; an entry nobody measured leaves a gap, an unknown interval no bar."""
    values = [math.nan if s is None else s["value"] for s in statistics]
    bars: list[list[float]] = [[], []]
    for s in statistics:
        known = s is not None and s["low"] is not None
        bars[0].append(s["value"] - s["low"] if s is not None and known else 0.0)
        bars[1].append(s["high"] - s["value"] if s is not None and known else 0.0)
    axes.errorbar(x, values, yerr=bars, label=label, capsize=2, **style)


def _panels(width: float, height: float = 3.4, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    figure = new_figure(figsize=(width, height))
    axes = figure.subplots(1, 3, **shared)
    for one, domain in zip(axes, DOMAINS, strict=True):
        one.set_title(domain)
        one.grid(alpha=0.3)
    return figure, axes


def _bars(axes: Axes, rows: Mapping[str, Mapping[str, Any] | None]) -> None:
    for index, (key, found) in enumerate(rows.items()):
        if found is None:
            continue
        low, high = (found["value"] if found[end] is None else found[end] for end in ("low", "high"))
        error = [[found["value"] - low], [high - found["value"]]]
        axes.bar(index, found["value"], yerr=error, color=style_of(key)["color"], capsize=2, alpha=0.85)
    axes.set_xticks(range(len(rows)), list(rows), rotation=60, ha="right", fontsize=7)


def table_1(result: Result) -> Figure:
    """Draw accepted lengths at temperature 1, with intervals over seeds."""
    figure, axes = _panels(11, 3.8, sharey=True)
    for one, domain in zip(axes, DOMAINS, strict=True):
        _bars(one, result["tokens_per_round"][domain]["1"])
    axes[0].set_ylabel("tokens a round, temperature 1")
    return figure


def figure_2(result: Result) -> Figure:
    """Draw acceptance by position: of rounds that reached it (lines) and teacher-forced (dotted, no survivor bias)."""
    figure, axes = _panels(11, sharey=True)
    for one, domain in zip(axes, DOMAINS, strict=True):
        for measure, faint in (("conditional", 1.0), ("teacher_forced", 0.45)):
            for key, row in result[measure][domain].items():
                style = style_of(key) | {"alpha": faint} | ({"linestyle": ":"} if measure == "teacher_forced" else {})
                label = key if measure == "conditional" else f"{key}, teacher-forced"
                error_line(one, range(1, len(row) + 1), row, label, **style)
        one.set_xlabel("draft position")
    axes[0].set_ylabel("acceptance")
    axes[0].legend(fontsize=6)
    return figure


def figure_3(result: Result) -> Figure:
    """Draw accepted lengths by depth."""
    figure, axes = _panels(9.5, 3.8, sharey=True)
    for one, domain in zip(axes, DOMAINS, strict=True):
        _bars(one, result["tokens_per_round"][domain])
    axes[0].set_ylabel("tokens a round, temperature 1")
    return figure


def figure_4(result: Result) -> Figure:
    """Draw accepted lengths by gamma, and the sequential share of a round."""
    figure = new_figure(figsize=(13, 3.4))
    axes = figure.subplots(1, 4)
    for one, domain in zip(axes, DOMAINS, strict=False):
        for name, row in result["tokens_per_round"][domain].items():
            error_line(one, [int(gamma) for gamma in row], list(row.values()), name, **style_of(name))
        one.set(title=domain, xlabel="gamma", ylabel="tokens a round")
        one.grid(alpha=0.3)
    for batch, rows in (result["latency"] or {}).items():
        row = rows["dspark"]
        shares = [100 * entry["sequential_share"] for entry in row.values()]
        axes[3].plot([int(gamma) for gamma in row], shares, marker="o", label=f"batch {batch}")
    axes[3].set(title="DSpark's Markov loop", xlabel="gamma", ylabel="% of a round's time", ylim=(0, None))
    axes[3].grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    axes[3].legend(fontsize=7)
    return figure


def figure_5(result: Result) -> Figure:
    """Draw the share of accepted drafts and the verified drafts against the confidence threshold."""
    figure, axes = _panels(11)
    for one, domain in zip(axes, DOMAINS, strict=True):
        points = result["thresholds"][domain]
        thresholds = [point["threshold"] for point in points]
        error_line(
            one, thresholds, [p["acceptance_rate"] for p in points], "accepted share", color="tab:blue", marker="o"
        )
        other = one.twinx()
        error_line(
            other, thresholds, [p["budget"] for p in points], "verified tokens a round", color="tab:gray", marker="s"
        )
        error_line(
            other, thresholds, [p["tokens_per_round"] for p in points], "tokens a round", color="tab:green", marker="^"
        )
        one.set(xlabel="threshold of the survival", ylim=(0, 1.02))
        if domain == DOMAINS[0]:
            one.set_ylabel("share of verified drafts accepted")
            one.legend(fontsize=7, loc="lower left")
            other.legend(fontsize=7, loc="lower right")
    return figure


def figure_6(result: Result) -> Figure:
    """Draw reliability at positions 1, 3, 5 and 7 before and after STS."""
    figure = new_figure(figsize=(12.5, 3.4))
    positions = (0, 2, 4, 6)
    axes = figure.subplots(1, len(positions), sharey=True)
    for one, k in zip(axes, positions, strict=True):
        one.plot((0, 1), (0, 1), color="black", linewidth=0.6)
        for stage, colour in (("before", "tab:red"), ("after", "tab:blue")):
            reliability_line(one, result[stage]["reliability"][k], stage, color=colour)
        errors = [result[stage]["ece"][k] for stage in ("before", "after")]
        shown = " to ".join("?" if e is None else f"{100 * e['value']:.1f}" for e in errors)
        one.set(title=f"position {k + 1}: ECE {shown} %", xlabel="predicted survival")
        one.grid(alpha=0.3)
    axes[0].set_ylabel("accepted")
    axes[0].legend(fontsize=7)
    return figure


def reliability_line(axes: Axes, bins: Mapping[str, Any], label: str, **style: Any) -> None:
    """Draw mean outcome against mean probability of the bins that hold something."""
    pairs = [(p, y) for p, y in zip(bins["mean_probability"], bins["mean_outcome"], strict=True) if p is not None]
    axes.plot([p for p, _ in pairs], [y for _, y in pairs], marker="o", markersize=3, label=label, **style)


FIGURES: dict[str, Callable[[Result], Figure]] = {
    "table1": table_1,
    "figure2": figure_2,
    "figure3": figure_3,
    "figure4": figure_4,
    "figure5": figure_5,
    "figure6": figure_6,
}


def draw(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Write one PNG a result and return their paths.

    Raises:
        RuntimeError: without Matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, result in results.items():
        figure, path = FIGURES[name](result), folder / f"{name}.png"
        study = result["study"]
        size = "reduced run" if study["reduced"] else "full run"
        figure.suptitle(f"{name}: tiny target, {size}, seeds {', '.join(map(str, study['seeds']))}", fontsize=9)
        figure.savefig(path, dpi=110)
        paths.append(path)
    return paths

"""The evaluation as PNG: acceptance by position, reliability, threshold sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsspark.serving.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"drafter": "tab:blue", "parallel_only": "tab:red"}


def _numbers(values: list[float | None]) -> Any:
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)


def _band(axes: Axes, x: Any, estimate: Mapping[str, Any], label: str, **style: Any) -> None:
    axes.plot(x, _numbers(estimate["value"]), label=label, marker="o", markersize=3, **style)
    axes.fill_between(x, _numbers(estimate["low"]), _numbers(estimate["high"]), color=style["color"], alpha=0.15)


def acceptance(result: Mapping[str, Any], path: Path) -> None:
    """Draw conditional and teacher-forced acceptance by position, temperature 1, a panel a domain."""
    domains = list(next(iter(result["drafters"].values()))["rounds"])
    figure = new_figure(figsize=(3.7 * len(domains), 3.4))
    panels = figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
    for axes, domain in zip(panels, domains, strict=True):
        for name, measured in result["drafters"].items():
            colour = _COLOURS.get(name, "tab:gray")
            found = measured["rounds"][domain]["1"]["conditional_acceptance"]
            x = np.arange(1, len(found["value"]) + 1)
            _band(axes, x, found, name, color=colour)
            _band(
                axes, x, measured["teacher_forced"][domain]["1"], f"{name}, teacher-forced", color=colour, linestyle=":"
            )
        axes.set(title=domain, xlabel="draft position", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("acceptance, temperature 1")
    panels[0].legend(fontsize=6)
    figure.savefig(path, dpi=110)


def reliability(measured: Mapping[str, Any], path: Path) -> None:
    """Draw predicted survival against what happened at each position, before and after STS."""
    positions = len(measured["before"]["reliability"])
    figure = new_figure(figsize=(2.6 * positions, 2.9))
    panels = figure.subplots(1, positions, sharey=True, squeeze=False)[0]
    for k, axes in enumerate(panels):
        axes.plot((0, 1), (0, 1), color="black", linewidth=0.6)
        for stage, colour in (("before", "tab:red"), ("after", "tab:blue")):
            bins = measured[stage]["reliability"][k]
            axes.plot(
                _numbers(bins["mean_probability"]),
                _numbers(bins["mean_outcome"]),
                color=colour,
                marker="o",
                markersize=3,
                label=stage,
            )
        axes.set(title=f"position {k + 1}", xlabel="predicted survival")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accepted")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def thresholds(measured: Mapping[str, Any], path: Path) -> None:
    """Draw the share of accepted drafts and tokens a round against the confidence threshold."""
    figure = new_figure(figsize=(8.4, 3.2))
    panels = figure.subplots(1, 2)
    names = {"acceptance_rate": "share of verified drafts accepted", "tokens_per_round": "tokens a round"}
    for axes, (key, label) in zip(panels, names.items(), strict=True):
        for colour, (domain, points) in zip(("tab:blue", "tab:orange", "tab:green"), measured.items(), strict=False):
            x = [point["threshold"] for point in points]
            estimate = {end: [point[key][end] for point in points] for end in ("value", "low", "high")}
            _band(axes, x, estimate, domain, color=colour)
        axes.set(xlabel="threshold of the survival", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Write every figure that the result has data for.

    Raises:
        RuntimeError: without Matplotlib.
    """
    if all("1" in by_temperature for m in result["drafters"].values() for by_temperature in m["rounds"].values()):
        acceptance(result, folder / "acceptance.png")
    for name, measured in result["drafters"].items():
        if "confidence" in measured:
            reliability(measured["confidence"], folder / f"reliability_{name}.png")
        if "thresholds" in measured:
            thresholds(measured["thresholds"], folder / f"thresholds_{name}.png")

"""Figures of a simulation as PNG: the paper's figures 7 and 8, and what a staircase does to two schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsspark.cost_table import CostTable
from dsspark.serving.simulated import Delayed, EarlyStop, Survivals, ranked_throughput
from dsspark.serving.simulator import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = {
    "none": ("tab:gray", "x", ":"),
    "mtp-1": ("tab:orange", "s", "--"),
    "fixed": ("tab:red", "^", "-."),
    "threshold": ("tab:olive", "v", "-."),
    "algorithm": ("tab:purple", "d", ":"),
    "delayed": ("tab:blue", "o", "-"),
}


def new_figure(**options: Any) -> Figure:
    """Return an empty figure that needs no display.

    Raises:
        RuntimeError: without Matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise RuntimeError("plots: got no Matplotlib, expected it installed; pip install 'dsspark[plots]'") from error
    return Figure(layout="constrained", **options)


def _style(policy: str) -> dict[str, Any]:
    colour, marker, line = _STYLE.get(policy, _STYLE.get(policy.partition("-")[0], ("black", ".", "-")))
    return {"color": colour, "marker": marker, "linestyle": line, "markersize": 4, "linewidth": 1.3, "label": policy}


def figure_7(curves: Mapping[str, Sequence[Outcome]], title: str, path: str | Path) -> None:
    """Draw throughput against tokens a second of one user (paper figure 7), simulated."""
    figure = new_figure(figsize=(6.4, 4.4))
    axes = figure.subplots()
    for policy, outcomes in curves.items():
        axes.plot([o.user_speed for o in outcomes], [o.throughput for o in outcomes], **_style(policy))
    axes.set(xlabel="tokens / s / user", ylabel="tokens / s, whole engine", title=f"{title} (simulated)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def figure_8(curves: Mapping[str, Sequence[Outcome]], title: str, path: str | Path) -> None:
    """Draw throughput, verification budget (1 + l) and waste against concurrency (paper figure 8), simulated."""
    figure = new_figure(figsize=(12.6, 3.9))
    throughput, budget, waste = figure.subplots(1, 3)
    for policy, outcomes in curves.items():
        x = [o.concurrency for o in outcomes]
        throughput.plot(x, [o.throughput for o in outcomes], **_style(policy))
        budget.plot(x, [o.budget for o in outcomes], **_style(policy))
        waste.plot(x, [100 * o.waste for o in outcomes], **_style(policy))
    throughput.set(ylabel="tokens / s, whole engine", title=f"{title} (simulated)", yscale="log")
    budget.set(ylabel="verified tokens a request and step, 1 + l", ylim=(0, None))
    waste.set(ylabel="verified drafts not accepted, %", ylim=(0, None))
    for axes in (throughput, budget, waste):
        axes.set(xlabel="requests in the batch", xscale="log")
        axes.grid(alpha=0.3)
    throughput.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def stops(survival: Survivals, table: CostTable) -> tuple[list[float], int, int]:
    """Return Theta after each candidate, how many Algorithm 1 admits, and how many the global search would.

    The second search looks at the survivals it is shown; the delayed scheduler shows it those of two steps before.
    """
    theta = ranked_throughput(survival, table.sps.numpy())[1].tolist()
    greedy = int(EarlyStop("", table).lengths(survival, survival).sum())
    return theta, greedy, int(Delayed("", table).lengths(survival, survival).sum())


def figure_staircase(survival: Survivals, table: CostTable, title: str, path: str | Path) -> None:
    """Draw Theta against the drafts admitted in one step: Algorithm 1 stops at the first stair, the global search does not."""
    theta, greedy, best = stops(survival, table)
    figure = new_figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    axes.plot(np.arange(len(theta)), theta, color="tab:gray", linewidth=1)
    for count, policy, text in (
        (greedy, "algorithm-1", "Algorithm 1 stops"),
        (best, "delayed", "global search (on old survivals)"),
    ):
        style = _style(policy) | {"label": f"{text}: {count} drafts", "linestyle": "none", "markersize": 8}
        axes.plot([count], [theta[count]], **style)
    axes.set(xlabel="drafts admitted in the step", ylabel="expected tokens / s, Theta", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)

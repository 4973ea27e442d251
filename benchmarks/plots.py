"""Pictures of a result file: time against bytes with the copy bandwidth as roof, and bars of everybody who did a task.

python -m benchmarks.plots RESULTS.json [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "_static" / "benchmarks"


def _machine(facts: dict[str, str]) -> str:
    return f"{facts.get('gpu') or facts.get('processor', 'unknown')}, commit {facts.get('commit')}, {facts.get('date')}"


def _roofline(times: list[dict[str, Any]], title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for contender in sorted({line["contender"] for line in times}):
        own = [line for line in times if line["contender"] == contender]
        axes.plot(
            [line["floor_bytes"] for line in own], [line["device_seconds"] for line in own], "o", ms=4, label=contender
        )
    roof = max(line["floor_bytes"] / line["device_seconds"] / line["share_of_copy"] for line in times)
    bounds = [min(line["floor_bytes"] for line in times), max(line["floor_bytes"] for line in times)]
    axes.plot(bounds, [size / roof for size in bounds], "k--", lw=1, label="copy bandwidth, measured")
    axes.set(xscale="log", yscale="log", xlabel="bytes of the floor", ylabel="seconds", title=title)
    axes.legend(fontsize=7)
    return figure


def _bars(times: list[dict[str, Any]], title: str) -> Any:
    from matplotlib.figure import Figure

    largest: dict[str, str] = {}
    for line in times:
        best = max((other for other in times if other["task"] == line["task"]), key=lambda other: other["floor_bytes"])
        largest[line["task"]] = best["size"]
    kept = [line for line in times if largest[line["task"]] == line["size"]]
    tasks, names = list(largest), sorted({line["contender"] for line in kept})
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for offset, name in enumerate(names):
        own = [(tasks.index(line["task"]), line["device_seconds"]) for line in kept if line["contender"] == name]
        places = [place + 0.8 * (offset / len(names) - 0.4) for place, _ in own]
        axes.bar(places, [1e3 * seconds for _, seconds in own], width=0.8 / len(names), label=name)
    labels = [f"{task}\n{largest[task]}" for task in tasks]
    axes.set(yscale="log", ylabel="milliseconds", title=title)
    axes.set_xticks(range(len(tasks)), labels, fontsize=6, rotation=25, ha="right")
    axes.legend(fontsize=7)
    return figure


def draw(source: Path, folder: Path) -> list[Path]:
    """Draw the pictures of a result file into a folder; return their paths."""
    content = json.loads(source.read_text(encoding="utf-8"))
    title = _machine(content["provenance"])
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (("roofline", _roofline(content["times"], title)), ("bars", _bars(content["times"], title))):
        written.append(folder / f"{source.parent.name}-{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("source", type=Path, help="a bench.json")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of the pictures")
    args = parser.parse_args(arguments)
    print("\n".join(str(path) for path in draw(args.source, args.out)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

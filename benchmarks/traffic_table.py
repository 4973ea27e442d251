"""The table "moved / floor" of every component, its reference and the eager baselines: counted, not timed, so CI can hold it.

    python -m benchmarks.traffic            count at the table's sizes, print, write results/traffic.json
    python -m benchmarks.traffic --check    count the small sizes again and fail if a ratio grew

Kernels are interpreted, so a byte that a GPU's cache would spare is not spared here; eager operations count as `benchmarks.eager` says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.cases import COMPILED, KERNEL, REFERENCE, Case
from benchmarks.eager import count_eager
from benchmarks.provenance import RESULTS, provenance
from benchmarks.sizes import SMALL_TRAFFIC, TRAFFIC, Size
from benchmarks.tasks import TASKS
from benchmarks.traffic import count_traffic

PATH = RESULTS / "traffic.json"
GROWTH = 1.001
"""A ratio that grows by more than this is a regression: counts are exact, but outcomes that depend on rounding may move a row."""

Row = dict[str, object]


def count(case: Case, contender: str) -> Row:
    """Run a contender once and count: bytes, floor, their ratio, launches and the most bytes held at once; then check parity."""
    with count_eager() as eager, count_traffic() as kernels:
        result = case.contenders[contender].run(case.inputs)
    if (
        case.contenders[contender].comparable is None
    ):  # what was counted is checked: interpreting a kernel twice takes long
        case.agree(result, case.contenders[REFERENCE].run(case.inputs))
    else:
        case.check(contender)
    moved = eager.total + kernels.total
    return {
        "task": case.name,
        "size": case.size.label,
        "contender": contender,
        "moved": moved,
        "floor": case.floor_bytes,
        "ratio": round(moved / case.floor_bytes, 4),
        "launches": kernels.launches + eager.operations,
        "peak": eager.peak,
    }


def count_all(sizes: Mapping[str, Size]) -> list[Row]:
    """Count every task and contender. A host loop moves nothing that is counted: it is left out."""
    rows = []
    for component, build in TASKS.values():
        case = build(sizes[component], "cpu")
        for contender in case.contenders:
            if contender == COMPILED:
                continue
            row = count(case, contender)
            rows += [row] if row["moved"] else []
    return rows


def regressions(before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """Return what moves more than it did, what is no longer counted, and kernels that nobody has recorded."""
    old = {(row["task"], row["contender"]): row for row in before}
    new = {(row["task"], row["contender"]): row for row in now}
    found = [f"{task}: {contender} is recorded but was not counted" for task, contender in old.keys() - new.keys()]
    for key, row in new.items():
        if key not in old:
            found += [f"{key[0]}: no record of its {KERNEL}"] if key[1] == KERNEL else []
        elif float(str(row["ratio"])) > GROWTH * float(str(old[key]["ratio"])):
            found.append(f"{key[0]}, {key[1]}: moved / floor grew from {old[key]['ratio']} to {row['ratio']}")
    return sorted(found)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| task | size | by | moved / floor | launches | peak memory |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        peak = f"{float(str(row['peak'])) / 2**20:.2f} MiB"
        names = f"| {row['task']} | {row['size']} | {row['contender']} "
        lines.append(f"{names}| {float(str(row['ratio'])):.2f} | {row['launches']} | {peak} |")
    return "\n".join(lines)


def read(path: Path = PATH) -> dict[str, list[Row]]:
    """Return the tables of a file that `main` wrote."""
    content: dict[str, list[Row]] = json.loads(path.read_text(encoding="utf-8"))
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--check", action="store_true", help="count the small sizes and compare, write nothing")
    parser.add_argument("--out", type=Path, default=PATH, help="the file to write or to compare with")
    args = parser.parse_args(arguments)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    small = count_all(SMALL_TRAFFIC)
    if args.check:
        found = regressions(read(args.out)["small"], small)
        print("\n".join(found) or "no ratio grew")
        return 1 if found else 0
    rows = count_all(TRAFFIC)
    page = table(rows)
    print(page)
    facts = {key: text for key, text in provenance("cpu").items() if key in ("date", "commit", "torch", "triton")}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"provenance": facts, "table": rows, "small": small}, indent=1) + "\n", encoding="utf-8"
    )
    args.out.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

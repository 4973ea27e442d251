"""The last step of `make bench`: one table of claims and times with floors, one JSON with where they come from, and
the same table as the page that the docs include.

    python -m benchmarks.report RUN [--claims] [--plots] [--out FILE]

RUN is the JSON that pytest-benchmark wrote at its end, or the lines that the harness wrote as it went (`measured.jsonl`): they are there
too if the run was cut short. With --claims the paired ratios of `benchmarks.claims` are measured first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims import measure_all
from benchmarks.plots import FOLDER, draw
from benchmarks.provenance import RESULTS, provenance, slug

Record = dict[str, Any]


def records(path: Path) -> list[Record]:
    """Return what is kept of a run: a line a contender, without the raw times."""
    text, kept = path.read_text(encoding="utf-8"), []
    if path.suffix == ".jsonl":
        kept = [json.loads(line) for line in text.splitlines()]
    else:
        for entry in json.loads(text)["benchmarks"]:
            stats = entry["stats"]
            times = {"median_seconds": stats["median"], "iqr_seconds": stats["iqr"], "rounds": stats["rounds"]}
            kept.append({**entry["extra_info"], **times})
    return sorted(kept, key=lambda record: (record["task"], record["size"]))


def claims_table(claims: Sequence[Record]) -> str:
    """Return the paired ratios as a Markdown table."""
    lines = [
        "| reference against | size | claimed | times faster (quartiles) | holds | on one thread | ours, theirs | peak memory |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for claim in claims:
        spread = f"{claim['ratio']:.2f} ({claim['low']:.2f} to {claim['high']:.2f})"
        memory = "" if claim["memory"] is None else f"{claim['memory']:.2f} (below {claim['claimed_memory']:g})"
        lines.append(
            f"| {claim['task']}: {claim['other']} | {claim['size']} | {claim['claimed']:g} | {spread} "
            f"| {'yes' if claim['holds'] else 'NO'} | {claim['one_thread']:.2f} "
            f"| {1e3 * claim['ours']:.1f} ms, {1e3 * claim['theirs']:.1f} ms | {memory} |"
        )
    return "\n".join(lines)


def times_table(kept: Sequence[Record]) -> str:
    """Return times, floors and shares of the copy bandwidth as a Markdown table."""
    lines = [
        "| task | size | by | median | floor | moved / floor | floor's share of copy bandwidth | launches | peak memory |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in kept:
        moved = f"{record['moved_bytes'] / record['floor_bytes']:.1f}" if record.get("moved_bytes") else ""
        peak = f"{record['peak_bytes'] / 2**20:.1f} MiB" if "peak_bytes" in record else ""
        lines.append(
            f"| {record['task']} | {record['size']} | {record['contender']} | {1e3 * record['device_seconds']:.3f} ms "
            f"| {record['floor_bytes'] / 2**20:.2f} MiB | {moved} | {100 * record['share_of_copy']:.1f} % "
            f"| {record.get('launches', '')} | {peak} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a claim that was measured does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("run", type=Path, help="the JSON that pytest-benchmark wrote, or the lines of the harness")
    parser.add_argument("--claims", action="store_true", help="measure the ratios that are claimed")
    parser.add_argument("--plots", action="store_true", help="draw the pictures of the docs from the JSON")
    parser.add_argument(
        "--out", type=Path, help="where the JSON goes; benchmarks/results/<device>/bench.json if left out"
    )
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = provenance(device)
    claims = list(measure_all()) if args.claims else []
    kept = records(args.run)
    out = args.out or RESULTS / slug(device) / "bench.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"provenance": facts, "claims": claims, "times": kept}, indent=1) + "\n", encoding="utf-8"
    )
    page = "\n\n".join(
        [
            ", ".join(f"{name} {text}" for name, text in facts.items() if text != "absent") + ".",
            *([claims_table(claims)] if claims else []),
            times_table(kept),
        ]
    )
    out.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
    print(page)
    if args.plots and kept:
        draw(out, FOLDER)
    return 0 if all(claim["holds"] for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())

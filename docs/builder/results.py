"""The committed result files, read: what the pages say of a measurement comes from here."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from docs.builder.charts import Bar
from docs.builder.sources import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = ROOT / "dsspark" / "weights" / "provenance.json"
SMOLLM2 = ROOT / "dsspark" / "weights" / "smollm2" / "config.json"
NOT_YET = "Not yet measured on a GPU"

Record = dict[str, Any]


def load(path: Path) -> Record:
    """Return a JSON file."""
    content: Record = json.loads(path.read_text(encoding="utf-8"))
    return content


def described(facts: Record) -> str:
    """Return where figures come from in one line."""
    names = ("gpu", "processor", "threads", "torch", "triton", "commit", "date")
    return ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))


def identity(task: str) -> str:
    """Return the id on its page of a task's figures: "verification, pack" has "measured-verification-pack"."""
    return f"measured-{task.replace(', ', '-')}"


def traffic_rows(task: str) -> list[Record]:
    """Return the counted rows of a task, fewest bytes first."""
    rows = [row for row in load(RESULTS / "traffic.json")["table"] if row["task"] == task]
    return sorted(rows, key=lambda row: float(row["ratio"]))


def traffic_bars(task: str) -> list[Bar]:
    """Return bytes moved over bytes that have to move, one bar a contender."""
    return [
        (row["contender"], row["ratio"], f"{row['ratio']:.2f} ({row['launches']} launches)")
        for row in traffic_rows(task)
    ]


def benchmarks(gpu: bool, results: Path = RESULTS) -> Record | None:
    """Return the newest file of `make bench` or `make bench-gpu`, or None if there is none."""
    files = [load(path) for path in sorted(results.glob("*/bench.json"))]
    kept = [file for file in files if bool(file["provenance"].get("gpu")) == gpu]
    return max(kept, key=lambda file: str(file["provenance"]["date"]), default=None)


def times_table(file: Record, task: str) -> str:
    """Return the medians of a task as a Markdown table; empty if the file has none of it."""
    rows = [row for row in file["times"] if row["task"] == task]
    if not rows:
        return ""
    lines = ["| size | by | median | share of copy bandwidth |", "| --- | --- | ---: | ---: |"]
    for row in rows:
        share = f"{100 * row['share_of_copy']:.1f} %"
        lines.append(f"| {row['size']} | {row['contender']} | {1e3 * row['device_seconds']:.3f} ms | {share} |")
    return "\n".join(lines)


def rounds_table() -> str:
    """Return tokens a round of the shipped weights as a Markdown table."""
    lines = [
        "| domain | temperature | parallel only | with Markov head | gain |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for domain, by_temperature in load(PROVENANCE)["tokens_per_round"].items():
        for temperature, by_drafter in by_temperature.items():
            alone, drafter = by_drafter["parallel_only"], by_drafter["drafter"]
            gain = f"{100 * (drafter / alone - 1):+.0f} %"
            lines.append(f"| {domain} | {temperature} | {alone:.2f} | {drafter:.2f} | {gain} |")
    return "\n".join(lines)


def calibration_table() -> str:
    """Return temperatures and calibration errors of the shipped weights as a Markdown table."""
    facts = load(PROVENANCE)
    lines = ["| position | STS temperature | ECE before | ECE after |", "| ---: | ---: | ---: | ---: |"]
    columns = (facts["sts_temperatures"], facts["ece_before"], facts["ece_after"])
    for k, (temperature, before, after) in enumerate(zip(*columns, strict=True), start=1):
        lines.append(f"| {k} | {temperature:.2f} | {100 * before:.2f} % | {100 * after:.2f} % |")
    mean = [sum(column) / len(column) for column in columns]
    lines.append(f"| mean | | {100 * mean[1]:.2f} % | {100 * mean[2]:.2f} % |")
    return "\n".join(lines)


def training_table() -> str:
    """Return how the shipped weights were trained as a Markdown table."""
    facts = load(PROVENANCE)
    plan, machine = facts["plan"], facts["machine"]
    rows = {
        "seed": facts["seed"],
        "target": f"{plan['target']['num_layers']} layers of {plan['target']['hidden_size']}, "
        f"{plan['target_schedule']['steps']} steps",
        "drafter": f"{plan['drafter']['backbone']['num_layers']} layers, Markov rank {plan['drafter']['markov_rank']}, "
        f"block of {plan['drafter']['backbone']['block_size']}, {plan['drafter_schedule']['steps']} steps",
        "training text": ", ".join(
            f"{name} {part['train_bytes'] / 1e6:.1f} MB" for name, part in facts["corpus"].items()
        ),
        "held-out loss": ", ".join(f"{name} {x:.2f}" for name, x in facts["held_out_nats_per_byte"].items())
        + " nats a byte",
        "rounds": f"{facts['rounds']['fitted']:,} for the temperatures, {facts['rounds']['tested']:,} for the tables here",
        "time": f"{sum(facts['minutes'].values()):.0f} minutes on {machine['cores']} cores (torch {machine['torch']})",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())])


def smollm2_rounds_table() -> str:
    """Return what the drafter shipped for SmolLM2 and its parallel-only twin do on held-out chats as a Markdown table."""
    shipped = load(SMOLLM2)["provenance"]["evaluation"]
    twin = load(RESULTS / "smollm2" / "parallel_only.json")["evaluation"]
    lines = [
        "| chats | temperature | tokens a round | parallel only | acceptance of draft 1, 2, ... given those before | texts equal to the "
        "target's own |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for name, found in shipped.items():
        if " at " not in name:
            continue
        domain, temperature = name.split(" at ")
        same = f"{found['texts_equal_to_plain']} of {found['chats']}" if "texts_equal_to_plain" in found else "same law"
        shares = ", ".join(f"{100 * value:.0f} %" for value in found["conditional_acceptance"])
        lines.append(f"| {domain} | {temperature} | {_rounds(found)} | {_rounds(twin[name])} | {shares} | {same} |")
    return "\n".join(lines)


def _rounds(found: Record) -> str:
    low, high = found["interval"]
    return f"{found['tokens_per_round']:.2f} [{low:.2f}, {high:.2f}]"


def smollm2_training_table() -> str:
    """Return what both drafters of SmolLM2 had learned after how many steps as a Markdown table."""
    histories = load(RESULTS / "smollm2" / "training.json")
    lines = [
        "| drafter | step | minutes | math | code | chat |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, label in (("drafter", "DSpark"), ("parallel_only", "parallel only")):
        entries = histories[name]
        marks = [entry for entry in entries if entry["step"] in (200, 400, 1000, 2000, 4000)]
        for row in [*marks, entries[-1]]:
            rounds = " | ".join(f"{row['tokens_per_round'][domain]:.2f}" for domain in ("math", "code", "chat"))
            lines.append(f"| {label} | {row['step']:,} | {row['minutes']:.0f} | {rounds} |")
    return "\n".join(lines)


def smollm2_speed_table() -> str:
    """Return the wall-clock of SmolLM2's demo as a Markdown table."""
    lines = [
        "| chats | tokens a round | plain, tokens/s | drafted, tokens/s | speed-up, median | worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for domain, found in load(RESULTS / "smollm2" / "demo.json")["domains"].items():
        lines.append(
            f"| {domain} ({found['chats']}) | {found['tokens_per_round']:.2f} | {found['plain_tokens_per_second']:.1f} | "
            f"{found['drafted_tokens_per_second']:.1f} | {found['median_speedup']:.2f} | {found['worst_speedup']:.2f} |"
        )
    return "\n".join(lines)


def acceptance(domain: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return conditional acceptance by position of both drafters on a domain, as lines."""
    found = load(PROVENANCE)["acceptance_by_position"][domain]
    names = (("with Markov head", "drafter"), ("parallel only", "parallel_only"))
    return [(name, [(float(k), value) for k, value in enumerate(found[key], start=1)]) for name, key in names]


def budgets(system: int = 0) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the simulated budget 1 + l of each policy against the doublings of the number of requests, as lines."""
    curves = load(RESULTS / "simulate" / "simulate.json")["systems"][system]["curves"]
    policies = ("delayed", "algorithm-1", "threshold-0.5", "fixed-5", "mtp-1")
    return [(name, [(math.log2(point["concurrency"]), point["budget"]) for point in curves[name]]) for name in policies]


def effects_table() -> str:
    """Return what the paper reports beside what the committed files of this repository say, as a Markdown table."""
    facts = load(PROVENANCE)
    verdicts = load(RESULTS / "simulate" / "simulate.json")["systems"][0]["verdicts"]

    def gains(temperature: str) -> str:
        rounds = {name: found[temperature] for name, found in facts["tokens_per_round"].items()}
        each = {name: 100 * (found["drafter"] / found["parallel_only"] - 1) for name, found in rounds.items()}
        return ", ".join(f"{name} {gain:+.0f} %" for name, gain in each.items())

    def ends(drafter: str) -> str:
        found = {name: by_drafter[drafter] for name, by_drafter in facts["acceptance_by_position"].items()}
        return ", ".join(f"{name} {values[0]:.2f} to {values[-1]:.2f}" for name, values in found.items())

    def mean(name: str) -> float:
        return 100 * sum(facts[name]) / len(facts[name])

    speedup = verdicts["matched-throughput speed-up, simulated: least, median, most"]
    paper = verdicts["matched-throughput speed-up, paper (self-reported)"]
    rows = [
        (
            "tokens a round, gain over the parallel drafter (Table 1)",
            "16.3 to 18.4 %, mean over tasks",
            f"T = 1: {gains('1')}",
        ),
        ("", "", f"T = 0: {gains('0')}"),
        (
            "acceptance given the prefix, parallel, first to last position (Fig. 2)",
            "chat 0.72 to 0.63, code 0.87 to 0.78",
            ends("parallel_only"),
        ),
        ("the same with Markov head", "starts high and stays", ends("drafter")),
        (
            "ECE of the survival before and after STS (Fig. 6)",
            "3 to 8 %, about 1 %",
            f"{mean('ece_before'):.2f} %, {mean('ece_after'):.2f} %",
        ),
        (
            "speed of a user over MTP-1 at matched throughput (Fig. 7)",
            f"{paper[0]:.2f} to {paper[1]:.2f} times, self-reported",
            f"{speedup[0]:.2f} to {speedup[2]:.2f} times, median {speedup[1]:.2f}, simulated",
        ),
    ]
    lines = ["| effect | paper | here |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {effect} | {theirs} | {ours} |" for effect, theirs, ours in rows)])


def evaluation_pages(results: Path = RESULTS) -> list[Path]:
    """Return the pages that `python -m dsspark evaluate` and `experiments` wrote into the results; none before they have run."""
    return [page for folder in ("evaluate", "paper") for page in sorted((results / folder).rglob("*.md"))]


def included(page: Path) -> str:
    """Return a page of results as a part of one in `docs/`: headings become bold lines, pictures keep their place."""
    lines = page.read_text(encoding="utf-8").splitlines()
    text = "\n".join(f"**{line.lstrip('# ')}**" if line.startswith("#") else line for line in lines)
    folder = os.path.relpath(page.parent, ROOT / "docs")
    shown = re.sub(r"(!\[[^\]]*\]\()([^):]+\))", rf"\1{folder}/\2", text)
    rest = [picture for picture in sorted(page.parent.glob("*.png")) if picture.name not in text]
    return "\n\n".join([shown, *(f"![{picture.stem.replace('_', ' ')}]({folder}/{picture.name})" for picture in rest)])

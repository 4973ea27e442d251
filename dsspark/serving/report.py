"""What a simulation found, as JSON for programs and as Markdown for people."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dsspark
from dsspark.serving.experiment import Match
from dsspark.serving.sensitivity import BASELINE_USERS, Sensitivity
from dsspark.serving.simulator import Outcome

ASSUMPTIONS = (
    "Simulated, not measured: the roofline overlaps reading, computing and sending perfectly, spreads experts and requests evenly, "
    "and runs no prefill beside decoding. As a check, TensorRT-LLM publishes 11,489 tokens/s for DeepSeek-R1 on 8 x H200 with 1,024 "
    "users, prefill included; rooflines like this one promise several times that. Ratios between policies are what to read.",
    "Acceptance is Table 1's for Qwen3-4B, not DeepSeek-V4's, which is not public; the confidence is perfectly calibrated; requests "
    "of a domain are alike.",
    "The drafter's time is paid for every request, whatever is verified; the schedulers cannot avoid it.",
    "The paper's figures are DeepSeek's own and have been reproduced by nobody. Its +661 % is a speed at which the baseline has all "
    "but collapsed; at high speed targets the gains below grow without bound for the same reason.",
)


@dataclass(frozen=True, kw_only=True)
class SystemReport:
    """One engine: curves by policy, how they compare, what the answer owes to the assumptions."""

    name: str
    curves: Mapping[str, Sequence[Outcome]]
    matches: Sequence[Match] = ()
    verdicts: Mapping[str, object] = field(default_factory=dict)
    at_speed: Mapping[str, float] = field(default_factory=dict)
    sensitivity: Sequence[Sensitivity] = ()
    sources: Mapping[str, object] = field(default_factory=dict)


def _plain(value: Any) -> Any:
    """Return the value as JSON knows it: NaN and infinities are null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, systems: Sequence[SystemReport], settings: Mapping[str, object], seconds: float) -> None:
    """Write everything, with every assumption and its source."""
    content = {
        "simulated": True,
        "dsspark": dsspark.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "settings": settings,
        "wall_clock_seconds": seconds,
        "limits": ASSUMPTIONS,
        "systems": [
            {field.name: getattr(system, field.name) for field in dataclasses.fields(system)} for system in systems
        ],
    }
    path.write_text(json.dumps(_plain(content), indent=1) + "\n", encoding="utf-8")


def _number(value: float, digits: int = 2) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def outcome_rows(curves: Mapping[str, Sequence[Outcome]]) -> list[list[str]]:
    """Return a row for each load and policy."""
    return [
        [
            _number(o.concurrency, 1),
            policy,
            _number(o.throughput),
            _number(o.user_speed, 1),
            _number(o.budget),
            _number(o.tokens_per_round),
            f"{100 * o.waste:.0f} %",
            _number(1e3 * o.p50_token_seconds),
            _number(1e3 * o.p95_token_seconds),
        ]
        for outcomes in zip(*curves.values(), strict=True)
        for policy, o in zip(curves, outcomes, strict=True)
    ]


OUTCOME_HEADER = (
    "requests",
    "policy",
    "tokens/s",
    "tokens/s/user",
    "budget 1 + l",
    "tokens a round",
    "waste",
    "p50 ms/token",
    "p95 ms/token",
)


def _verdict(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_verdict(item) for item in value)
    return _number(value) if isinstance(value, float) else str(value)


def markdown(systems: Sequence[SystemReport]) -> str:
    """Return what was found about all systems."""
    lines: list[str] = []
    for system in systems:
        lines += [
            f"### {system.name}",
            "",
            "Every figure of this section is simulated, except where it says paper.",
            "",
        ]
        lines += _table(("", ""), [[name, _verdict(value)] for name, value in system.verdicts.items()])
        if system.matches:
            lines += ["Delayed DSpark against MTP-1, at each load of MTP-1:", ""]
            header: tuple[str, ...] = (
                "MTP-1 requests",
                "tokens/s",
                "tokens/s/user",
                "speed-up at that throughput",
                "throughput at that speed, times",
            )
            lines += _table(
                header,
                [
                    [
                        _number(m.concurrency, 0),
                        _number(m.throughput),
                        _number(m.user_speed, 1),
                        _number(m.speedup),
                        _number(m.throughput_gain),
                    ]
                    for m in system.matches
                ],
            )
        if system.sensitivity:
            lines += ["Sensitivity: speed-up at matched throughput with one assumption moved at a time:", ""]
            header = ("assumption", "moved to", *(f"at MTP-1 with {n} users" for n in BASELINE_USERS))
            lines += _table(header, [[s.name, s.value, *(_number(r) for r in s.speedups)] for s in system.sensitivity])
        if system.at_speed:
            lines += ["Throughput at the target speed (tokens/s):", ""]
            lines += _table(("policy", "tokens/s"), [[name, _number(value)] for name, value in system.at_speed.items()])
    return "\n".join(lines).rstrip("\n") + "\n"


def points_markdown(systems: Sequence[SystemReport]) -> str:
    """Return every simulated point of all systems."""
    parts = [
        "\n".join((f"### {system.name} (simulated)", "", *_table(OUTCOME_HEADER, outcome_rows(system.curves))))
        for system in systems
    ]
    return "\n".join(parts).rstrip("\n") + "\n"

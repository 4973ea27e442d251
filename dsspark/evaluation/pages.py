"""The evaluation as a page of Markdown tables, beside its JSON and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table and a blank one."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def shown(estimate: Mapping[str, Any] | None, scale: float = 1.0, digits: int = 2) -> str:
    """Return an estimate with its interval as text; a dash where there is none."""
    if estimate is None or estimate["value"] is None:
        return "-"
    value = f"{scale * estimate['value']:.{digits}f}"
    if estimate["low"] is None:
        return value
    return f"{value} [{scale * estimate['low']:.{digits}f}, {scale * estimate['high']:.{digits}f}]"


def at(estimate: Mapping[str, Any], k: int) -> dict[str, Any]:
    """Return the estimate at position k of an estimate by position."""
    return {end: estimate[end][k] for end in ("value", "low", "high")}


def percentages(values: Sequence[float | None]) -> str:
    """Return shares by position as whole per cents."""
    return " ".join("-" if value is None else f"{100 * value:.0f}" for value in values)


def evaluation_page(result: Mapping[str, Any]) -> str:
    """Return the page of what `evaluate` returned."""
    protocol, made = result["protocol"], result["made"]
    lines = [
        "# Evaluation on held-out text",
        "",
        f"{made['weights'].capitalize()} weights; {protocol['prompts']} prompts a domain, up to {protocol['max_new_tokens']} tokens each, "
        "whole blocks verified. In brackets: 95 % bootstrap intervals over prompts.",
        "",
        "## Tokens a round, correction or bonus included",
        "",
        *_rounds(result["drafters"]),
        "## Acceptance by position at temperature 1, in %",
        "",
        "Conditional: of the rounds that reached the position. Teacher-forced: at every position of text the target drew, so without "
        "survivor bias.",
        "",
        *_acceptance(result["drafters"]),
    ]
    for name, measured in result["drafters"].items():
        if "confidence" in measured:
            lines += _confidence(name, measured)
        if measured["latency"]:
            lines += _latency(name, measured["latency"])
    return "\n".join(lines).rstrip() + "\n"


def _rounds(drafters: Mapping[str, Any]) -> list[str]:
    first = next(iter(drafters.values()))["rounds"]
    rows = [
        [domain, temperature, *(shown(m["rounds"][domain][temperature]["tokens_per_round"]) for m in drafters.values())]
        for domain, by_temperature in first.items()
        for temperature in by_temperature
    ]
    return table(["domain", "temperature", *drafters], rows)


def _acceptance(drafters: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, measured in drafters.items():
        for domain, by_temperature in measured["rounds"].items():
            if "1" in by_temperature:
                conditional = by_temperature["1"]["conditional_acceptance"]["value"]
                forced = measured["teacher_forced"][domain]["1"]["value"]
                rows.append([name, domain, percentages(conditional), percentages(forced)])
    return table(["drafter", "domain", "conditional", "teacher-forced"], rows)


def _confidence(name: str, measured: Mapping[str, Any]) -> list[str]:
    before, after = measured["confidence"]["before"], measured["confidence"]["after"]
    rows = [
        [
            str(k + 1),
            shown(at(before["ece"], k), 100),
            shown(at(after["ece"], k), 100),
            shown(at(after["auc"], k)),
            shown(at(before["brier"], k), digits=3),
            shown(at(after["brier"], k), digits=3),
        ]
        for k in range(len(before["ece"]["value"]))
    ]
    lines = [f"## Confidence of {name} at temperature 1, all domains ({measured['confidence']['rounds']} rounds)", ""]
    lines += [
        "Noise alone makes the ECE of a finite sample larger than its limit; its interval takes that back, so it may lie below the value.",
        "",
    ]
    lines += table(["position", "ECE % before STS", "ECE % after", "AUC after", "Brier before", "Brier after"], rows)
    if "thresholds" not in measured:
        return lines
    lines += [
        f"## Confidence threshold of {name} at temperature 1",
        "",
        "Share of verified drafts accepted, in %; tokens a round.",
        "",
    ]
    sweep = measured["thresholds"]
    thresholds = [point["threshold"] for point in next(iter(sweep.values()))]
    rows = [
        [
            f"{threshold:g}",
            *(
                f"{shown(points[index]['acceptance_rate'], 100, 1)}; {points[index]['tokens_per_round']['value']:.2f}"
                for points in sweep.values()
            ),
        ]
        for index, threshold in enumerate(thresholds)
    ]
    return lines + table(["threshold", *sweep], rows)


def _latency(name: str, latency: Mapping[str, Any]) -> list[str]:
    rows = [
        [batch, f"{t['round_ms']:.2f}", f"{100 * t['draft_share']:.0f} %", f"{100 * t['sequential_share']:.1f} %"]
        for batch, t in latency.items()
    ]
    lines = [f"## Where the time of a round goes, {name}", "", "Medians on the machine that ran this; a CPU.", ""]
    return lines + table(["batch", "ms a round", "drafting", "of which sequential, of the round"], rows)

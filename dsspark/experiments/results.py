r"""The paper's table and figures from the measured runs, as JSON.

Every number with a claim behind it is a **statistic**: {"value": mean over the seeds, "low", "high": its 95 % Student interval over
the seeds, "seeds": the value of each}. Each seed has its own initial weights, batches, prompts and uniforms, and drafters that are
compared share a seed's prompts and uniforms, so the interval of a difference is over paired differences. An entry nobody measured is
null.

Files, all with "study" (sizes and seeds), "made" (commit, machine, versions) and "claims": a list of {"claim", "difference" (a
statistic), "verdict": "appears" (the interval is above 0), "reversed" (below) or "not resolved"}, and "measured_drafters", how many of
the study's drafters and seeds the file rests on:

- `table1.json`: "tokens_per_round": domain -> temperature -> drafter -> statistic; "parameters": drafter -> trained parameters.
- `figure2.json`: "conditional" and "teacher_forced": domain -> drafter -> list by position of statistics, temperature 1.
- `figure3.json`: "tokens_per_round": domain -> drafter and depth -> statistic, temperature 1.
- `figure4.json`: "tokens_per_round": domain -> drafter -> gamma -> statistic; "latency": batch -> drafter -> gamma -> milliseconds and
  shares of a round (one measurement, medians over steps).
- `figure5.json`: domain -> list of {"threshold", "acceptance_rate", "tokens_per_round", "budget" (1 + verified drafts)}.
- `figure6.json`: "before", "after" STS: "ece", "auc", "brier" by position, and "reliability" by position: bins of all seeds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from dsspark.experiments.plan import DEEP_DFLASH, DFLASH, DSPARK, EAGLE3, TABLE_1, Spec, Study, depths, lengths
from dsspark.training.corpus import DOMAINS

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Key of a drafter -> seed -> what was measured."""
Json = dict[str, Any]
STUDENT_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % quantile of Student's t by degrees of freedom."""


def statistic(values: Sequence[float]) -> Json | None:
    """Return the mean of one value a seed and its 95 % Student interval; None where a seed has no value."""
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        return None
    mean, freedom = float(numbers.mean()), len(numbers) - 1
    half = (
        math.inf if freedom < 1 else STUDENT_975[min(freedom, 9)] * float(numbers.std(ddof=1)) / math.sqrt(freedom + 1)
    )
    bounds = (None, None) if math.isinf(half) else (round(mean - half, 5), round(mean + half, 5))
    return {
        "value": round(mean, 5),
        "low": bounds[0],
        "high": bounds[1],
        "seeds": [round(float(v), 5) for v in numbers],
    }


def claim(text: str, differences: Sequence[float]) -> Json:
    """Return a claim that a difference is above 0, with what the seeds say about it."""
    found = statistic(differences)
    verdict = "not resolved"
    if found is not None and found["low"] is not None:
        verdict = "appears" if found["low"] > 0 else "reversed" if found["high"] < 0 else verdict
    return {"claim": text, "difference": found, "verdict": verdict}


def tokens_per_round(counts: Mapping[str, Any]) -> float:
    """Return the accepted length of the counts of some rounds."""
    return float(1 + sum(counts["accepted"]) / counts["rounds"])


def conditional(counts: Mapping[str, Any]) -> list[float]:
    """Return P(x_k accepted | reached) by position; NaN where no round reached it."""
    return [a / r if r else math.nan for a, r in zip(counts["accepted"], counts["reached"], strict=True)]


class _Seeds:
    """The runs of some drafters, in the order of the seeds that all of them have."""

    def __init__(self, runs: Runs, specs: Sequence[Spec]) -> None:
        self.runs, self.specs = runs, specs
        self.seeds = sorted(set.intersection(*(set(runs.get(spec.key, {})) for spec in specs)))

    def lengths(self, spec: Spec, domain: str, temperature: str = "1") -> list[float]:
        """Return the accepted length of each seed."""
        return [tokens_per_round(self.runs[spec.key][seed]["rounds"][domain][temperature]) for seed in self.seeds]

    def gain(self, spec: Spec, base: Spec, domain: str, temperature: str = "1") -> list[float]:
        """Return by how many per cent the accepted length exceeds another drafter's, of each seed."""
        pairs = zip(self.lengths(spec, domain, temperature), self.lengths(base, domain, temperature), strict=True)
        return [100 * (a / b - 1) for a, b in pairs]

    def by_position(self, spec: Spec, read: Callable[[Mapping[str, Any]], Sequence[float | None]]) -> list[list[float]]:
        """Return, for each position, what `read` finds in each seed's run."""
        rows = [[math.nan if v is None else v for v in read(self.runs[spec.key][seed])] for seed in self.seeds]
        return [[row[k] for row in rows] for k in range(spec.block_size)]


def table_1(runs: Runs, study: Study) -> Json:
    """Return accepted lengths of all drafters, and the gains the paper states."""
    table: Json = {d: {t: {} for t in ("0", "1")} for d in DOMAINS}
    for domain in DOMAINS:
        for temperature, row in table[domain].items():
            for spec in TABLE_1:
                row[spec.key] = statistic(_Seeds(runs, (spec,)).lengths(spec, domain, temperature))
    claims = []
    for base, name in ((DFLASH, "DFlash"), (EAGLE3, "Eagle3")):
        both = _Seeds(runs, (DSPARK, base))
        gains = {d: both.gain(DSPARK, base, d) for d in DOMAINS}
        for domain, values in gains.items():
            claims.append(claim(f"DSpark's accepted length exceeds {name}'s on {domain}, %", values))
        macro = [sum(column) / len(column) for column in zip(*gains.values(), strict=True)]
        claims.append(claim(f"DSpark's accepted length exceeds {name}'s, mean of the domains, %", macro))
    parameters = {s.key: run["parameters"] for s in TABLE_1 for run in runs.get(s.key, {}).values()}
    return {"tokens_per_round": table, "parameters": parameters, "claims": claims}


def figure_2(runs: Runs, study: Study) -> Json:
    """Return acceptance by position: the decay of a parallel drafter and the stability of DSpark."""
    result: Json = {"conditional": {}, "teacher_forced": {}}
    claims = []
    for domain in DOMAINS:
        found = _acceptance(_Seeds(runs, (EAGLE3, DFLASH, DSPARK)), domain)
        for measure, by_drafter in found.items():
            result[measure][domain] = {key: [statistic(v) for v in columns] for key, columns in by_drafter.items()}
        forced = found["teacher_forced"]
        drop = {k: [100 * (a - b) for a, b in zip(v[0], v[-1], strict=True)] for k, v in forced.items()}
        fall = f"teacher-forced acceptance falls along the block on {domain}, points"
        claims.append(claim(f"DFlash's {fall}", drop[DFLASH.key]))
        kept = [a - b for a, b in zip(drop[DFLASH.key], drop[DSPARK.key], strict=True)]
        claims.append(claim(f"DSpark's falls by less than DFlash's on {domain}, points", kept))
        start = [100 * (a - b) for a, b in zip(forced[DSPARK.key][0], forced[EAGLE3.key][0], strict=True)]
        claims.append(claim(f"DSpark accepts more at position 1 than Eagle3 on {domain}, points", start))
    return result | {"claims": claims}


def _acceptance(seeds: _Seeds, domain: str) -> dict[str, dict[str, list[list[float]]]]:
    """Return measure -> drafter -> position -> one acceptance a seed."""
    read: dict[str, Callable[[Mapping[str, Any]], Sequence[float | None]]] = {
        "conditional": lambda run: conditional(run["rounds"][domain]["1"]),
        "teacher_forced": lambda run: cast("list[float | None]", run["teacher_forced"][domain]),
    }
    return {m: {spec.key: seeds.by_position(spec, of) for spec in seeds.specs} for m, of in read.items()}


def figure_3(runs: Runs, study: Study) -> Json:
    """Return accepted lengths by depth."""
    specs = depths(study.reduced)
    table = {d: {s.key: statistic(_Seeds(runs, (s,)).lengths(s, d)) for s in specs} for d in DOMAINS}
    both = _Seeds(runs, (DSPARK, DEEP_DFLASH))
    claims = [
        claim(f"2-layer DSpark's accepted length exceeds 5-layer DFlash's on {d}, %", both.gain(DSPARK, DEEP_DFLASH, d))
        for d in DOMAINS
    ]
    return {"tokens_per_round": table, "claims": claims}


def figure_4(runs: Runs, study: Study, latency: Json | None) -> Json:
    """Return accepted lengths by gamma, the gain's growth with it, and where a round's time goes."""
    table: Json = {domain: {"dflash": {}, "dspark": {}} for domain in DOMAINS}
    pairs = list(zip(*(lengths(name, study.reduced) for name in ("dflash", "dspark")), strict=True))
    for domain in DOMAINS:
        for base, spec in pairs:
            both = _Seeds(runs, (base, spec))
            table[domain]["dflash"][str(base.block_size)] = statistic(both.lengths(base, domain))
            table[domain]["dspark"][str(spec.block_size)] = statistic(both.lengths(spec, domain))
    claims = []
    every = _Seeds(runs, [spec for pair in pairs for spec in pair])
    for domain in DOMAINS:
        short, long = (every.gain(spec, base, domain) for base, spec in (pairs[0], pairs[-1]))
        growth = [b - a for a, b in zip(short, long, strict=True)]
        claims.append(claim(f"DSpark's gain over DFlash grows from gamma 3 to 15 on {domain}, points", growth))
    return {"tokens_per_round": table, "latency": latency, "claims": claims}


def figure_5(runs: Runs, study: Study) -> Json:
    """Return what a confidence threshold does to DSpark's verified drafts."""
    seeds = _Seeds(runs, (DSPARK,))
    result, claims = Json(), []
    for domain in DOMAINS:
        sweeps = [runs[DSPARK.key][seed]["thresholds"][domain] for seed in seeds.seeds]
        points = []
        for index, threshold in enumerate(study.thresholds):
            counts = [sweep[index] for sweep in sweeps]
            points.append(
                {
                    "threshold": threshold,
                    "acceptance_rate": statistic([_acceptance_rate(c) for c in counts]),
                    "tokens_per_round": statistic([tokens_per_round(c) for c in counts]),
                    "budget": statistic([1 + sum(c["verified"]) / c["rounds"] for c in counts]),
                }
            )
        result[domain] = points
        rises = [100 * (_acceptance_rate(s[-1]) - _acceptance_rate(s[0])) for s in sweeps]
        top = study.thresholds[-1]
        claims.append(claim(f"A threshold of {top} raises the share of accepted drafts on {domain}, points", rises))
    return {"thresholds": result, "claims": claims}


def _acceptance_rate(counts: Mapping[str, Any]) -> float:
    verified = sum(counts["verified"])
    return sum(counts["accepted"]) / verified if verified else math.nan


def figure_6(runs: Runs, study: Study) -> Json:
    """Return the reliability of DSpark's confidence before and after Sequential Temperature Scaling."""
    seeds = _Seeds(runs, (DSPARK,))
    judged = [runs[DSPARK.key][seed]["confidence"] for seed in seeds.seeds]
    result: Json = {}
    for stage in ("before", "after"):
        result[stage] = {
            metric: [statistic(_numbers(c)) for c in zip(*(j[stage][metric]["value"] for j in judged), strict=True)]
            for metric in ("ece", "auc", "brier")
        }
        result[stage]["reliability"] = [
            _joined_bins([j[stage]["reliability"][k] for j in judged])
            for k in range(DSPARK.block_size if judged else 0)
        ]
    means = {
        stage: [float(np.mean(_numbers(j[stage]["ece"]["value"]))) for j in judged] for stage in ("before", "after")
    }
    lower = [100 * (a - b) for a, b in zip(means["before"], means["after"], strict=True)]
    auc = [float(np.mean(_numbers(j["after"]["auc"]["value"]))) - 0.5 for j in judged]
    return result | {
        "claims": [
            claim("STS lowers the mean ECE over positions, points", lower),
            claim("The confidence orders rounds better than chance, mean AUC - 0.5", auc),
        ]
    }


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _joined_bins(parts: Sequence[Mapping[str, Any]]) -> Json:
    """Return the bins of several seeds as one: counts add up, means are weighted by them."""
    count = np.sum([part["count"] for part in parts], axis=0)
    joined: Json = {"count": count.tolist()}
    for name in ("mean_probability", "mean_outcome"):
        sums = [np.nan_to_num(_numbers(part[name])) * np.asarray(part["count"]) for part in parts]
        means = np.sum(sums, axis=0) / np.maximum(count, 1)
        joined[name] = [round(float(m), 5) if n else None for m, n in zip(means, count, strict=True)]
    return joined


def assemble(runs: Runs, study: Study, latency: Json | None) -> dict[str, Json]:
    """Return every result by the name of its file; see the module for what each holds."""
    return {
        "table1": table_1(runs, study),
        "figure2": figure_2(runs, study),
        "figure3": figure_3(runs, study),
        "figure4": figure_4(runs, study, latency),
        "figure5": figure_5(runs, study),
        "figure6": figure_6(runs, study),
    }

"""Everything one run of the demo found out, and the summary that other programs read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dsspark.cost_table import CostTable
from dsspark.demo.measure import Calibration, GreedyCheck, LawCheck, Rounds
from dsspark.demo.timing import Speed, SweepPoint
from dsspark.demo.transcripts import Transcript
from dsspark.statistics import RoundStatistics


@dataclass(frozen=True, kw_only=True)
class Results:
    """One run of the demo.

    Attributes:
        transcripts: the texts shown.
        rounds: of the drafter with the Markov head.
        rounds_parallel_only: of its twin without one, on the same prompts.
        calibration: of the confidence head; None for a drafter without one.
        cost_table: of this machine.
        sweep: the schedulers, by number of requests.
        speeds: wall-clock; the first one is the headline.
        greedy, law: the two checks of losslessness.
        settings: what the run was asked to do.
        environment: machine and versions.
        provenance: of the weights, as shipped with them.
        seconds: how long the run took.
    """

    transcripts: list[Transcript]
    rounds: Rounds
    rounds_parallel_only: Rounds
    calibration: Calibration | None
    cost_table: CostTable
    sweep: list[SweepPoint]
    speeds: list[Speed]
    greedy: GreedyCheck
    law: LawCheck
    settings: dict[str, Any]
    environment: dict[str, str]
    provenance: dict[str, Any]
    seconds: float


def mean(values: list[float]) -> float:
    """Return the mean over the positions."""
    return math.fsum(values) / len(values)


def _acceptance(statistics: RoundStatistics) -> dict[str, Any]:
    return {
        "rounds": statistics.rounds,
        "tokens_per_round": statistics.tokens_per_round,
        "conditional": statistics.conditional_acceptance,
        "cumulative": statistics.cumulative_acceptance,
    }


def _by_domain(rounds: Rounds) -> dict[str, Any]:
    return {name: _acceptance(statistics) for name, statistics in {**rounds.by_domain, "all": rounds.total}.items()}


def summary(results: Results) -> dict[str, Any]:
    """Return the content of summary.json; a value that does not exist (no rounds reached a position) is null.

    The keys of the first group are fixed; the others give detail.
    """
    total, parallel = results.rounds.total, results.rounds_parallel_only.total
    calibration, law, greedy, headline = results.calibration, results.law, results.greedy, results.speeds[0]
    found: dict[str, Any] = {
        "tokens_per_round": total.tokens_per_round,
        "tokens_per_round_parallel_only": parallel.tokens_per_round,
        "acceptance_by_position": total.conditional_acceptance,
        "ece_before": mean(calibration.ece_before) if calibration else None,
        "ece_after": mean(calibration.ece_after) if calibration else None,
        "speedup_vs_autoregressive": headline.median,
        "greedy_matches_target": greedy.different == 0,
        "max_law_error": law.max_law_error_in_eps,
        "max_law_error_ulps": law.max_threshold_ulps,
        "tokens_per_round_by_domain": {d: s.tokens_per_round for d, s in results.rounds.by_domain.items()},
        "tokens_per_round_parallel_only_by_domain": {
            domain: statistics.tokens_per_round for domain, statistics in results.rounds_parallel_only.by_domain.items()
        },
        "acceptance_by_position_parallel_only": parallel.conditional_acceptance,
        "cumulative_acceptance_by_position": total.cumulative_acceptance,
        "cumulative_acceptance_by_position_parallel_only": parallel.cumulative_acceptance,
        "acceptance": {"markov": _by_domain(results.rounds), "parallel_only": _by_domain(results.rounds_parallel_only)},
        "calibration": None
        if calibration is None
        else {
            "rounds": calibration.samples,
            "ece_before_by_position": calibration.ece_before,
            "ece_after_by_position": calibration.ece_after,
            "ece_of_a_perfect_head_by_position": calibration.noise_floor,
            "auroc_by_position": calibration.auroc,
            "sts_temperatures": calibration.temperatures,
        },
        "greedy": asdict(greedy),
        "law": asdict(law),
        "speed": [{**asdict(speed), "median_ratio": speed.median} for speed in results.speeds],
        "schedule": [asdict(point) for point in results.sweep],
        "cost_table_seconds": results.cost_table.seconds.tolist(),
        "settings": results.settings,
        "environment": results.environment,
        "weights": results.provenance,
        "seconds": results.seconds,
    }
    cleaned: dict[str, Any] = _null_for_nan(found)
    return cleaned


def _null_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_for_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_null_for_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Everything `python -m dsspark evaluate` measures of a folder of weights, as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dsspark.evaluation.confidence import judge_confidence
from dsspark.evaluation.counts import PromptCounts
from dsspark.evaluation.latency import measure_latency
from dsspark.evaluation.teacher import drawn_texts, summarise_texts, teacher_forced_acceptance
from dsspark.models.drafter import DSparkDrafter, TeacherTexts
from dsspark.models.pretrained import MODELS, load_pretrained
from dsspark.models.target import TargetLM
from dsspark.serving.policies import ConfidenceThreshold, Policy
from dsspark.training.corpus import DOMAINS, Document, Domain, held_out_prompts
from dsspark.training.evaluate import RoundRecord, encode, pooled, run_rounds
from dsspark.training.pretrain import load_streams
from dsspark.training.run import Plan, commit_of_code, describe_machine


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How much is measured, and on what.

    The prompts are the first of those that training kept for its own measurement (after the ones STS was fitted on), with the same
    seeds: the shipped weights give the accepted lengths of their provenance again.

    Attributes:
        prompts: of each domain.
        max_new_tokens: a text ends there or at EOS.
        domains: of the corpus.
        temperatures: of the rollouts; 0 and 1 are also those of the teacher-forced acceptance.
        thresholds: of the survival, with `sweep_prompts` prompts each.
        sweep_prompts: of each domain and threshold.
        texts: held-out texts that the target continues, by domain and temperature, for the teacher-forced acceptance.
        latency_batches: batch sizes that are timed; none leaves it out.
    """

    prompts: int = 24
    max_new_tokens: int = 160
    domains: tuple[Domain, ...] = DOMAINS
    temperatures: tuple[float, ...] = (0.0, 1.0)
    thresholds: tuple[float, ...] = (0.0, 0.3, 0.6, 0.8, 0.9)
    sweep_prompts: int = 8
    texts: int = 24
    latency_batches: tuple[int, ...] = (1, 16)

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "sweep_prompts", "texts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 1 or more")


Texts = dict[Domain, dict[str, TeacherTexts]]
"""Text the target drew, by domain and temperature."""
REDUCED = Protocol(prompts=8, max_new_tokens=64, sweep_prompts=4, texts=8)
"""A tenth of the work."""
_PREFIX, _LENGTH = 64, 128
_SKIPPED = Plan().calibration_prompts


def prompts_of(domain: Domain, count: int) -> list[Document]:
    """Return the first `count` of the prompts that training measured on; beyond them, prompts nothing was measured on."""
    chosen = held_out_prompts(domain, _SKIPPED + max(count, _SKIPPED))
    return chosen[_SKIPPED : _SKIPPED + count]


def rollout(
    target: TargetLM,
    drafter: DSparkDrafter,
    domain: Domain,
    temperature: float,
    *,
    prompts: int,
    max_new_tokens: int,
    policy: Policy | None = None,
) -> RoundRecord:
    """Decode held-out prompts of a domain with the seeds of training's own measurement."""
    return run_rounds(
        target,
        drafter,
        prompts_of(domain, prompts),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=(DOMAINS.index(domain) + 1) * 100_000,
        policy=policy,
    )


def evaluate(
    weights: Path | str | None = None, protocol: Protocol | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Measure the drafters of a folder of weights.

    Args:
        weights: written by `python -m dsspark train`; the shipped ones if None.
        protocol: how much; `Protocol()` if None.
        console: where progress goes.

    Returns:
        "protocol", "made" (commit, machine) and "drafters": name -> {"rounds": domain -> temperature -> summary and "by_prompt"
        counts; "teacher_forced": domain -> temperature -> acceptance by position; "confidence": see `judge_confidence`, over all
        domains at temperature 1; "thresholds": domain -> list of summaries, for a drafter whose STS was fitted; "latency": batch ->
        milliseconds and shares}. An         estimate is {"value", "low", "high"}: 95 % bootstrap intervals over prompts.
    """
    protocol, console = protocol or Protocol(), console or Console()
    target, *models = load_pretrained(weights)
    drafters = dict(zip(MODELS[1:], models, strict=True))
    texts = _draw_texts(target, protocol)
    return {
        "protocol": asdict(protocol),
        "made": {
            "weights": "shipped" if weights is None else "given",
            "commit": commit_of_code(),
            "machine": describe_machine(),
        },
        "drafters": {
            name: _evaluate_one(target, model, name, protocol, texts, console) for name, model in drafters.items()
        },
    }


def _evaluate_one(
    target: TargetLM, drafter: DSparkDrafter, name: str, protocol: Protocol, texts: Texts, console: Console
) -> dict[str, Any]:
    rounds: dict[str, dict[str, Any]] = {}
    sampled: list[RoundRecord] = []
    for domain in protocol.domains:
        rounds[domain] = {}
        for temperature in protocol.temperatures:
            console.print(f"{name}: {domain}, temperature {temperature:g} ...")
            record = rollout(
                target, drafter, domain, temperature, prompts=protocol.prompts, max_new_tokens=protocol.max_new_tokens
            )
            counts = PromptCounts.of(record, len(record.tokens))
            rounds[domain][f"{temperature:g}"] = counts.summary() | {"by_prompt": counts.as_dict()}
            if temperature == 1:
                sampled.append(record)
    result: dict[str, Any] = {"rounds": rounds, "teacher_forced": _teacher_forced(target, drafter, texts)}
    if drafter.confidence_head is not None and sampled:
        result["confidence"] = judge_confidence(pooled(sampled), drafter.sts_temperatures)
        if drafter.sts_temperatures is not None and bool((drafter.sts_temperatures != 1).any()):
            result["thresholds"] = {domain: _sweep(target, drafter, domain, protocol) for domain in protocol.domains}
    result["latency"] = {str(batch): _latency(target, drafter, batch) for batch in protocol.latency_batches}
    return result


def _draw_texts(target: TargetLM, protocol: Protocol) -> Texts:
    streams = load_streams(held_out=True, num_math=500)
    return {
        domain: {
            f"{temperature:g}": drawn_texts(
                target, streams[domain], count=protocol.texts, prefix=_PREFIX, length=_LENGTH, temperature=temperature
            )
            for temperature in protocol.temperatures
            if temperature in (0.0, 1.0)
        }
        for domain in protocol.domains
    }


def _teacher_forced(target: TargetLM, drafter: DSparkDrafter, texts: Texts) -> dict[str, dict[str, Any]]:
    return {
        domain: {
            temperature: summarise_texts(
                teacher_forced_acceptance(target, drafter, drawn, prefix=_PREFIX, temperature=float(temperature))
            )
            for temperature, drawn in by_temperature.items()
        }
        for domain, by_temperature in texts.items()
    }


def _sweep(target: TargetLM, drafter: DSparkDrafter, domain: Domain, protocol: Protocol) -> list[dict[str, Any]]:
    """Return real rollouts at temperature 1 under each threshold of the survival (paper figure 5)."""
    points = []
    for threshold in protocol.thresholds:
        record = rollout(
            target,
            drafter,
            domain,
            1.0,
            prompts=protocol.sweep_prompts,
            max_new_tokens=protocol.max_new_tokens,
            policy=ConfidenceThreshold(threshold),
        )
        counts = PromptCounts.of(record, len(record.tokens))
        budget = 1 + counts.verified.sum() / counts.rounds.sum()
        points.append({"threshold": threshold, "budget": round(float(budget), 5)} | counts.summary())
    return points


def _latency(target: TargetLM, drafter: DSparkDrafter, batch: int) -> dict[str, float]:
    documents: Sequence[Document] = prompts_of("math", batch)
    return measure_latency(target, drafter, [encode(document.prompt) for document in documents])

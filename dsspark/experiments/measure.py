"""What is measured of one trained drafter: rollouts, teacher-forced acceptance, confidence, thresholds."""

from __future__ import annotations

from typing import Any

import torch

from dsspark.evaluation.confidence import judge_confidence
from dsspark.evaluation.counts import PromptCounts, as_json
from dsspark.evaluation.teacher import drawn_texts, teacher_forced_acceptance
from dsspark.experiments.plan import DSPARK, Spec, Study
from dsspark.models.drafter import DSparkDrafter, TeacherTexts
from dsspark.models.drafters import AnyDrafter, view_for
from dsspark.models.target import TargetLM
from dsspark.reference.calibration import fit_sts
from dsspark.serving.policies import ConfidenceThreshold, Policy
from dsspark.training.corpus import DOMAINS, Document, Domain, held_out_prompts
from dsspark.training.evaluate import RoundRecord, pooled, run_rounds
from dsspark.training.pretrain import load_streams


class Exam:
    """Held-out prompts and texts, the same for every drafter of a seed and others for every seed.

    Args:
        target: whose text is decoded.
        study: how much of everything.
    """

    def __init__(self, target: TargetLM, study: Study) -> None:
        self.target, self.study = target, study
        self._prompts = {domain: self._deal(domain) for domain in DOMAINS}
        streams = load_streams(held_out=True, num_math=200)
        self.texts: dict[Domain, TeacherTexts] = {
            domain: drawn_texts(
                target,
                streams[domain],
                count=study.texts,
                prefix=study.text_prefix,
                length=study.text_length,
                temperature=1.0,
            )
            for domain in DOMAINS
        }

    def _deal(self, domain: Domain) -> dict[int, list[Document]]:
        study, size = self.study, self.study.prompts + self.study.fit_prompts
        documents = held_out_prompts(domain, size * len(study.seeds))
        return {seed: documents[index * size : (index + 1) * size] for index, seed in enumerate(study.seeds)}

    def prompts(self, domain: Domain, seed: int, *, fit: bool = False) -> list[Document]:
        """Return a seed's prompts of a domain: those that are judged, or those that STS is fitted on."""
        dealt = self._prompts[domain][seed]
        return dealt[self.study.prompts :] if fit else dealt[: self.study.prompts]

    def rounds(
        self,
        drafter: AnyDrafter,
        domain: Domain,
        seed: int,
        temperature: float,
        *,
        fit: bool = False,
        policy: Policy | None = None,
    ) -> RoundRecord:
        """Decode a seed's prompts of a domain."""
        return run_rounds(
            view_for(self.target, drafter),
            drafter,
            self.prompts(domain, seed, fit=fit),
            max_new_tokens=self.study.max_new_tokens,
            temperature=temperature,
            seed=1_000_000 * (seed + 1) + 100_000 * fit + 10_000 * DOMAINS.index(domain),
            policy=policy,
        )


def totals(record: RoundRecord) -> dict[str, Any]:
    """Return the counts of a record over all its prompts."""
    counts = PromptCounts.of(record, int(record.prompt_ids.max()) + 1)
    return {name: values.sum(axis=0).tolist() for name, values in vars(counts).items()}


def measure_drafter(exam: Exam, spec: Spec, drafter: AnyDrafter, seed: int) -> dict[str, Any]:
    """Return everything measured of a trained drafter.

    Returns:
        "rounds": domain -> temperature -> counts ("rounds", and "verified", "reached", "accepted" by position);
        "teacher_forced": domain -> mean acceptance by position at temperature 1; for the DSpark of Table 1 also "confidence"
        (see `judge_confidence`) and "thresholds": domain -> one dict of counts a threshold.
    """
    rounds: dict[str, dict[str, Any]] = {}
    sampled: list[RoundRecord] = []
    teacher: dict[str, Any] = {}
    for domain in DOMAINS:
        sampled.append(exam.rounds(drafter, domain, seed, 1.0))
        rounds[domain] = {"1": totals(sampled[-1]), "0": totals(exam.rounds(drafter, domain, seed, 0.0))}
        acceptance = teacher_forced_acceptance(
            exam.target, drafter, exam.texts[domain], prefix=exam.study.text_prefix, anchors_per_text=12
        )
        teacher[domain] = as_json(torch.from_numpy(acceptance).nanmean(dim=0))
    result: dict[str, Any] = {"rounds": rounds, "teacher_forced": teacher}
    if spec == DSPARK and isinstance(drafter, DSparkDrafter):
        fitted = pooled([exam.rounds(drafter, domain, seed, 1.0, fit=True) for domain in DOMAINS])
        assert fitted.confidence_logits is not None
        temperatures = fit_sts(fitted.confidence_logits, fitted.accepted).temperatures
        drafter.set_sts_temperatures(temperatures)
        result["confidence"] = judge_confidence(pooled(sampled), temperatures, resamples=20)
        result["thresholds"] = {domain: _threshold_sweep(exam, drafter, domain, seed) for domain in DOMAINS}
    return result


def _threshold_sweep(exam: Exam, drafter: AnyDrafter, domain: Domain, seed: int) -> list[dict[str, Any]]:
    """Return real rollouts under each confidence threshold (paper figure 5)."""
    return [
        {"threshold": threshold}
        | totals(exam.rounds(drafter, domain, seed, 1.0, policy=ConfidenceThreshold(threshold)))
        for threshold in exam.study.thresholds
    ]

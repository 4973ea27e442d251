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
from dsspark.training.evaluate import RoundRecord, pooled, run_rounds, split
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
        self, drafter: AnyDrafter, seed: int, temperature: float, *, fit: bool = False, policy: Policy | None = None
    ) -> dict[Domain, RoundRecord]:
        """Decode a seed's prompts of all domains in one batch."""
        prompts = {domain: self.prompts(domain, seed, fit=fit) for domain in DOMAINS}
        record = run_rounds(
            view_for(self.target, drafter),
            drafter,
            [document for part in prompts.values() for document in part],
            max_new_tokens=self.study.max_new_tokens,
            temperature=temperature,
            seed=1_000_000 * (seed + 1) + 100_000 * fit,
            batch_size=64,
            policy=policy,
        )
        return dict(zip(prompts, split(record, [len(part) for part in prompts.values()]), strict=True))


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
    sampled, greedy = (exam.rounds(drafter, seed, temperature) for temperature in (1.0, 0.0))
    result: dict[str, Any] = {
        "rounds": {domain: {"1": totals(sampled[domain]), "0": totals(greedy[domain])} for domain in DOMAINS},
        "teacher_forced": {domain: _teacher_forced(exam, drafter, domain) for domain in DOMAINS},
    }
    if spec == DSPARK and isinstance(drafter, DSparkDrafter):
        fitted = pooled(list(exam.rounds(drafter, seed, 1.0, fit=True).values()))
        assert fitted.confidence_logits is not None
        temperatures = fit_sts(fitted.confidence_logits, fitted.accepted).temperatures
        drafter.set_sts_temperatures(temperatures)
        result["confidence"] = judge_confidence(pooled(list(sampled.values())), temperatures, resamples=20)
        result["thresholds"] = _threshold_sweep(exam, drafter, seed)
    return result


def _teacher_forced(exam: Exam, drafter: AnyDrafter, domain: Domain) -> Any:
    """Return the mean acceptance by position over a domain's texts."""
    prefix, texts = exam.study.text_prefix, exam.texts[domain]
    acceptance = teacher_forced_acceptance(exam.target, drafter, texts, prefix=prefix, anchors_per_text=12)
    return as_json(torch.from_numpy(acceptance).nanmean(dim=0))


def _threshold_sweep(exam: Exam, drafter: AnyDrafter, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return real rollouts under each confidence threshold (paper figure 5)."""
    sweep: dict[str, list[dict[str, Any]]] = {domain: [] for domain in DOMAINS}
    for threshold in exam.study.thresholds:
        records = exam.rounds(drafter, seed, 1.0, policy=ConfidenceThreshold(threshold))
        for domain, record in records.items():
            sweep[domain].append({"threshold": threshold} | totals(record))
    return sweep

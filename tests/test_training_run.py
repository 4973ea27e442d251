"""Measurement, the whole run, its command, and what it shipped."""

from __future__ import annotations

import argparse
import json
import re

import pytest
import torch
from rich.console import Console

from dsspark.decoding import generate
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.pretrained import WEIGHTS_DIRECTORY, load_pretrained, load_provenance
from dsspark.models.target import BOS_ID, EOS_ID, TargetLM
from dsspark.reference.calibration import expected_calibration_error
from dsspark.training import command
from dsspark.training.corpus import DOMAINS, held_out_prompts
from dsspark.training.evaluate import calibration_errors, decode, encode, run_rounds
from dsspark.training.run import run_training, small_plan

QUIET = Console(quiet=True)
PLAN = small_plan()


@pytest.fixture
def target(generator: torch.Generator) -> TargetLM:
    """A tiny target with weights large enough that its laws are far from uniform."""
    model = TargetLM(PLAN.target, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() >= 2 else 1.0)
    return model.requires_grad_(False)


class InterruptedError_(KeyboardInterrupt):
    """Ctrl-C at a chosen step."""


def test_prompts_encode_to_bos_and_bytes_and_back():
    assert encode(b"\x00\xffa") == [BOS_ID, 0, 255, 97]
    assert decode([BOS_ID, *b"text", EOS_ID]) == b"text"


def test_recorded_rounds_agree_with_the_texts(target, generator):
    """One record a round, outcomes that never rise, and every emitted token accounted for."""
    drafter = DSparkDrafter(target, PLAN.drafter, generator)
    prompts = held_out_prompts("math", 5)
    record = run_rounds(target, drafter, prompts, max_new_tokens=9, seed=3, batch_size=2)
    assert record.confidence_logits.shape == record.accepted.shape == (record.statistics.rounds, 3)
    assert (record.accepted[:, 1:] <= record.accepted[:, :-1]).all()
    assert record.statistics.emitted == record.statistics.rounds + int(record.accepted.sum())
    assert sum(map(len, record.tokens)) <= record.statistics.emitted
    alone = generate(target, drafter, [encode(prompts[4].prompt)], 9, 1.0, seeds=[3 + 4], stop_tokens=(EOS_ID,))
    assert alone.tokens[0] == record.tokens[4]


def test_calibration_errors_are_those_of_the_prefix(generator):
    logits = torch.randn(400, 2, generator=generator)
    accepted = torch.rand(400, 2, generator=generator).cummin(dim=1).values < 0.5
    accepted = accepted.int().cummin(dim=1).values.bool()
    temperatures = torch.tensor([2.0, 0.5])
    prefix = torch.sigmoid(logits / temperatures).cumprod(dim=1)
    want = [float(expected_calibration_error(prefix[:, k].contiguous(), accepted[:, k].contiguous())) for k in range(2)]
    assert calibration_errors(logits, accepted, temperatures) == pytest.approx(want)
    assert calibration_errors(logits, accepted, None) != pytest.approx(want)


def test_interrupted_run_resumes_to_the_same_shipped_files(tmp_path, monkeypatch):
    """A whole small run, cut in the target's stage and again in the drafters', ships the bytes of an uninterrupted one."""
    want = run_training(tmp_path / "whole", small=True, console=QUIET)
    from dsspark.training import distill, pretrain

    for module, name, at in ((pretrain, "next_byte_loss", 5), (distill, "block_losses", 7)):
        real, calls = getattr(module, name), []

        def interrupted(*args, real=real, calls=calls, at=at):
            calls.append(1)
            if len(calls) == at:
                raise InterruptedError_
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            with pytest.raises(InterruptedError_):
                run_training(tmp_path / "cut", small=True, console=QUIET)
    got = run_training(tmp_path / "cut", small=True, console=QUIET)
    for name in ("target", "drafter", "parallel_only"):
        whole, cut = (tmp_path / folder / "weights" / f"{name}.safetensors" for folder in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes()
    assert got["tokens_per_round"] == want["tokens_per_round"]

    _, drafter, parallel_only = load_pretrained(tmp_path / "cut" / "weights")
    assert drafter.sts_temperatures.tolist() == got["sts_temperatures"]
    assert parallel_only.markov_head is None
    provenance = json.loads((tmp_path / "cut" / "weights" / "provenance.json").read_text())
    for name in (
        "seed",
        "commit",
        "corpus",
        "held_out_nats_per_byte",
        "tokens_per_round",
        "ece_before",
        "ece_after",
        "minutes",
    ):
        assert name in provenance
    assert not re.search(r"/(home|tmp|work|root|Users)/", json.dumps(provenance))


def test_command_trains_and_reports(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--small", "--out", str(tmp_path), "--target-steps", "3", "--drafter-steps", "2"])
    assert command.run(args) == 0
    shown = capsys.readouterr().out
    assert "math, temperature 1: tokens a round: drafter" in shown
    assert "ece_after" in shown
    assert (tmp_path / "weights" / "drafter.safetensors").exists()
    with pytest.raises(ValueError, match=r"^target_steps: got 0"):
        run_training(tmp_path, small=True, target_steps=0, console=QUIET)


def ratio(domain: str, temperature: str) -> float:
    """Return the shipped weights' measured tokens a round, Markov over parallel-only."""
    by_drafter = load_provenance()["tokens_per_round"][domain][temperature]
    return by_drafter["drafter"] / by_drafter["parallel_only"]


def test_shipped_weights_are_small_calibrated_and_described():
    """At most 16 MB; mean ECE after STS at most 2 %; the temperatures in the file are the ones described."""
    files = [path for path in WEIGHTS_DIRECTORY.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    provenance = load_provenance()
    assert set(provenance["tokens_per_round"]) == set(DOMAINS)
    assert sum(provenance["ece_after"]) / len(provenance["ece_after"]) <= 0.02
    assert load_pretrained()[1].sts_temperatures.tolist() == pytest.approx(provenance["sts_temperatures"])


def test_shipped_drafter_is_measured_above_its_twin():
    """On every domain, sampled and greedy; on math, where wording is drawn, by a fifth."""
    assert all(ratio(domain, temperature) > 1 for domain in DOMAINS for temperature in ("0", "1"))
    assert ratio("math", "1") >= 1.2


def test_shipped_drafter_beats_its_parallel_twin_on_held_out_math():
    """On prompts that neither training nor the calibration saw; room is left for the noise of 24 prompts."""
    target, drafter, parallel_only = load_pretrained()
    assert DrafterConfig() == drafter.config
    prompts = held_out_prompts("math", 24, seed=50)
    markov, parallel = (
        run_rounds(target, model, prompts, max_new_tokens=100, temperature=1.0).statistics.tokens_per_round
        for model in (drafter, parallel_only)
    )
    assert markov > 1.12 * parallel
    assert markov > 4.0

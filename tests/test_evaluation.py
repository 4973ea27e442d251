"""What `evaluate` computes: counts and their intervals, teacher-forced acceptance, confidence, latency, the command, the shipped numbers."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_models import tiny_drafter, tiny_target

from dsspark.evaluation import command, latency, teacher
from dsspark.evaluation.confidence import judge_confidence
from dsspark.evaluation.counts import PromptCounts, summarise, weights
from dsspark.evaluation.run import Protocol, evaluate, rollout
from dsspark.models.drafter import TeacherTexts
from dsspark.models.drafters import build_drafter, drafter_config
from dsspark.models.pretrained import load_pretrained, load_provenance
from dsspark.models.target import EOS_ID
from dsspark.statistics import RoundStatistics
from dsspark.training.evaluate import RoundRecord, calibration_errors, pooled, split
from dsspark.training.run import run_training

SHIPPED = Path(__file__).parents[1] / "benchmarks" / "results" / "evaluate" / "evaluate.json"


def record_of(accepted, prompt_ids, lengths=None, logits=None):
    """Return a record of rounds that accepted `accepted` drafts each, gamma 3."""
    count = torch.tensor(accepted)
    lengths = torch.full_like(count, 3) if lengths is None else torch.tensor(lengths)
    statistics = RoundStatistics(3)
    statistics.add(lengths, count)
    return RoundRecord(
        statistics=statistics,
        confidence_logits=logits,
        accepted=torch.arange(3) < count[:, None],
        lengths=lengths,
        prompt_ids=torch.tensor(prompt_ids),
        tokens=[[]] * (max(prompt_ids) + 1),
    )


def test_counts_by_prompt_add_up_to_the_statistics():
    record = record_of([3, 0, 1, 2, 1], [0, 1, 0, 2, 2], lengths=[3, 2, 1, 3, 3])
    counts = PromptCounts.of(record, 3)
    assert counts.rounds.tolist() == [2, 1, 2]
    assert counts.verified.tolist() == [[2, 1, 1], [1, 1, 0], [2, 2, 2]]
    assert counts.accepted.tolist() == [[2, 1, 1], [0, 0, 0], [2, 1, 0]]
    statistics, alone = record.statistics, np.ones((1, 3))
    assert counts.tokens_per_round(alone)[0] == pytest.approx(statistics.tokens_per_round)
    assert counts.conditional(alone)[0] == pytest.approx(statistics.conditional_acceptance)
    assert counts.acceptance_rate(alone)[0] == pytest.approx(1 - statistics.waste)
    for name in ("reached", "verified", "accepted"):
        assert getattr(counts, name).sum(axis=0).tolist() == getattr(statistics, name).tolist()
    assert PromptCounts.from_json(json.loads(json.dumps(counts.as_dict()))).as_dict() == counts.as_dict()
    assert PromptCounts.joined([counts.first(1), counts.first(2)]).rounds.tolist() == [2, 2, 1]


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Texts with a hard or easy stretch each: 95 % intervals over prompts cover the truth 95 times in 100; over rounds they do not."""
    rng, truth, over_prompts, over_rounds = np.random.default_rng(0), 1 + 3 * 0.5, 0, 0
    for trial in range(300):
        ease = rng.choice((0.2, 0.8), size=60)
        accepted = rng.binomial(3, ease[:, None], size=(60, 10))
        counts = PromptCounts.of(record_of(accepted.flatten().tolist(), np.repeat(np.arange(60), 10).tolist()), 60)
        found = summarise(counts.tokens_per_round(weights(60, 400, seed=trial)))
        over_prompts += found["low"] <= truth <= found["high"]
        half = 1.96 * accepted.std() / np.sqrt(600)
        over_rounds += abs(1 + accepted.mean() - truth) <= half
    assert 0.91 < over_prompts / 300 < 0.985
    assert over_rounds / 300 < 0.85


def test_an_estimate_without_samples_is_none():
    summary = PromptCounts.of(record_of([0, 0], [0, 1]), 2).summary(50)
    assert summary["conditional_acceptance"]["value"] == [0.0, None, None]
    assert summary["tokens_per_round"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    json.dumps(summary, allow_nan=False)


def test_pooled_records_keep_prompts_apart():
    joined = pooled([record_of([1, 2], [0, 1]), record_of([3, 0], [0, 0])])
    assert joined.prompt_ids.tolist() == [0, 1, 2, 2]
    assert joined.statistics.emitted == 4 + 6


def test_splitting_undoes_pooling():
    parts = [
        record_of([1, 2, 0], [0, 1, 1], logits=torch.arange(9.0).view(3, 3)),
        record_of([3], [0], logits=torch.ones(1, 3)),
    ]
    for part, again in zip(parts, split(pooled(parts), [2, 1]), strict=True):
        for name in ("confidence_logits", "accepted", "lengths", "prompt_ids"):
            assert torch.equal(getattr(part, name), getattr(again, name))
        assert again.statistics.tokens_per_round == part.statistics.tokens_per_round
        assert len(again.tokens) == len(part.tokens)


def test_overlap_is_one_minus_total_variation(generator):
    draft, target = torch.randn(2, 5, 7, generator=generator)
    for temperature in (0.5, 1.0, 2.0):
        p, q = (target / temperature).softmax(-1), (draft / temperature).softmax(-1)
        wanted = 1 - (p - q).abs().sum(-1) / 2
        torch.testing.assert_close(teacher.overlap(draft, target, temperature), wanted)
    assert teacher.overlap(draft, draft, 0.0).tolist() == [1.0] * 5
    assert teacher.overlap(draft, -draft, 0.0).tolist() == [0.0] * 5


def test_teacher_forced_acceptance_is_that_of_every_block(generator):
    """Against one block at a time; slots after the end of a text do not count."""
    target = tiny_target(generator).float()
    drafter = tiny_drafter(target, generator).float()
    tokens = torch.randint(0, 256, (3, 25), generator=generator)
    tokens[1, 14] = EOS_ID
    hidden, features = target.hidden_states(tokens[:, :-1])
    texts = TeacherTexts(tokens, features, hidden)
    got = teacher.teacher_forced_acceptance(target, drafter, texts, prefix=8, anchors_per_text=4, texts_at_once=2)
    dense = target(tokens[:, :-1]).logits
    for row in range(3):
        slots = [[] for _ in range(4)]
        for anchor in (8, 12, 16, 20):
            single = TeacherTexts(*(part[row : row + 1] for part in texts))
            said = drafter.teacher_forced(single, torch.tensor([[anchor]])).logits[0]
            for k in range(4):
                inside = tokens[row, anchor : anchor + k + 1].tolist()
                if EOS_ID not in inside:
                    slots[k].append(float(teacher.overlap(said[k], dense[row, anchor + k], 1.0)))
        assert got[row] == pytest.approx([np.mean(values) for values in slots], abs=1e-5)
    assert teacher.summarise_texts(got, 20)["value"] == pytest.approx(got.mean(axis=0), abs=1e-4)
    with pytest.raises(ValueError, match=r"^texts: got 24 tokens, expected at least 25"):
        teacher.teacher_forced_acceptance(target, drafter, texts, prefix=21)


def test_drawn_texts_are_the_targets(generator):
    from dsspark.training.corpus import Document, TokenStream

    target = tiny_target(generator).float()
    stream = TokenStream([Document("a", b"", b"some text\nand more of it\n" * 9)], "code")
    texts = teacher.drawn_texts(target, stream, count=3, prefix=6, length=5, temperature=0.0)
    assert texts.tokens.shape == (3, 11)
    likeliest = target(texts.tokens[:, :-1]).logits.argmax(dim=-1)
    assert torch.equal(texts.tokens[:, 6:], likeliest[:, 5:])
    with pytest.raises(ValueError, match=r"^temperature: got 0\.5"):
        teacher.drawn_texts(target, stream, count=3, prefix=6, length=5, temperature=0.5)


def test_confidence_is_judged_before_and_after_its_temperatures(generator):
    logits = torch.randn(600, 3, generator=generator) * 2
    alive = torch.rand(600, 3, generator=generator) < torch.sigmoid(logits / 2)  # overconfident by a factor of 2
    accepted = alive.int().cumprod(dim=1).sum(dim=1).tolist()
    record = record_of(accepted, [i % 20 for i in range(600)], logits=logits)
    temperatures = torch.full((3,), 2.0)
    judged = judge_confidence(record, temperatures, resamples=30)
    for stage, used in (("before", None), ("after", temperatures)):
        wanted = calibration_errors(logits, record.accepted, used)
        assert judged[stage]["ece"]["value"] == pytest.approx(wanted, abs=1e-5)
        assert all(
            low < high for low, high in zip(judged[stage]["auc"]["low"], judged[stage]["auc"]["high"], strict=True)
        )
        assert sum(judged[stage]["reliability"][0]["count"]) == 600
    assert max(judged["after"]["ece"]["value"]) < min(judged["before"]["ece"]["value"])
    assert all(
        a < b for a, b in zip(judged["after"]["brier"]["value"], judged["before"]["brier"]["value"], strict=True)
    )
    assert min(judged["after"]["auc"]["value"]) > 0.6
    with pytest.raises(ValueError, match=r"^record: got rounds of a drafter without"):
        judge_confidence(record_of([1], [0]), None)


def test_the_sequential_share_is_the_heads(generator, monkeypatch):
    """A head that sleeps 3 ms shows as 3 ms; a drafter without one has none, an autoregressive one is sequential throughout."""
    target = tiny_target(generator).float()
    drafters = {
        name: build_drafter(target, drafter_config(name, target, block_size=3, intermediate_size=48)).requires_grad_(
            False
        )
        for name in ("dspark", "dflash", "eagle3")
    }
    real = latency.draft_block

    def slow(base, anchors, head, *args, **kwargs):
        time.sleep(0.003 if head is not None else 0)
        return real(base, anchors, head, *args, **kwargs)

    monkeypatch.setattr(latency, "draft_block", slow)
    found = {
        name: latency.measure_latency(target, drafter, [[1, 2], [3]], max_new_tokens=8)
        for name, drafter in drafters.items()
    }
    assert found["dflash"]["sequential_ms"] == 0
    assert found["dspark"]["sequential_ms"] > 2.5
    assert found["eagle3"]["sequential_ms"] == found["eagle3"]["draft_ms"]
    for times in found.values():
        assert times["batch"] == 2
        assert 0 < times["draft_share"] < 1
        assert times["round_ms"] >= times["target_ms"] > 0
    with pytest.raises(ValueError, match=r"^drafter: got one without a Markov head"):
        latency.sequential_seconds(drafters["dflash"], 1)


TINY_RUN = Protocol(
    prompts=3,
    max_new_tokens=6,
    domains=("math",),
    thresholds=(0.0, 0.9),
    sweep_prompts=2,
    texts=2,
    latency_batches=(1,),
)


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory):
    """Return a folder of tiny trained weights."""
    out = tmp_path_factory.mktemp("weights")
    run_training(out, small=True, target_steps=3, drafter_steps=2, console=Console(quiet=True))
    return out / "weights"


def test_the_command_writes_json_figures_and_tables(weights_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "REDUCED", TINY_RUN)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--weights", str(weights_folder), "--out", str(tmp_path), "--reduced", "--prompts", "2", "--no-latency"]
    assert command.run(parser.parse_args(words)) == 0
    result = json.loads((tmp_path / "evaluate.json").read_text())
    assert result["protocol"]["prompts"] == 2
    for measured in result["drafters"].values():
        found = measured["rounds"]["math"]["1"]
        assert found["prompts"] == 2
        assert PromptCounts.from_json(found["by_prompt"]).rounds.sum() == found["rounds"]
        assert measured["teacher_forced"]["math"]["0"]["value"]
        assert measured["latency"] == {}
    points = result["drafters"]["drafter"]["thresholds"]["math"]
    assert points[0]["budget"] == 4.0
    assert points[1]["budget"] < 4.0
    assert "thresholds" not in result["drafters"]["parallel_only"]  # its STS is not fitted
    names = {path.name for path in tmp_path.glob("*.png")}
    assert {"acceptance.png", "reliability_drafter.png", "thresholds_drafter.png"} <= names
    assert "Tokens a round" in capsys.readouterr().out
    page = (tmp_path / "evaluate.md").read_text()
    shown = result["drafters"]["drafter"]["rounds"]["math"]["1"]["tokens_per_round"]["value"]
    assert f"| math | 1 | {shown:.2f} [" in page


def test_a_bad_protocol_is_refused():
    with pytest.raises(ValueError, match=r"^prompts: got 0"):
        Protocol(prompts=0)


def test_an_evaluation_repeats_itself(weights_folder):
    first, second = (evaluate(weights_folder, TINY_RUN, Console(quiet=True)) for _ in range(2))
    for result in (first, second):
        for measured in result["drafters"].values():
            assert measured.pop("latency")["1"]["round_ms"] > 0
    assert first["drafters"] == second["drafters"]


def interval_of_shipped(name, temperature, prompts):
    """Return the interval of the accepted length that the committed counts of the first math prompts give."""
    measured = json.loads(SHIPPED.read_text())["drafters"][name]["rounds"]["math"][temperature]
    counts = PromptCounts.from_json(measured["by_prompt"]).first(prompts)
    return counts.summary()["tokens_per_round"]


def test_the_shipped_weights_give_the_shipped_numbers():
    """Math prompts, which do not depend on the Python at hand, rerun into the committed intervals; the twin's lie apart."""
    target, drafter, _ = load_pretrained()
    for temperature in (0.0, 1.0):
        record = rollout(target, drafter, "math", temperature, prompts=8, max_new_tokens=160)
        got = record.statistics.tokens_per_round
        stated, twin = (interval_of_shipped(name, f"{temperature:g}", 8) for name in ("drafter", "parallel_only"))
        assert stated["low"] <= got <= stated["high"]
        assert not twin["low"] <= got <= twin["high"]


def test_the_committed_evaluation_agrees_with_the_provenance():
    """Training measured 96 prompts, of which these are the first: all twelve accepted lengths agree, 95 % jointly (Bonferroni)."""
    result, provenance = json.loads(SHIPPED.read_text()), load_provenance()
    cells = 0
    for name, measured in result["drafters"].items():
        for domain, by_temperature in measured["rounds"].items():
            for temperature, found in by_temperature.items():
                counts = PromptCounts.from_json(found["by_prompt"])
                lengths = counts.tokens_per_round(weights(len(counts.rounds), 4000))
                low, high = np.quantile(lengths, (0.025 / 12, 1 - 0.025 / 12))
                assert low <= provenance["tokens_per_round"][domain][temperature][name] <= high, (
                    name,
                    domain,
                    temperature,
                )
                cells += 1
    assert cells == 12


def test_a_pivotal_interval_mirrors_the_samples_about_the_estimate():
    """Of the ECE of a perfectly calibrated head, whose bootstrap samples lie above it: the mirrored interval lies mostly below."""
    values = np.array([[1.0], [2.0], [2.5], [3.0]])
    low, high = np.quantile(values[:, 0], (0.025, 0.975))
    assert summarise(values)["high"] == [pytest.approx(high, abs=1e-5)]
    assert summarise(values, pivotal=True) == {"value": [1.0], "low": [0.0], "high": [pytest.approx(2 - low, abs=1e-5)]}
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 3, generator=generator)
    alive = torch.rand(400, 3, generator=generator) < torch.sigmoid(logits)
    record = record_of(alive.int().cumprod(dim=1).sum(dim=1).tolist(), list(range(400)), logits=logits)
    ece = judge_confidence(record, None, resamples=60)["before"]["ece"]
    for value, bottom, top in zip(ece["value"], ece["low"], ece["high"], strict=True):
        assert value - bottom > 2 * (top - value)

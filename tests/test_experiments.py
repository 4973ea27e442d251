"""The study of all drafters: statistics, claims, a whole tiny study that is interrupted and resumed, figures, the committed results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from scipy import stats
from tiny_models import tiny_target

from dsspark.experiments import command, figures, results, run
from dsspark.experiments.fit import fit_drafter, observe_pool
from dsspark.experiments.pages import results_page
from dsspark.experiments.plan import DFLASH, DSPARK, VARIANTS, Spec, full_study, lengths, reduced_study
from dsspark.models.drafters import DRAFTERS
from dsspark.training.loop import Schedule
from dsspark.training.pretrain import load_streams

QUIET = Console(quiet=True)
COMMITTED = Path(__file__).parents[1] / "benchmarks" / "results" / "paper"
TINY = dataclasses.replace(
    reduced_study(),
    seeds=(0,),
    schedule=Schedule(steps=2, peak_lr=1e-3, warmup=1),
    pool_rows=8,
    row_length=40,
    drawn_prefix=8,
    batch_rows=2,
    anchors_per_row=4,
    intermediate_size=32,
    prompts=1,
    fit_prompts=1,
    max_new_tokens=3,
    texts=2,
    text_length=24,
    text_prefix=8,
    thresholds=(0.0, 0.9),
    latency_batches=(1,),
)


@pytest.fixture
def target(generator):
    return tiny_target(generator).float()


@pytest.fixture(scope="module")
def streams():
    """Return texts to learn from, read once: nothing here depends on how many there are."""
    return load_streams(held_out=False, num_math=50)


def test_a_statistic_is_students_interval():
    values = [3.1, 2.9, 3.4]
    found = results.statistic(values)
    low, high = stats.t.interval(0.95, 2, loc=sum(values) / 3, scale=stats.sem(values))
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert results.statistic([1.0])["low"] is None
    assert results.statistic([1.0, math.nan]) is None
    for freedom, quantile in results.STUDENT_975.items():
        assert quantile == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([1.0, 1.2, 0.9], "appears"),
        ([-1.0, -1.2, -0.9], "reversed"),
        ([1.0, -1.0, 0.2], "not resolved"),
        ([5.0], "not resolved"),
    ],
)
def test_a_claim_needs_an_interval_above_zero(differences, verdict):
    assert results.claim("it helps", differences)["verdict"] == verdict


def test_counts_become_lengths_and_acceptance():
    counts = {"rounds": 10, "verified": [10, 10], "reached": [10, 4], "accepted": [4, 1]}
    assert results.tokens_per_round(counts) == 1.5
    assert results.conditional(counts) == [0.4, 0.25]
    assert math.isnan(results.conditional({"reached": [0], "accepted": [0]})[0])


def test_the_studies_hold_every_drafter_of_the_paper():
    for study in (reduced_study(), full_study()):
        assert {spec.name for spec in study.specs} == set(DRAFTERS)
        assert len(study.seeds) >= 3
        assert {3, 7, 15} <= {spec.block_size for spec in study.specs if spec.name == "dspark"}
        claimed = [spec for spec in study.specs if spec not in VARIANTS]
        assert all((spec, seed) in study.runs for spec in claimed for seed in study.seeds)
        assert Spec("dflash", num_layers=5) in study.specs
        assert len({spec.key for spec in study.specs}) == len(study.specs)
    assert {spec.block_size for spec in lengths("dspark", reduced=False)} == {3, 7, 11, 15}
    assert len(full_study().runs) == 3 * len(full_study().specs) > len(reduced_study().runs)


def test_drafters_of_a_seed_learn_from_the_same_pool(target, streams, tmp_path):
    """Training lowers the loss of every kind, repeats bit for bit, and leaves the target alone."""
    study = dataclasses.replace(TINY, schedule=Schedule(steps=12, peak_lr=1e-2, warmup=1))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    pool = observe_pool(target, streams, study)
    for name in DRAFTERS:
        spec = Spec(name, 3, 1)
        first, history = fit_drafter(target, pool, spec, study, 0, tmp_path / f"{name}.pt", QUIET)
        again, _ = fit_drafter(target, pool, spec, study, 0, tmp_path / f"{name}_again.pt", QUIET)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
        assert history[-1]["distance"] < history[0]["distance"]
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


class StopError(Exception):
    """An interrupt at a chosen drafter."""


@pytest.mark.slow
def test_an_interrupted_study_goes_on_and_draws_its_figures(target, streams, tmp_path, monkeypatch):
    real, trained = run.fit_drafter, []
    monkeypatch.setattr(run, "load_streams", lambda *, held_out: streams)

    def counted(target, pool, spec, *args):
        if len(trained) == 5:
            trained.append(None)
            raise StopError
        trained.append(spec.key)
        return real(target, pool, spec, *args)

    monkeypatch.setattr(run, "fit_drafter", counted)
    with pytest.raises(StopError):
        run.run_experiments(target, tmp_path, TINY, console=QUIET)
    assert len(list((tmp_path / "runs").iterdir())) == 5
    found = run.run_experiments(target, tmp_path, TINY, console=QUIET)
    assert len([key for key in trained if key]) == len(TINY.runs)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert run.run_experiments(target, tmp_path, TINY, console=QUIET) == found
    assert len(trained) == len(TINY.runs) + 1

    for name, result in found.items():
        assert json.loads((tmp_path / "results" / f"{name}.json").read_text()) == json.loads(json.dumps(result))
    check_results(found)
    paths = figures.draw(found, tmp_path / "results")
    assert all(path.stat().st_size > 5_000 for path in paths)
    page = results_page(found)
    assert page.count("| eagle3 |") == 1
    assert "2-layer DSpark" in page
    with pytest.raises(ValueError, match=r"^out: got .* which holds runs of another study"):
        run.run_experiments(target, tmp_path, dataclasses.replace(TINY, prompts=2), console=QUIET)


def test_processes_share_the_drafters_and_the_last_one_times_them(tmp_path, monkeypatch):
    """While the first drafter trains, a second start takes all others, leaves that one alone, and measures no latencies."""
    order, timed, written = [], [], []

    def run_one(target, pool, exam, out, study, spec, seed, console):
        order.append((spec, seed))
        if len(order) == 1:
            run.run_experiments(None, out, study, console=QUIET)
            assert order[1:] == list(study.runs[1:])
            assert not timed
        run._write(run._file(out, spec, seed), {})

    for name, stand_in in (
        ("load_streams", lambda *, held_out: None),
        ("observe_pool", lambda *_: None),
        ("Exam", lambda *_: None),
        ("_run_one", run_one),
        ("time_drafters", lambda *_: timed.append(len(order)) or {}),
        ("write_results", lambda out, study: written.append(len(list((out / "runs").glob("*.json"))))),
    ):
        monkeypatch.setattr(run, name, stand_in)
    run.run_experiments(None, tmp_path, TINY, console=QUIET)
    assert order == list(TINY.runs)
    assert timed == [len(TINY.runs)]
    assert written == [len(TINY.runs) - 1, len(TINY.runs)]


def test_a_claim_ends_when_its_drafter_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), run._claimed(tmp_path, DSPARK, 0) as claimed:
        assert 1 / (not claimed)
    with (
        run._claimed(tmp_path, DSPARK, 0) as first,
        run._claimed(tmp_path, DSPARK, 0) as second,
        run._claimed(tmp_path, DSPARK, 1) as other,
    ):
        assert (first, second, other) == (True, False, True)


def test_the_command_names_its_study(monkeypatch, tmp_path):
    """--reduced takes the reduced study, and its absence the full one; the page is written beside the results."""
    asked = []
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(run, "run_experiments", lambda target, out, study, **rest: asked.append(study))
    monkeypatch.setattr(figures, "draw", lambda found, folder: [])
    monkeypatch.setattr(command, "results_page", lambda found: "# page")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for words in (["--reduced"], []):
        assert command.run(parser.parse_args(["--out", str(tmp_path), *words])) == 0
    assert asked == [reduced_study(), full_study()]
    assert (tmp_path / "results" / "experiments.md").read_text() == "# page"


def check_results(found):
    """Raise unless every claim follows from its seeds, has three of them or says that it is not resolved, and figures agree."""
    for name, result in found.items():
        assert result["claims"], name
        done, wanted = result["measured_drafters"]
        assert 0 < done <= wanted
        for item in result["claims"]:
            if item["difference"] is None or len(item["difference"]["seeds"]) < 3:
                assert item["verdict"] == "not resolved" or len(result["study"]["seeds"]) < 3, item["claim"]
                continue
            again = results.claim(item["claim"], item["difference"]["seeds"])
            assert again["verdict"] == item["verdict"]
            assert again["difference"]["low"] == pytest.approx(item["difference"]["low"], abs=1e-3)
        assert not any(folder in json.dumps(result) for folder in ("/tmp", "/home", "/root"))
    table, depth, length = (found[name]["tokens_per_round"] for name in ("table1", "figure3", "figure4"))
    for domain, by_temperature in table.items():
        for spec in (DFLASH, DSPARK):
            assert depth[domain][spec.key] == by_temperature["1"][spec.key]
            assert length[domain][spec.name]["7"] in (by_temperature["1"][spec.key], None)


def test_the_check_of_results_sees_a_wrong_verdict_and_a_missing_seed():
    """On results as small as they can be: a claim that its seeds do not bear out, and one that rests on two seeds."""
    empty = {domain: {"0": {}, "1": dict.fromkeys((DFLASH.key, DSPARK.key))} for domain in ("math", "code", "chat")}
    facts = {"measured_drafters": [3, 3], "study": {"seeds": [0, 1, 2]}}
    good = results.claim("it helps", [1.0, 1.1, 0.9])
    tables = {
        "table1": empty,
        "figure3": {domain: rows["1"] for domain, rows in empty.items()},
        "figure4": {domain: {"dflash": {"7": None}, "dspark": {"7": None}} for domain in empty},
    }
    found = {name: facts | {"tokens_per_round": table, "claims": [good]} for name, table in tables.items()}
    check_results(found)
    for wrong in (good | {"verdict": "reversed"}, results.claim("x", [1.0, 1.1]) | {"verdict": "appears"}):
        with pytest.raises(AssertionError):
            check_results(found | {"figure3": found["figure3"] | {"claims": [wrong]}})


def test_committed_results_bear_out_their_claims():
    """Whatever run is committed: its claims, its figures, its page."""
    for path in COMMITTED.glob("table1.json"):
        found = {name: json.loads((path.parent / f"{name}.json").read_text()) for name in figures.FIGURES}
        check_results(found)
        assert all((path.parent / f"{name}.png").stat().st_size > 5_000 for name in found)
        assert (path.parent / "experiments.md").read_text() == results_page(found)

"""`python -m dsspark simulate`: what it writes, and one line for what it cannot do."""

from __future__ import annotations

import json

import pytest

from dsspark import CostTable, cli

STAIRS = CostTable.from_points([4, 16, 64, 128], [1.0, 1.2, 2.0, 4.0], provenance={"machine": "a test"})


def simulate(tmp_path, *words):
    return cli.main(["simulate", *words, "--out", str(tmp_path / "out")])


def test_a_run_writes_numbers_tables_and_figures(tmp_path, capsys):
    words = ["--model", "v4-flash", "--users", "16", "64", "--requests", "130", "--target-speed", "150", "--seed", "2"]
    assert simulate(tmp_path, *words) == 0
    out = tmp_path / "out"
    for name in ("v4-flash_figure7.png", "v4-flash_figure8.png", "v4-flash_staircase.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG"), name
    content = json.loads(
        (out / "simulate.json").read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name)
    )
    (system,) = content["systems"]
    assert content["simulated"] is True
    assert list(system["curves"]) == ["none", "mtp-1", "fixed-5", "threshold-0.5", "algorithm-1", "delayed"]
    assert [round(o["concurrency"]) for o in system["curves"]["none"]] == [16, 64]
    assert {o["requests"] for curve in system["curves"].values() for o in curve} == {130}
    assert system["matches"][0]["speedup"] > 1
    assert system["verdicts"]["matched-throughput speed-up, paper (self-reported)"] == [1.6, 1.85]
    assert system["at_speed"]["delayed"] > system["at_speed"]["mtp-1"]
    assert all(entry["source"] for entry in system["sources"].values())
    assert content["settings"]["seed"] == 2
    assert str(tmp_path) not in (out / "simulate.json").read_text(encoding="utf-8")
    text = (out / "simulate.md").read_text(encoding="utf-8")
    assert "simulated" in text
    points = (out / "points.md").read_text(encoding="utf-8")
    assert points.count("| delayed |") == points.count("| mtp-1 |") == 2
    printed = capsys.readouterr().out
    assert "delayed" in printed
    assert "paper (self-reported)" in printed


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    def curves(seed):
        words = ["--model", "v4-pro", "--users", "8", "--requests", "40", "--policies", "delayed", "--seed", seed]
        assert simulate(tmp_path, *words) == 0
        return json.loads((tmp_path / "out" / "simulate.json").read_text())["systems"][0]["curves"]

    assert curves("1") == curves("1")
    assert curves("1") != curves("2")


def test_a_measured_table_and_measured_rounds(tmp_path):
    STAIRS.save(tmp_path / "mine.json")
    words = [
        "--cost-table",
        str(tmp_path / "mine.json"),
        "--traces",
        "shipped",
        "--users",
        "4",
        "16",
        "--block-size",
        "7",
    ]
    assert simulate(tmp_path, *words, "--requests", "60", "--mix", "math=1,chat=3") == 0
    (system,) = json.loads((tmp_path / "out" / "simulate.json").read_text())["systems"]
    assert system["name"] == "mine"
    assert system["sources"] == {"machine": "a test"}
    # At most 128 tokens at 4 s: whole blocks of 16 users fill it.
    assert system["curves"]["fixed-5"][1]["step_seconds"] == pytest.approx(4.0)
    assert "matched-throughput speed-up, paper (self-reported)" not in system["verdicts"]


def test_an_open_system(tmp_path):
    words = [
        "--model",
        "v4-flash",
        "--users",
        "32",
        "--rate",
        "20",
        "2",
        "--requests",
        "200",
        "--policies",
        "none",
        "delayed",
    ]
    assert simulate(tmp_path, *words) == 0
    (system,) = json.loads((tmp_path / "out" / "simulate.json").read_text())["systems"]
    light, heavy = system["curves"]["none"]
    assert light["concurrency"] < heavy["concurrency"]
    assert light["p95_wait_seconds"] is not None
    assert system["curves"]["delayed"][1]["concurrency"] < heavy["concurrency"]


def test_profiling_first(tmp_path, monkeypatch):
    def measured(repeats, on_step):
        on_step()
        return STAIRS

    monkeypatch.setattr("dsspark.serving.profiling.profile_shipped", measured)
    words = ["--profile", "--traces", "shipped", "--users", "4", "--requests", "30", "--policies", "none", "delayed"]
    assert simulate(tmp_path, *words) == 0
    assert CostTable.load(tmp_path / "out" / "cost_table.json").max_tokens == 128
    assert (tmp_path / "out" / "cost_table.png").read_bytes().startswith(b"\x89PNG")


def test_sensitivity_is_reported_for_each_variant(tmp_path, monkeypatch):
    from dsspark.serving import command, sensitivity

    few = sensitivity.VARIANTS[:2]
    monkeypatch.setattr(command, "VARIANTS", few)

    def quick(model, **options):
        return sensitivity.run_sensitivity(
            model, **options, variants=few, baseline_users=(64,), subject_users=(32, 64), pool_size=512
        )

    monkeypatch.setattr(command, "run_sensitivity", quick)
    words = ["--model", "v4-flash", "--users", "32", "--requests", "40", "--policies", "none", "--sensitivity"]
    assert simulate(tmp_path, *words) == 0
    (system,) = json.loads((tmp_path / "out" / "simulate.json").read_text())["systems"]
    first, second = system["sensitivity"]
    assert (first["name"], second["value"]) == ("as assumed", "50 us")
    assert 1.2 < first["speedups"][0] < 2.3
    assert first["speedups"] != second["speedups"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--users", "0"], "--users"),
        (["--users", "4", "4"], "--users"),
        (["--requests", "0"], "--requests"),
        (["--rate", "1"], "--rate"),
        (["--rate", "-1", "--users", "4"], "--rate"),
        (["--policies", "magic"], "--policies"),
        (["--mix", "math"], "--mix"),
        (["--mix", "poetry=1"], "--mix"),
        (["--block-size", "0"], "--block-size"),
        (["--block-size", "9", "--traces", "shipped"], "block_size"),
        (["--traces", "missing.json"], "missing.json"),
        (["--cost-table", "missing.json"], "missing.json"),
        (["--cost-table", "bad.json"], "bad.json"),
        (["--cost-table", "small.json", "--users", "200"], "--cost-table"),
        (["--cost-table", "small.json", "--users", "64", "--policies", "fixed-5"], "profile larger sizes"),
        (["--cost-table", "small.json", "--profile"], "--profile"),
        (["--model", "v4-pro", "--profile"], "--model"),
        (["--output-tokens", "0"], "output"),
        (["--users", "8", "--target-speed", "9000", "--policies", "none"], "--target-speed"),
        (["--out", "bad.json"], "--out"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(words, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"sps": [1, 0]')
    STAIRS.save(tmp_path / "small.json")
    if "--requests" not in words:
        words = [*words, "--requests", "20"]
    assert cli.main(["simulate", *words, *([] if "--out" in words else ["--out", "out"])]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("dsspark: error: ")
    assert names in error


def test_without_matplotlib_it_says_so_before_it_simulates(tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert simulate(tmp_path) == 2
    assert "pip install 'dsspark[plots]'" in capsys.readouterr().err

"""Every figure that the README and the pages quote is the one in a committed result file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.builder import results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FACTS = results.load(results.PROVENANCE)


def mean(values):
    return sum(values) / len(values)


def row(name, text=README):
    """Return the cells of the table row that begins with a name."""
    found = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
    assert len(found) == 1, f"{name}: {len(found)} rows"
    return [cell.strip() for cell in found[0].split("|")]


@pytest.mark.parametrize(("name", "drafter"), [("parallel only", "parallel_only"), ("with Markov head", "drafter")])
def test_tokens_a_round(name, drafter):
    rounds = FACTS["tokens_per_round"]
    wanted = [f"{rounds[domain][t][drafter]:.2f}" for domain in ("math", "code", "chat") for t in ("0", "1")]
    assert row(name) == wanted


def test_calibration_and_gains():
    before, after = (100 * mean(FACTS[name]) for name in ("ece_before", "ece_after"))
    assert f"{before:.2f} % before Sequential Temperature Scaling, {after:.2f} % after" in README
    gains = {
        domain: 100 * (found["1"]["drafter"] / found["1"]["parallel_only"] - 1)
        for domain, found in FACTS["tokens_per_round"].items()
    }
    assert f"{gains['math']:.0f} % on math" in README
    assert {f"{gains['code']:.0f}", f"{gains['chat']:.0f}"} == {"7"}
    assert "7 % on code and chat" in README
    assert f"takes {sum(FACTS['minutes'].values()):.0f} minutes" in README


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("drafting, logits kept", "markov"),
        ("verification", "rejection"),
        ("ragged attention", "verification, attention"),
    ],
)
def test_bytes_moved(name, task):
    ratios = {entry["contender"]: float(entry["ratio"]) for entry in results.traffic_rows(task)}
    quoted = [float(cell) for cell in row(name)]
    exact = [ratios[by] for by in ("kernel", "eager, public", "eager, competent")]
    for said, value in zip(quoted, exact, strict=True):
        assert said == pytest.approx(value, rel=0.005)


def test_ratios_on_a_processor():
    claims = {(claim["task"], claim["other"]): claim for claim in results.benchmarks(gpu=False)["claims"]}
    verify, draft = (claims[task, "eager, public"] for task in ("rejection", "markov"))
    competent = {task: claims[task, "eager, competent"] for task in ("rejection", "markov")}
    text = " ".join(README.split())
    assert (
        f"is {verify['ratio']:.1f} times as fast as the eager public form in {100 * verify['memory']:.0f} % of its memory"
        in text
    )
    assert f"and {competent['rejection']['ratio']:.1f} times as fast as a competent one" in text
    assert (
        f"`draft_block` is {draft['ratio']:.1f} times as fast as the public form and {competent['markov']['ratio']:.1f} times"
        in text
    )


def test_simulated_figures():
    verdicts = results.load(results.RESULTS / "simulate" / "simulate.json")["systems"][0]["verdicts"]
    _, median, _ = verdicts["matched-throughput speed-up, simulated: least, median, most"]
    low, high = verdicts["matched-throughput speed-up, paper (self-reported)"]
    text = " ".join(README.split())
    assert f"median {median:.2f} times (paper, self-reported: {low:.2f} to {high:.2f})" in text

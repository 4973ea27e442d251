"""The Markov and the confidence head of a checkpoint, without its backbone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from dsspark.checkpoints.config import CheckpointConfig, Format, read_config
from dsspark.checkpoints.modules import unset_weights
from dsspark.checkpoints.tensors import TensorFolder, write_folder
from dsspark.checkpoints.writers import write_config
from dsspark.models.heads import ConfidenceHead, MarkovHead

VOCABULARY = ("d2t", "t2d")
_FLAT = {"confidence_head.proj.": "confidence_proj.", "markov_head.": ""}
_HEAD_KEY = re.compile(r"(^|\.)(markov_head|confidence_head|markov_w[12]|gate_proj|joint_proj|confidence_proj)\.")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a folder names its heads.

    Attributes:
        prefix: before every name; "mtp.2." in DeepSeek-V4.
        flat: ModelOpt's names, without `markov_head.`.
    """

    prefix: str = ""
    flat: bool = False

    def name(self, ours: str) -> str:
        """Return the folder's name for one of ours, such as "markov_head.markov_w1.weight"."""
        for nested, flat in _FLAT.items() if self.flat else ():
            ours = ours.replace(nested, flat)
        return self.prefix + ours


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a drafter, frozen and in the stored dtypes.

    Attributes:
        markov_head: None at rank 0.
        confidence_head: None if there is none.
        draft_to_target: [V_draft] int64 strictly increasing target ids, or None where the ids are the same.
        config: sizes and conventions: block_size, mask_token_id, target_layer_ids, and `confidence_reads`, which h the confidence
            head wants.
        layout: how the folder named them.
        vocabulary: `d2t` and `t2d` as they were stored.
    """

    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    draft_to_target: Tensor | None
    config: CheckpointConfig
    layout: Layout
    vocabulary: Mapping[str, Tensor] = field(default_factory=dict)


def load_heads(folder: Path | str) -> Heads:
    """Load the heads of a drafter from a folder in any public format; nothing else is read.

    Args:
        folder: with config.json and safetensors, sharded or not. DeepSpec, DeepSeek-V4, speculators, SpecForge or ModelOpt.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: for a key of the configuration or a tensor that is missing, left over or misshapen, by its name.

    Cost: tensors are mapped, not copied.
    """
    folder = Path(folder)
    config, files = read_config(folder), TensorFolder(folder)
    layout = find_layout(config, files)
    expected = head_shapes(config, layout)
    mapping = draft_vocabulary(config)
    leftover = [name for name in files.names if is_head(name, layout) and name not in expected]
    files.check({**expected, **mapping}, leftover)
    with unset_weights():
        heads = empty_heads(config)
    for module_name, module in heads.items():
        ours = [f"{module_name}.{name}" for name in module.state_dict()]
        state = files.floats({name.partition(".")[2]: layout.name(name) for name in ours})
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False).eval()
    markov_head, confidence_head = heads.get("markov_head"), heads.get("confidence_head")
    assert markov_head is None or isinstance(markov_head, MarkovHead)
    assert confidence_head is None or isinstance(confidence_head, ConfidenceHead)
    return Heads(
        markov_head=markov_head,
        confidence_head=confidence_head,
        draft_to_target=read_draft_to_target(files, config),
        config=config,
        layout=layout,
        vocabulary={name: files.read(name) for name in VOCABULARY if mapping and name in files.names},
    )


def save_heads(folder: Path | str, heads: Heads, format: Format | None = None) -> None:
    """Write heads as `load_heads` reads them.

    Args:
        folder: made if missing.
        heads: from `load_heads`.
        format: another public format; the heads' own if None, then with the configuration and the names they came with.

    Raises:
        ValueError: for a format that cannot express these heads.
    """
    config, layout = heads.config, heads.layout
    raw = write_config(config, format or config.format)
    tensors = dict(heads.vocabulary)
    if format is not None and format != config.format:
        layout = Layout(prefix="mtp.2." if format == "deepseek_v4" else "", flat=format == "modelopt")
        tensors = vocabulary_tensors(config, heads.draft_to_target)
    for name, module in (("markov_head", heads.markov_head), ("confidence_head", heads.confidence_head)):
        for key, value in {} if module is None else module.state_dict().items():
            tensors[layout.name(f"{name}.{key}")] = value
    write_folder(Path(folder), tensors, raw)


def empty_heads(config: CheckpointConfig) -> dict[str, nn.Module]:
    """Return the modules that the configuration describes, weights not set."""
    heads: dict[str, nn.Module] = {}
    if config.markov_rank:
        heads["markov_head"] = MarkovHead(
            config.vocab_size, config.markov_rank, config.markov_kind, config.hidden_size, config.draft_vocab_size
        )
    if config.has_confidence:
        head = ConfidenceHead(config.hidden_size, config.confidence_rank)
        if not config.confidence_bias:
            head.proj.register_parameter("bias", None)
        heads["confidence_head"] = head
    return heads


def head_shapes(config: CheckpointConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shape of every head tensor under the folder's names."""
    with unset_weights():
        return {
            layout.name(f"{name}.{key}"): tuple(value.shape)
            for name, module in empty_heads(config).items()
            for key, value in module.state_dict().items()
        }


def is_head(name: str, layout: Layout) -> bool:
    """Return whether a tensor looks like one of a head, whatever the configuration says."""
    return bool(_HEAD_KEY.search(name)) and not re.search(r"(^|\.)layers\.", name.removeprefix(layout.prefix))


def find_layout(config: CheckpointConfig, files: TensorFolder) -> Layout:
    """Return how the folder names its heads.

    Raises:
        ValueError: if two stages of DeepSeek-V4 carry heads, or both spellings of ModelOpt are there.
    """
    names = files.names
    if config.format == "deepseek_v4":
        stages = sorted({int(m[1]) for name in names if (m := re.match(r"mtp\.(\d+)\.", name))})
        carriers = sorted({int(m[1]) for name in names if (m := re.match(r"mtp\.(\d+)\.markov_head\.", name))})
        if not stages or carriers != stages[-1:]:
            raise ValueError(
                f"{files.folder}: key 'mtp.*.markov_head': found it in stages {carriers} of {stages}, expected it in the last one"
            )
        return Layout(prefix=f"mtp.{carriers[0]}.")
    flat = [name for name in names if name.startswith(("markov_w1.", "confidence_proj."))]
    nested = [name for name in names if name.startswith(("markov_head.", "confidence_head."))]
    if flat and nested:
        raise ValueError(
            f"{files.folder}: key {flat[0]!r}: found beside {nested[0]!r}, expected one spelling of the heads"
        )
    return Layout(flat=bool(flat))


def draft_vocabulary(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a vocabulary of its own needs."""
    return {} if config.draft_vocab_size == config.vocab_size else {"d2t": (config.draft_vocab_size,)}


def read_draft_to_target(files: TensorFolder, config: CheckpointConfig) -> Tensor | None:
    """Return target ids from speculators' offsets: target id = id + d2t[id].

    Raises:
        ValueError: for ids that do not increase or lie outside the target's vocabulary, or a `t2d` that says otherwise.
    """
    if not draft_vocabulary(config):
        return None
    ids = torch.arange(config.draft_vocab_size) + files.read("d2t").to(torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size or bool((ids.diff() <= 0).any()):
        raise ValueError(
            f"{files.folder}: key 'd2t': found target ids {ids[:3].tolist()} ... {ids[-1:].tolist()}, expected strictly "
            f"increasing ids below {config.vocab_size}: d2t holds offsets, target id = id + d2t[id]"
        )
    if "t2d" in files.names and not torch.equal(files.read("t2d").nonzero()[:, 0], ids):
        raise ValueError(
            f"{files.folder}: key 't2d': found other tokens than 'd2t' names, expected the same vocabulary"
        )
    return ids


def vocabulary_tensors(config: CheckpointConfig, draft_to_target: Tensor | None) -> dict[str, Tensor]:
    """Return speculators' offsets and membership of a vocabulary of its own."""
    if draft_to_target is None:
        return {}
    member = torch.zeros(config.vocab_size, dtype=torch.bool)
    member[draft_to_target.cpu()] = True
    return {"d2t": draft_to_target.cpu() - torch.arange(len(draft_to_target)), "t2d": member}

"""What a checkpoint's config.json says, in one form for all public formats.

Numbers keep one meaning: `block_size` is gamma, the drafted tokens a round; `target_layer_ids` follow DeepSpec (l is the output of layer
l, -1 the embedding's). speculators counts hidden states instead, so its ids are one higher, and a block that does not sample from its
anchor drafts one token fewer than it has slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from dsspark.checkpoints.fields import Fields, read_json
from dsspark.models.backbone import BackboneConfig
from dsspark.models.heads import HeadKind
from dsspark.models.qwen3 import Qwen3DrafterConfig

Format = Literal["deepspec", "deepseek_v4", "speculators", "specforge", "modelopt"]
FORMATS: tuple[Format, ...] = ("deepspec", "deepseek_v4", "speculators", "specforge", "modelopt")
KINDS = ("vanilla", "gated", "rnn")
BACKBONES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "DFlashDraftModel")
MAX_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A drafter's sizes and conventions.

    Attributes:
        format: whose files these are.
        vocab_size: V, rows of W1.
        draft_vocab_size: rows of W2; V where the drafter has no vocabulary of its own.
        hidden_size: d.
        block_size: gamma, drafted tokens a round.
        markov_rank: r; 0 for a drafter without a sequential head.
        markov_kind: of the sequential head.
        has_confidence: whether there is a confidence head.
        confidence_with_markov: whether it reads W1[x_{k-1}] beside h_k.
        mask_token_id: what fills the slots behind the anchor.
        target_layer_ids: the target layers that the drafter reads.
        sample_from_anchor: slot 0 predicts x_1.
        backbone: its sizes; None where this package has no such backbone (DeepSeek-V4, Gemma).
        unsupported: why there is none.
        raw: the configuration as it stood in the file; empty for a drafter that came from none.
    """

    format: Format
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    block_size: int
    markov_rank: int
    markov_kind: HeadKind
    has_confidence: bool
    confidence_with_markov: bool
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sample_from_anchor: bool = True
    backbone: BackboneConfig | None = None
    unsupported: str = field(default="", compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def confidence_bias(self) -> bool:
        """Whether the confidence head has a bias: everywhere but in DeepSeek-V4."""
        return self.format != "deepseek_v4"

    @property
    def confidence_reads(self) -> Literal["normed", "before_norm"]:
        """Which h the confidence head reads: after the final norm, or, in DeepSeek-V4, before it."""
        return "before_norm" if self.format == "deepseek_v4" else "normed"

    @property
    def confidence_rank(self) -> int:
        """How many entries of W1 the confidence head reads."""
        return self.markov_rank if self.confidence_with_markov else 0

    def drafter(self) -> Qwen3DrafterConfig:
        """Return the configuration of the drafter module.

        Raises:
            ValueError: for a backbone that this package does not have.
        """
        if self.backbone is None:
            raise ValueError(
                f"{self.unsupported}; only the heads of this checkpoint can be loaded, with dsspark.checkpoints.load_heads"
            )
        return Qwen3DrafterConfig(
            backbone=self.backbone,
            vocab_size=self.vocab_size,
            draft_vocab_size=None if self.draft_vocab_size == self.vocab_size else self.draft_vocab_size,
            markov_rank=self.markov_rank,
            markov_kind=self.markov_kind,
            has_confidence=self.has_confidence,
            confidence_with_markov=self.confidence_with_markov,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids,
            sample_from_anchor=self.sample_from_anchor,
        )


def read_config(folder: Path) -> CheckpointConfig:
    """Read `folder`/config.json, whatever public format it has.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: for an unknown format, or a key that is missing or has a value that cannot be.
    """
    path = folder / "config.json"
    raw = read_json(path)
    return _READERS[_detect(path, raw)](path, raw)


def _detect(path: Path, raw: Mapping[str, Any]) -> Format:
    text = raw.get("text_config") or {}
    if "speculators_model_type" in raw:
        return "speculators"
    if any(key.startswith("dspark_") for key in (*raw, *text)):
        return "deepseek_v4"
    if isinstance(raw.get("dflash_config"), dict):
        nested = raw["dflash_config"]
        return "modelopt" if "use_confidence_head" in nested or "shift_label" in nested else "specforge"
    if "markov_rank" in raw:
        return "deepspec"
    raise ValueError(
        f"{path}: found none of the keys 'speculators_model_type', 'dspark_block_size', 'dflash_config', 'markov_rank', "
        f"expected a drafter in one of the formats {list(FORMATS)}"
    )


def _heads(fields: Fields, enable_key: str = "enable_confidence_head") -> dict[str, Any]:
    """Return rank, kind and confidence head as DeepSpec names them."""
    rank = fields.integer("markov_rank", 0)
    kind = fields.choice("markov_head_type", KINDS) if rank else "vanilla"
    has_confidence = fields.flag(enable_key)
    with_markov = has_confidence and fields.flag("confidence_head_with_markov")
    return _checked_heads(fields, rank, kind, has_confidence, with_markov, "confidence_head_with_markov")


def _checked_heads(
    fields: Fields, rank: int, kind: str, has_confidence: bool, with_markov: bool, key: str
) -> dict[str, Any]:
    if with_markov and rank == 0:
        raise fields.error(
            key, True, "False, since markov_rank is 0 and there is no W1 for the confidence head to read"
        )
    return {
        "markov_rank": rank,
        "markov_kind": cast(HeadKind, kind),
        "has_confidence": has_confidence,
        "confidence_with_markov": with_markov,
    }


def _backbone(
    sizes: Fields, architectures: object, layers: tuple[int, ...], block_size: int, target_size: int | None = None
) -> dict[str, Any]:
    """Return the sizes of a Qwen3-style backbone, or why this package has none: the heads can be loaded without it."""
    try:
        if architectures not in [[name] for name in BACKBONES]:
            raise sizes.error("architectures", architectures, f"one of {[[name] for name in BACKBONES]}")
        return {"backbone": _sizes(sizes, len(layers), block_size, target_size)}
    except ValueError as error:
        return {"unsupported": str(error)}


def _sizes(sizes: Fields, num_layers_read: int, block_size: int, target_hidden_size: int | None) -> BackboneConfig:
    """Return the sizes; raise for what this package's backbone does not compute."""
    unsupported = "this package's Qwen3 backbone does not compute anything else"
    sizes.must_be("attention_bias", (False, None), unsupported)
    sizes.must_be("hidden_act", ("silu", None), unsupported)
    sizes.must_be("use_sliding_window", (False, None), unsupported)
    sizes.must_be("attention_sink_bias", (False, None), unsupported)
    if sizes.has("layer_types"):
        name, kinds = sizes.raw("layer_types", "a list")
        if any(kind != "full_attention" for kind in kinds):
            raise sizes.error(name, kinds, f"'full_attention' in every layer; {unsupported}")
    hidden_size = sizes.integer("hidden_size", 1)
    return BackboneConfig(
        feature_size=num_layers_read * (target_hidden_size or hidden_size),
        hidden_size=hidden_size,
        block_size=block_size,
        num_layers=sizes.integer("num_hidden_layers", 1),
        num_heads=sizes.integer("num_attention_heads", 1),
        num_kv_heads=sizes.integer("num_key_value_heads", 1),
        head_dim=sizes.integer("head_dim", 2),
        intermediate_size=sizes.integer("intermediate_size", 1),
        rope_base=_rope_base(sizes),
        norm_eps=sizes.number("rms_norm_eps"),
    )


def _rope_base(sizes: Fields) -> float:
    """Return the base of plain rotary frequencies, from where transformers 4 or 5 keeps it."""
    nested = []
    for key in ("rope_parameters", "rope_scaling"):
        if not sizes.has(key):
            continue
        name, rope = sizes.raw(key, "an object")
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            raise sizes.error(f"{name}.rope_type", kind, "'default'; scaled rotary positions are not supported")
        if "rope_theta" in rope:
            nested.append((f"{name}.", {"rope_theta": rope["rope_theta"]}))
    return Fields(sizes.path, *nested, *sizes.places).number("rope_theta")


def _block(fields: Fields, key: str, sample_from_anchor: bool) -> int:
    """Return gamma from the number of slots."""
    if sample_from_anchor:
        return fields.integer(key, 1, MAX_BLOCK)
    return fields.integer(key, 2, MAX_BLOCK + 1) - 1


def _read_deepspec(path: Path, raw: Mapping[str, Any]) -> CheckpointConfig:
    fields = Fields(path, ("", raw))
    vocab_size, block_size = fields.integer("vocab_size", 1), _block(fields, "block_size", True)
    layers = fields.integers("target_layer_ids")
    return CheckpointConfig(
        format="deepspec",
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 1),
        block_size=block_size,
        mask_token_id=fields.integer("mask_token_id", 0, vocab_size - 1),
        target_layer_ids=layers,
        raw=raw,
        **_heads(fields),
        **_backbone(fields, raw.get("architectures"), layers, block_size),
    )


def _read_deepseek_v4(path: Path, raw: Mapping[str, Any]) -> CheckpointConfig:
    fields = Fields(path, ("", raw), ("text_config.", raw.get("text_config") or {}))
    vocab_size = fields.integer("vocab_size", 1)
    rank = fields.integer("dspark_markov_rank", 1)
    # The format has no key for the kind: its heads are vanilla, and its confidence head always reads W1.
    kind = fields.choice("dspark_markov_head_type", KINDS) if fields.has("dspark_markov_head_type") else "vanilla"
    return CheckpointConfig(
        format="deepseek_v4",
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 1),
        block_size=_block(fields, "dspark_block_size", True),
        mask_token_id=fields.integer("dspark_noise_token_id", 0, vocab_size - 1),
        target_layer_ids=fields.integers("dspark_target_layer_ids"),
        raw=raw,
        unsupported=f"{path}: found a DeepSeek-V4 drafter, whose layers are the target's own kind",
        **_checked_heads(fields, rank, kind, True, True, "dspark_markov_rank"),
    )


def _read_speculators(path: Path, raw: Mapping[str, Any]) -> CheckpointConfig:
    fields = Fields(path, ("", raw))
    fields.choice("speculators_model_type", ("dspark",))
    name, layer = fields.raw("transformer_layer_config", "an object")
    if not isinstance(layer, dict):
        raise fields.error(name, layer, "an object")
    sizes = Fields(path, (f"{name}.", layer))
    vocab_size = sizes.integer("vocab_size", 1)
    anchor = fields.flag("sample_from_anchor")
    block_size = _block(fields, "block_size", anchor)
    _check_proposals(fields, raw, block_size)
    hidden_states = fields.integers("aux_hidden_state_layer_ids")
    if hidden_states[0] < 0:
        raise fields.error(
            "aux_hidden_state_layer_ids", list(hidden_states), "indices of hidden states, 0 for the embedding"
        )
    target_size = fields.integer("target_hidden_size", 1) if fields.has("target_hidden_size") else None
    return CheckpointConfig(
        format="speculators",
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", 1, vocab_size),
        hidden_size=sizes.integer("hidden_size", 1),
        block_size=block_size,
        mask_token_id=fields.integer("mask_token_id", 0, vocab_size - 1),
        target_layer_ids=tuple(index - 1 for index in hidden_states),
        sample_from_anchor=anchor,
        raw=raw,
        **_heads(fields),
        **_backbone(sizes, raw.get("architectures"), hidden_states, block_size, target_size),
    )


def _check_proposals(fields: Fields, raw: Mapping[str, Any], block_size: int) -> None:
    """Raise if speculators' own statement of the drafted tokens disagrees with the block."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or []
    for index, method in enumerate(methods):
        tokens = method.get("speculative_tokens")
        if tokens is not None and tokens != block_size:
            key = f"speculators_config.proposal_methods[{index}].speculative_tokens"
            raise fields.error(key, tokens, f"{block_size}, which block_size and sample_from_anchor give")


def _read_dflash(path: Path, raw: Mapping[str, Any], format: Format) -> CheckpointConfig:
    """SpecForge and ModelOpt: a Qwen3 configuration whose drafting keys are inside `dflash_config`."""
    nested = raw["dflash_config"]
    inner, sizes = Fields(path, ("dflash_config.", nested)), Fields(path, ("", raw))
    both = Fields(path, ("dflash_config.", nested), ("", raw))
    inner.must_be("projector_type", ("dspark", "dflash", None), "other drafters have other tensors")
    for key in ("causal", "use_swa", "attention_sink_bias"):
        inner.must_be(key, (False, None), "attention inside the block is full in both directions")
    vocab_size = sizes.integer("vocab_size", 1)
    anchor = _samples_from_anchor(both, raw, nested)
    block_size, layers = _block(both, "block_size", anchor), both.integers("target_layer_ids")
    return CheckpointConfig(
        format=format,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        hidden_size=sizes.integer("hidden_size", 1),
        block_size=block_size,
        mask_token_id=both.integer("mask_token_id", 0, vocab_size - 1),
        target_layer_ids=layers,
        sample_from_anchor=anchor,
        raw=raw,
        **(_modelopt_heads(inner) if format == "modelopt" else _specforge_heads(both)),
        **_backbone(sizes, raw.get("architectures"), layers, block_size),
    )


def _samples_from_anchor(both: Fields, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """ModelOpt says so (`shift_label`); else a DSpark drafter does and a DFlash drafter does not."""
    if both.has("shift_label"):
        return both.flag("shift_label")
    return nested.get("projector_type") == "dspark" or raw.get("architectures") == ["DSparkDraftModel"]


def _specforge_heads(both: Fields) -> dict[str, Any]:
    if both.has("enable_confidence_head") or not both.has("confidence_head_alpha"):
        return _heads(both)
    _, alpha = both.raw("confidence_head_alpha", "a number")
    # The trainer builds the head exactly when its loss has a weight.
    derived = ("", {"enable_confidence_head": alpha > 0})
    return _heads(Fields(both.path, *both.places, derived))


def _modelopt_heads(inner: Fields) -> dict[str, Any]:
    rank = inner.integer("markov_rank", 1)
    has_confidence = inner.flag("use_confidence_head")
    kind = inner.choice("markov_head_type", KINDS)
    return _checked_heads(inner, rank, kind, has_confidence, has_confidence, "dflash_config.use_confidence_head")


_READERS: dict[Format, Callable[[Path, Mapping[str, Any]], CheckpointConfig]] = {
    "deepspec": _read_deepspec,
    "deepseek_v4": _read_deepseek_v4,
    "speculators": _read_speculators,
    "specforge": lambda path, raw: _read_dflash(path, raw, "specforge"),
    "modelopt": lambda path, raw: _read_dflash(path, raw, "modelopt"),
}

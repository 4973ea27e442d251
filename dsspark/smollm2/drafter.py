"""The drafter of SmolLM2: a DSpark drafter with standardised features and a draft vocabulary, over the model's own embedding and LM head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsspark.models.backbone import BackboneConfig, ParallelBackbone
from dsspark.models.qwen3 import Qwen3Drafter, Qwen3DrafterConfig
from dsspark.smollm2.model import FEATURE_LAYERS
from dsspark.training.loop import write_atomically
from dsspark.types import check_draft_to_target

MASK_TOKEN = "<empty_output>"
"""A special token of SmolLM2 that no chat contains."""
WEIGHTS, CONFIG = "drafter.safetensors", "config.json"


class SmolLM2Drafter(Qwen3Drafter):
    """A `Qwen3Drafter` whose backbone standardises the target's features: some of SmolLM2's reach 25,000.

    Args:
        config: sizes; `draft_vocab_size` must be given.
        model: the causal LM of transformers whose embedding and LM head it borrows; neither is trained nor saved here.
        draft_to_target: [V_draft] int64 strictly increasing target ids.
        generator: draws the initial weights; a fresh generator with seed 0 if None.

    Raises:
        ValueError: for a draft vocabulary of another size than the config's, or ids that do not increase.
    """

    backbone: ParallelBackbone

    def __init__(
        self,
        config: Qwen3DrafterConfig,
        model: Any,
        draft_to_target: Tensor,
        generator: torch.Generator | None = None,
    ) -> None:
        weight: Tensor = model.get_output_embeddings().weight
        if config.draft_vocab_size != len(draft_to_target):
            raise ValueError(
                f"draft_to_target: got {len(draft_to_target)} ids, expected draft_vocab_size = {config.draft_vocab_size}"
            )
        check_draft_to_target(draft_to_target, weight[: len(draft_to_target), :1].T)
        lm_head = nn.Linear(config.backbone.hidden_size, len(draft_to_target), bias=False)
        lm_head.weight = nn.Parameter(weight[draft_to_target].detach().clone(), requires_grad=False)
        embed = model.get_input_embeddings()
        super().__init__(config, embed, lm_head)
        generator = generator or torch.Generator().manual_seed(0)
        self.backbone = ParallelBackbone(config.backbone, generator)
        self.draft_to_target = draft_to_target.clone()
        with torch.no_grad():
            if self.markov_head is not None:
                self.markov_head.markov_w1.weight.copy_(_directions(embed.weight, config.markov_rank))
                self.markov_head.markov_w2.weight.zero_()  # a fresh drafter proposes what its parallel-only twin does
            if self.confidence_head is not None:
                self.confidence_head.proj.weight.zero_()
                self.confidence_head.proj.bias.zero_()

    @property
    def draft_lm_head(self) -> nn.Linear:
        """The rows of the target's LM head that are in the draft vocabulary."""
        head = self._borrowed[1]
        assert isinstance(head, nn.Linear)
        return head


def _directions(embedding: Tensor, rank: int) -> Tensor:
    """Return the embedding in its `rank` strongest directions, root mean square 1/2: tokens that are alike start alike."""
    wide = embedding.detach().double()
    _, vectors = torch.linalg.eigh(wide.T @ wide)
    projected = (wide @ vectors[:, -rank:]).float()
    return 0.5 * projected / projected.pow(2).mean().sqrt()


def drafter_config(
    model: Any,
    draft_vocab_size: int,
    mask_token_id: int,
    *,
    block_size: int = 5,
    num_layers: int = 2,
    markov_rank: int = 64,
    layers: tuple[int, ...] = FEATURE_LAYERS,
) -> Qwen3DrafterConfig:
    """Return the sizes of a drafter for a causal LM of transformers; rank 0 leaves the Markov head out."""
    sizes = model.config.get_text_config(decoder=True)
    backbone = BackboneConfig(
        feature_size=len(layers) * sizes.hidden_size,
        hidden_size=sizes.hidden_size,
        block_size=block_size,
        num_layers=num_layers,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads,
        intermediate_size=sizes.intermediate_size,
    )
    return Qwen3DrafterConfig(
        backbone=backbone,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        mask_token_id=mask_token_id,
        target_layer_ids=layers,
        draft_vocab_size=draft_vocab_size,
        markov_rank=markov_rank,
        confidence_with_markov=markov_rank > 0,
    )


def save_drafter(folder: Path, drafter: SmolLM2Drafter, provenance: Mapping[str, Any]) -> None:
    """Write the drafter: matrices in bfloat16, the rest in float32, sizes and provenance as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to(torch.bfloat16 if name in dict(drafter.named_parameters()) and value.dim() >= 2 else value.dtype)
        for name, value in drafter.state_dict().items()
    }
    assert drafter.draft_to_target is not None
    assert drafter.sts_temperatures is not None
    state |= {"draft_to_target": drafter.draft_to_target, "sts_temperatures": drafter.sts_temperatures}
    state = {name: value.contiguous().clone() for name, value in state.items()}
    write_atomically(folder / WEIGHTS, lambda file: save_file(state, file))
    config = {"drafter": asdict(drafter.config), "provenance": dict(provenance)}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_drafter(folder: Path, model: Any) -> tuple[SmolLM2Drafter, dict[str, Any]]:
    """Read a drafter and its provenance back, in float32, frozen.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the files do not belong together.
    """
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"smollm2: {name} is missing from {folder}, expected a trained drafter; "
                "train one with `python -m dsspark smollm2 prepare` and `python -m dsspark smollm2 train`"
            )
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    sizes = dict(content["drafter"])
    sizes["backbone"] = BackboneConfig(**sizes["backbone"])
    state = load_file(folder / WEIGHTS)
    drafter = SmolLM2Drafter(Qwen3DrafterConfig(**sizes), model, state.pop("draft_to_target"))
    drafter.set_sts_temperatures(state.pop("sts_temperatures"))
    expected = drafter.state_dict()
    wrong = sorted(
        name
        for name in expected.keys() | state.keys()
        if name not in state or name not in expected or state[name].shape != expected[name].shape
    )
    if wrong:
        raise ValueError(f"smollm2: {WEIGHTS} does not match {CONFIG} in {folder}: {wrong[:4]}; train the drafter again")
    drafter.load_state_dict(state)
    return drafter.requires_grad_(False).eval(), dict(content["provenance"])

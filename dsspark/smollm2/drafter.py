"""The drafter of SmolLM2: DSpark with standardised features and a draft vocabulary, over the model's own embedding and LM head.

It departs from the paper's backbone in what a block starts from. There it is the embeddings of [anchor, mask, ...]; here every slot starts
from the anchor's embedding, the context vector of the token before it, and a vector of its own. Attention would have to learn to look one
token back before it learned anything else, and there are minutes to train, not days.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsspark._checks import check_shape
from dsspark.models.backbone import BackboneConfig, DraftBackbone, DraftContext, ParallelBackbone
from dsspark.models.packed import pack_linears
from dsspark.models.qwen3 import Qwen3Drafter, Qwen3DrafterConfig
from dsspark.smollm2.model import FEATURE_LAYERS
from dsspark.training.loop import write_atomically

WEIGHTS, CONFIG = "drafter.safetensors", "config.json"


class SmolLM2Backbone(ParallelBackbone):
    """A `ParallelBackbone` whose blocks start from the anchor, the context before it, and a vector of each slot."""

    def __init__(self, config: BackboneConfig, generator: torch.Generator) -> None:
        super().__init__(config, generator)
        size = config.hidden_size
        self.anchor_proj = nn.Linear(size, size, bias=False)
        self.last_proj = nn.Linear(size, size, bias=False)
        self.slots = nn.Parameter(0.5 * torch.randn(config.block_size, size, generator=generator))
        with torch.no_grad():
            # Turned at random: the LM head is the embedding again, and an anchor that went straight through would propose itself.
            turned, _ = torch.linalg.qr(torch.randn(size, size, generator=generator))
            self.anchor_proj.weight.copy_(turned)
            self.last_proj.weight.copy_(0.5 * torch.eye(size))

    def context(self, features: Tensor) -> Tensor:
        """Return the context vectors [..., d] of verified tokens (paper eq. 2)."""
        out: Tensor = self.hidden_norm(self.fc((features - self.feature_mean) / self.feature_std))
        return out

    def start(self, embedded: Tensor, last: Tensor) -> Tensor:
        """Return what the blocks start from, [..., gamma, d], of the anchors' embeddings and the context before them, [..., d] each."""
        out: Tensor = (self.anchor_proj(embedded) + self.last_proj(last))[..., None, :] + self.slots
        return out


class SmolLM2Context(DraftContext):
    """A `DraftContext` that also keeps the last context vector.

    Attributes:
        last: [R, d], of the token before the anchor; zeros before the first.
    """

    def __init__(self, backbone: SmolLM2Backbone, num_requests: int) -> None:
        super().__init__(backbone, num_requests)
        self.last = backbone.fc.weight.new_zeros(num_requests, backbone.config.hidden_size)

    def append(self, backbone: DraftBackbone, features: Tensor, request_ids: Tensor) -> None:
        """Append verified tokens; see `DSparkDrafter.extend`."""
        assert isinstance(backbone, SmolLM2Backbone)
        super().append(backbone, features, request_ids)
        ids = request_ids.to(torch.int64)
        newest = torch.full((len(self.last) + 1,), -1, device=ids.device)
        rows = torch.arange(len(ids), device=ids.device)
        newest = newest.scatter_reduce(0, torch.where(ids < 0, len(self.last), ids), rows, "amax")[:-1]
        present = newest >= 0
        self.last = self.last.clone()
        self.last[present] = backbone.context(features[newest[present]])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the requests `rows`, in that order."""
        super().keep(rows)
        self.last = self.last[torch.tensor(list(rows), dtype=torch.int64, device=self.last.device)]


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

    backbone: SmolLM2Backbone

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
        if not bool((draft_to_target[1:] > draft_to_target[:-1]).all()):
            raise ValueError(
                "draft_to_target: got ids that do not increase, expected strictly increasing ones; sort them"
            )
        lm_head = nn.Linear(config.backbone.hidden_size, len(draft_to_target), bias=False)
        lm_head.weight = nn.Parameter(weight[draft_to_target].detach().clone(), requires_grad=False)
        embed = model.get_input_embeddings()
        super().__init__(config, embed, lm_head)
        generator = generator or torch.Generator().manual_seed(0)
        self.backbone = SmolLM2Backbone(config.backbone, generator)
        self.draft_to_target = draft_to_target.clone()
        with torch.no_grad():
            self.backbone.norm.weight.copy_(_final_norm(model))
            self.backbone.anchor_proj.weight.div_(embed.weight.pow(2).mean().sqrt())
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

    def new_context(self, num_requests: int) -> SmolLM2Context:
        """Return the empty context of R requests."""
        return SmolLM2Context(self.backbone, num_requests)

    def start_blocks(self, anchors: Tensor, last: Tensor) -> Tensor:
        """Return what the blocks start from, [..., gamma, d], of anchors [...] and the context before them, [..., d]."""
        embed = self._borrowed[0]
        assert embed is not None
        started: Tensor = self.backbone.start(embed(anchors), last)
        return started

    @torch.no_grad()
    def backbone_pass(self, anchors: Tensor, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Run the backbone once for every request; see `DSparkDrafter.backbone_pass`."""
        assert isinstance(context, SmolLM2Context)
        check_shape("anchors", anchors, (context.lengths.shape[0],))
        block = self.start_blocks(anchors.to(torch.int64), context.last)[:, None]
        hidden = self.backbone(block, context.lengths[:, None], context.visible())[:, 0]
        return self.base_logits(hidden), hidden


def _final_norm(model: Any) -> Tensor:
    """Return the weight of the model's last norm, [d]: the scale that its LM head is made for."""
    weights = [module.weight for name, module in model.named_modules() if name.endswith(".norm")]
    weight: Tensor = weights[-1].detach()
    return weight


def _directions(embedding: Tensor, rank: int) -> Tensor:
    """Return the embedding in its `rank` strongest directions, root mean square 1/2: tokens that are alike start alike."""
    wide = embedding.detach().double()
    _, vectors = torch.linalg.eigh(wide.T @ wide)
    projected = (wide @ vectors[:, -rank:]).float()
    projected = F.pad(
        projected, (0, rank - projected.shape[1])
    )  # a rank beyond the hidden size has nothing to start from
    scaled: Tensor = 0.5 * projected / projected.pow(2).mean().sqrt()
    return scaled


def drafter_config(
    model: Any,
    draft_vocab_size: int,
    *,
    block_size: int = 4,
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
        mask_token_id=0,  # not read: a block has no masks
        target_layer_ids=layers,
        draft_vocab_size=draft_vocab_size,
        markov_rank=markov_rank,
        confidence_with_markov=markov_rank > 0,
    )


def save_drafter(folder: Path, drafter: SmolLM2Drafter, provenance: Mapping[str, Any]) -> None:
    """Write the drafter: matrices in bfloat16, the rest in float32, sizes and provenance as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to(
            torch.bfloat16 if name in dict(drafter.named_parameters()) and value.dim() >= 2 else value.dtype
        )
        for name, value in drafter.state_dict().items()
    }
    assert drafter.draft_to_target is not None
    assert drafter.sts_temperatures is not None
    state |= {"draft_to_target": drafter.draft_to_target, "sts_temperatures": drafter.sts_temperatures}
    state = {name: value.cpu().contiguous().clone() for name, value in state.items()}
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
        raise ValueError(
            f"smollm2: {WEIGHTS} does not match {CONFIG} in {folder}: {wrong[:4]}; train the drafter again"
        )
    drafter.load_state_dict(state)
    pack_linears(drafter.draft_lm_head)
    return pack_linears(drafter.requires_grad_(False).eval()), dict(content["provenance"])

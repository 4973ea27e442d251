"""The drafters of the paper by name, and what each of them reads of the target.

- `mtp-1` drafts one token, from the target's final state (DeepSeek-V3).
- `eagle3` drafts gamma tokens, one pass of one layer each (Li et al. 2025).
- `dflash` drafts gamma tokens in one pass; slot 0, the anchor, predicts the first (paper 2.2, with the slots of 3.1).
- `dflash-masks` does so in gamma + 1 slots, of which only the masks predict (paper 2.2).
- `dspark`, `dspark-gated`, `dspark-rnn` draft as `dflash` does, corrected token by token by a sequential head, and have a confidence
  head (paper 3).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from dsspark.decoding import Target
from dsspark.models.autoregressive import AutoregressiveConfig, AutoregressiveDrafter
from dsspark.models.backbone import BackboneConfig
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.heads import HeadKind
from dsspark.models.target import TargetLM, TargetView

DrafterName = Literal["mtp-1", "eagle3", "dflash", "dflash-masks", "dspark", "dspark-gated", "dspark-rnn"]
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)
AnyDrafter = DSparkDrafter | AutoregressiveDrafter


def drafter_config(
    name: str,
    target: TargetLM,
    *,
    block_size: int = 7,
    num_layers: int = 2,
    intermediate_size: int = 640,
    markov_rank: int = 64,
) -> DrafterConfig | AutoregressiveConfig:
    """Return the sizes of a drafter for `target`, with the target's heads.

    Args:
        name: one of `DRAFTERS`.
        target: what it drafts for.
        block_size: gamma; "mtp-1" drafts one token whatever it is.
        num_layers: of a parallel backbone; "mtp-1" and "eagle3" have one layer whatever it is.
        intermediate_size: of the SwiGLU.
        markov_rank: r of a sequential head.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in DRAFTERS:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(DRAFTERS)}")
    sizes, alone = target.config, name in ("mtp-1", "eagle3")
    backbone = BackboneConfig(
        feature_size=sizes.hidden_size if name == "mtp-1" else sizes.feature_size,
        hidden_size=sizes.hidden_size,
        block_size=1 if name == "mtp-1" else block_size,
        num_layers=1 if alone else num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=intermediate_size,
    )
    if alone:
        return AutoregressiveConfig(backbone, "mtp" if name == "mtp-1" else "eagle3")
    if name.startswith("dflash"):
        return DrafterConfig(backbone, 0, has_confidence=False, sample_from_anchor=name == "dflash")
    kinds: dict[str, HeadKind] = {"dspark-gated": "gated", "dspark-rnn": "rnn"}
    return DrafterConfig(backbone, markov_rank, kinds.get(name, "vanilla"))


def build_drafter(
    target: TargetLM, config: DrafterConfig | AutoregressiveConfig, generator: torch.Generator | None = None
) -> AnyDrafter:
    """Return an untrained drafter of these sizes; see `drafter_config`."""
    if isinstance(config, AutoregressiveConfig):
        return AutoregressiveDrafter(target, config, generator)
    return DSparkDrafter(target, config, generator)


def view_for(target: TargetLM, drafter: AnyDrafter) -> Target:
    """Return the target as this drafter reads it, for `generate(view_for(target, drafter), drafter, ...)`: same law, same cache."""
    if isinstance(drafter, AutoregressiveDrafter):
        return TargetView(target, last_hidden=drafter.config.kind == "mtp")
    return target

"""Tiny models that the tests share: float64, with weights large enough that every part of them matters."""

from __future__ import annotations

import torch
from torch import nn

from dsspark.models.backbone import BackboneConfig
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.target import TargetConfig, TargetLM

TINY = TargetConfig(
    hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, feature_layers=(0, 1)
)
BACKBONE = BackboneConfig(
    feature_size=64, hidden_size=32, block_size=4, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)


def _enlarged(model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.12)
    model.requires_grad_(False)


def tiny_target(generator: torch.Generator) -> TargetLM:
    """Return a float64 target with three layers."""
    model = TargetLM(TINY, generator).double()
    _enlarged(model, generator)
    return model


def tiny_drafter(target: TargetLM, generator: torch.Generator) -> DSparkDrafter:
    """Return a float64 drafter over `target`, gamma = 4, with both heads."""
    model = DSparkDrafter(target, DrafterConfig(BACKBONE, markov_rank=8), generator).double()
    _enlarged(model, generator)
    return model

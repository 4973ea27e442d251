"""Training of one drafter from texts that the target has been run over once, for all drafters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dsspark.experiments.plan import Spec, Study
from dsspark.models.drafter import TeacherTexts
from dsspark.models.drafters import AnyDrafter, build_drafter, drafter_config
from dsspark.models.target import TargetLM
from dsspark.reference.losses import POSITION_DECAY
from dsspark.training.distill import block_batch, block_losses, draw_anchors, observe
from dsspark.training.loop import train
from dsspark.training.pretrain import Streams, mixed_rows
from dsspark.training.rollout import sample_continuations

_ROWS_AT_ONCE = 16


@torch.no_grad()
def observe_pool(target: TargetLM, streams: Streams, study: Study) -> TeacherTexts:
    """Return the study's training texts with the target's states, in bfloat16: the target is not run again.

    Half of the rows are text of the corpus; the other half begin with text of the corpus and are continued by the target.
    """
    drawn = study.pool_rows // 2
    corpus = mixed_rows(streams, 11, 0, study.pool_rows - drawn, study.row_length + 1)
    prefixes = mixed_rows(streams, 11, 1, drawn, study.drawn_prefix)
    length = study.row_length + 1 - study.drawn_prefix
    own = sample_continuations(target, prefixes, length, torch.Generator().manual_seed(11))
    parts = [observe(target, rows) for rows in torch.split(torch.cat((corpus, own)), _ROWS_AT_ONCE)]
    tokens, features, hidden = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return TeacherTexts(tokens, features.to(torch.bfloat16), hidden.to(torch.bfloat16))


def new_drafter(target: TargetLM, spec: Spec, study: Study, seed: int) -> AnyDrafter:
    """Return an untrained drafter of the study."""
    config = drafter_config(
        spec.name,
        target,
        block_size=spec.block_size,
        num_layers=spec.num_layers,
        intermediate_size=study.intermediate_size,
    )
    return build_drafter(target, config, torch.Generator().manual_seed(seed))


def fit_drafter(
    target: TargetLM,
    pool: TeacherTexts,
    spec: Spec,
    study: Study,
    seed: int,
    checkpoint: Path,
    console: Console | None = None,
) -> tuple[AnyDrafter, list[dict[str, float]]]:
    """Train a drafter and return it, frozen, with the history of its losses.

    Drafters of one seed see the same rows; those of one gamma also the same anchors.
    """
    drafter = new_drafter(target, spec, study, seed)
    read = pool.hidden if spec.name == "mtp-1" else pool.features
    drafter.backbone.fit_standardisation(read[: 4 * _ROWS_AT_ONCE].float().flatten(0, 1))
    # The shipped decay of the position weights at the shipped gamma, stretched with the block.
    decay = POSITION_DECAY * max(1.0, spec.block_size / 7)

    def losses(step: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((seed, step))
        rows = torch.from_numpy(rng.integers(study.pool_rows, size=study.batch_rows))
        anchors = draw_anchors(rng, len(rows), study.row_length + 1, drafter.block_size, study.anchors_per_row)
        texts = TeacherTexts(pool.tokens[rows], pool.features[rows].float(), pool.hidden[rows].float())
        result = block_losses(drafter, block_batch(target, texts, anchors, drafter.block_size), decay)
        return {spec.key: result.total, "accept": result.acceptance, "distance": result.distance.detach()}

    history = train(spec.key, {spec.key: drafter}, losses, study.schedule, checkpoint, console=console)
    drafter.requires_grad_(False).eval()
    return drafter, history

"""What is trained and measured: one drafter for each line of a table or point of a figure, over several seeds."""

from __future__ import annotations

from dataclasses import dataclass

from dsspark.models.drafters import DRAFTERS
from dsspark.training.loop import Schedule

DEPTH, GAMMA = 2, 7
"""Layers and drafts a round where nothing else is said."""


@dataclass(frozen=True)
class Spec:
    """One drafter.

    Attributes:
        name: one of `dsspark.models.drafters.DRAFTERS`.
        block_size: gamma.
        num_layers: of a parallel backbone.
    """

    name: str
    block_size: int = GAMMA
    num_layers: int = DEPTH

    @property
    def key(self) -> str:
        """What files and tables call it."""
        return f"{self.name}_g{self.block_size}_l{self.num_layers}"


DSPARK, DFLASH, EAGLE3, MTP = Spec("dspark"), Spec("dflash"), Spec("eagle3", GAMMA, 1), Spec("mtp-1", 1, 1)
DEEP_DFLASH = Spec("dflash", num_layers=5)
TABLE_1 = (MTP, EAGLE3, *(Spec(name) for name in DRAFTERS if name not in ("mtp-1", "eagle3")))
VARIANTS = tuple(spec for spec in TABLE_1 if spec not in (MTP, EAGLE3, DFLASH, DSPARK))
"""Drafters of Table 1 about which nothing is claimed."""


def depths(reduced: bool) -> tuple[Spec, ...]:
    """Return the drafters of figure 3, DSpark's first."""
    layers = ((DEPTH,), (DEPTH, 5)) if reduced else ((1, DEPTH, 5), (1, DEPTH, 5))
    names = ("dspark", "dflash")
    return tuple(Spec(name, num_layers=n) for name, numbers in zip(names, layers, strict=True) for n in numbers)


def lengths(name: str, reduced: bool) -> tuple[Spec, ...]:
    """Return the drafters of figure 4 of one kind by gamma; the paper counts the anchor: 4, 8, 12, 16."""
    return tuple(Spec(name, block_size=gamma) for gamma in ((3, GAMMA, 15) if reduced else (3, GAMMA, 11, 15)))


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything the results depend on besides the code, the shipped target and the Python that ships the corpus.

    Attributes:
        reduced: which size this is.
        seeds: each draws its own initial weights, batches, prompts and uniforms.
        schedule: of every drafter's training.
        pool_rows, row_length, drawn_prefix: texts that the target is run over once; half of them it continues itself.
        batch_rows, anchors_per_row: of a training step.
        intermediate_size: of the drafters' SwiGLU.
        prompts, fit_prompts, max_new_tokens: of the rollouts, by domain and seed; STS is fitted on other prompts than it is judged on.
        texts, text_length, text_prefix: target-drawn held-out texts for the teacher-forced acceptance, by domain.
        thresholds: of the survival (figure 5).
        latency_batches: batch sizes that are timed.
    """

    reduced: bool
    seeds: tuple[int, ...] = (0, 1, 2)
    schedule: Schedule
    pool_rows: int
    row_length: int
    drawn_prefix: int
    batch_rows: int
    anchors_per_row: int
    intermediate_size: int
    prompts: int
    fit_prompts: int
    max_new_tokens: int
    texts: int
    text_length: int = 96
    text_prefix: int = 64
    thresholds: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
    latency_batches: tuple[int, ...] = (1, 16)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every drafter once, those that most claims need first."""
        gammas = zip(*(reversed(lengths(name, self.reduced)) for name in ("dspark", "dflash")), strict=True)
        longer = (spec for pair in gammas for spec in pair)
        wanted = (DSPARK, DFLASH, EAGLE3, DEEP_DFLASH, *longer, MTP, *depths(self.reduced), *VARIANTS)
        return tuple(dict.fromkeys(wanted))

    @property
    def runs(self) -> tuple[tuple[Spec, int], ...]:
        """Every drafter and seed to train, in this order; the reduced study trains the variants with one seed."""
        return tuple(
            (spec, seed)
            for spec in self.specs
            for seed in (self.seeds[:1] if self.reduced and spec in VARIANTS else self.seeds)
        )


def reduced_study() -> Study:
    """Return the study that is meant for a quarter of an hour on two idle cores."""
    return Study(
        reduced=True,
        schedule=Schedule(steps=100, peak_lr=3e-3, peak_matrix_lr=1e-2, warmup=10, checkpoint_every=1000),
        pool_rows=256,
        row_length=192,
        drawn_prefix=64,
        batch_rows=4,
        anchors_per_row=24,
        intermediate_size=256,
        prompts=16,
        fit_prompts=16,
        max_new_tokens=48,
        texts=16,
        thresholds=(0.0, 0.3, 0.6, 0.8, 0.9),
    )


def full_study() -> Study:
    """Return the study that is meant for three hours on two idle cores."""
    return Study(
        reduced=False,
        schedule=Schedule(steps=500, peak_lr=2e-3, peak_matrix_lr=5e-3, warmup=50, checkpoint_every=100),
        pool_rows=768,
        row_length=256,
        drawn_prefix=96,
        batch_rows=6,
        anchors_per_row=32,
        intermediate_size=640,
        prompts=48,
        fit_prompts=48,
        max_new_tokens=128,
        texts=64,
    )

"""What the answer owes to each assumption: the matched-throughput speed-up again, with one number moved at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dsspark.serving import assumptions
from dsspark.serving.acceptance import Parametric, RoundPool, parametric_pools
from dsspark.serving.assumptions import H200_NODE, Hardware, Model, Sourced
from dsspark.serving.experiment import BASELINE, SUBJECT, Load, System, match, roofline_system, sweep

BASELINE_USERS = (32, 256, 1024)
"""Loads of MTP-1 at which the speed-up is reported."""
SUBJECT_USERS = (8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048)
"""Loads of the delayed scheduler, on whose curve those throughputs are looked up."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One assumption moved.

    Attributes:
        name: of the assumption.
        value: what it is moved to.
        hardware: changes of the node.
        rounds: changes of the acceptance model.
        mix: of the domains; equal parts if None.
        prompt_tokens: mean; the assumption's if None.
        system: changes of `roofline_system`.
    """

    name: str
    value: str
    hardware: Mapping[str, float] | None = None
    rounds: Mapping[str, float] | None = None
    mix: Mapping[str, float] | None = None
    prompt_tokens: float | None = None
    system: Mapping[str, object] | None = None


VARIANTS = (
    Variant(name="as assumed", value=""),
    Variant(name="floor of a layer", value="50 us", hardware={"layer_floor": 50e-6}),
    Variant(name="floor of a layer", value="240 us (R1 on 8 x H200, same source)", hardware={"layer_floor": 240e-6}),
    Variant(name="memory efficiency", value="0.7", hardware={"memory_efficiency": 0.7}),
    Variant(name="memory efficiency", value="1.0", hardware={"memory_efficiency": 1.0}),
    Variant(name="compute efficiency", value="0.4", hardware={"compute_efficiency": 0.4}),
    Variant(name="compute efficiency", value="1.0", hardware={"compute_efficiency": 1.0}),
    Variant(name="overlap of reading, computing, sending", value="none", system={"overlap": False}),
    Variant(name="captured sizes", value="every B", system={"sizes": (8,)}),
    Variant(name="DSpark drafter's time", value="x 0.5", system={"draft_scale": 0.5}),
    Variant(name="DSpark drafter's time", value="x 2", system={"draft_scale": 2.0}),
    Variant(name="MTP-1 acceptance", value="0.85", rounds={"mtp_acceptance": 0.85}),
    Variant(name="MTP-1 acceptance", value="0.90", rounds={"mtp_acceptance": 0.90}),
    Variant(name="AUC of the confidence", value="0.81", rounds={"auc": 0.81}),
    Variant(name="AUC of the confidence", value="0.91", rounds={"auc": 0.91}),
    Variant(name="variance shared in a round", value="0", rounds={"shared": 0.0}),
    Variant(name="variance shared in a round", value="0.9", rounds={"shared": 0.9}),
    Variant(name="calibration", value="overconfident, logits x 1.5", rounds={"overconfidence": 1.5}),
    Variant(name="traffic", value="chat only", mix={"chat": 1.0}),
    Variant(name="traffic", value="math only", mix={"math": 1.0}),
    Variant(name="prompt", value="16,384 tokens", prompt_tokens=16384.0),
)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The speed-up under a variant, at each of `BASELINE_USERS`; NaN where the subject never has that throughput."""

    name: str
    value: str
    speedups: list[float]


def _changed(hardware: Hardware, changes: Mapping[str, float] | None) -> Hardware:
    moved = {name: Sourced(value, getattr(hardware, name).unit, "moved") for name, value in (changes or {}).items()}
    return replace(hardware, **moved)  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _pools(model: Parametric, block_size: int, seed: int, pool_size: int) -> tuple[RoundPool, RoundPool]:
    return parametric_pools(model, block_size, seed=seed, pool_size=pool_size)


def variant_system(
    model: Model, variant: Variant, *, block_size: int, max_requests: int, pool_size: int, seed: int
) -> tuple[System, float]:
    """Return the engine of a variant and its mean prompt."""
    prompt = variant.prompt_tokens or assumptions.PROMPT_TOKENS.value
    rounds = replace(Parametric.stated(), **(variant.rounds or {}))  # type: ignore[arg-type]
    system = roofline_system(
        model,
        _pools(rounds, block_size, seed, pool_size),
        max_requests=max_requests,
        hardware=_changed(H200_NODE, variant.hardware),
        context=prompt + assumptions.OUTPUT_TOKENS.value / 2,
        **(variant.system or {}),  # type: ignore[arg-type]
    )
    return system, prompt


def run_sensitivity(
    model: Model,
    *,
    block_size: int,
    variants: Sequence[Variant] = VARIANTS,
    baseline_users: Sequence[int] = BASELINE_USERS,
    subject_users: Sequence[int] = SUBJECT_USERS,
    pool_size: int = 1 << 14,
    seed: int = 0,
    on_variant: Callable[[], None] | None = None,
) -> list[Sensitivity]:
    """Simulate MTP-1 and the delayed scheduler under each variant, in a closed loop.

    Args:
        model: the target.
        block_size: gamma of the DSpark-like drafter.
        variants: what is moved.
        baseline_users, subject_users: loads of each.
        pool_size: rounds a domain; smaller than in a sweep.
        seed: of everything.
        on_variant: told of each.
    """
    results = []
    most = max(*baseline_users, *subject_users)
    for variant in variants:
        system, prompt = variant_system(
            model, variant, block_size=block_size, max_requests=most, pool_size=pool_size, seed=seed
        )
        curves = {
            policy: sweep(
                system, [Load(users=n, prompt_tokens=prompt, mix=variant.mix, seed=seed) for n in users], [policy]
            )[policy]
            for policy, users in ((BASELINE, baseline_users), (SUBJECT, subject_users))
        }
        matches = match(curves[BASELINE], curves[SUBJECT])
        results.append(Sensitivity(name=variant.name, value=variant.value, speedups=[m.speedup for m in matches]))
        if on_variant is not None:
            on_variant()
    return results

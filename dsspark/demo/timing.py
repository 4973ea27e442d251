"""What the demo measures of the machine: the cost table, what the schedulers admit, and wall-clock against plain decoding."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import dsspark
from dsspark.cost_table import CostTable
from dsspark.decoding import Drafter, RoundReport, Target, generate, pack_prompts
from dsspark.randomness import Uniforms
from dsspark.serving.delayed import DelayedScheduler
from dsspark.serving.policies import EarlyStopping, FixedLength, Policy

PROFILED_BUDGET = 4
"""Tokens that each request of a profiled step verifies, its anchor included: the middle of 1 .. 1 + gamma."""
_WARMUP_STEPS = 3
"""Steps of a scheduler that are not counted: the delayed one plans its first two from a prior."""


class _Engine:
    """Requests in the middle of their texts, on which a decoding step can be repeated."""

    def __init__(self, target: Target, drafter: Drafter, contexts: Sequence[Sequence[int]]) -> None:
        self.target, self.drafter = target, drafter
        bodies = [list(context[:-1]) for context in contexts]
        self.anchors = torch.tensor([context[-1] for context in contexts])
        self.positions = torch.tensor([len(body) for body in bodies])
        self.cache, self.context = target.new_cache(len(bodies)), drafter.new_context(len(bodies))
        self.cache.reserve(self.positions)
        batch = pack_prompts(bodies, 0)
        _, features = target.forward_ragged(batch, self.cache)
        drafter.extend(self.context, features, batch.request_ids)

    def keep(self, count: int) -> None:
        """Keep the first `count` requests."""
        if count < len(self.anchors):
            self.anchors, self.positions = self.anchors[:count], self.positions[:count]
            self.cache.keep(range(count))
            self.context.keep(range(count))

    def step(self, size: int) -> None:
        """Draft, verify `size` tokens of as many requests as that is worth, and forget them again."""
        count = -(-size // PROFILED_BUDGET)
        self.keep(count)
        uniforms = Uniforms.from_seeds(range(count), [0] * count, self.drafter.block_size)
        proposal = self.drafter.propose(self.anchors, self.context, uniforms, temperature=torch.ones(count))
        drafts = torch.full((count,), (size - count) // count, dtype=torch.int32)
        drafts[: (size - count) % count] += 1
        batch = dsspark.pack(self.anchors, proposal.draft.tokens, drafts, self.positions)
        self.cache.reserve(self.positions + drafts + 1)
        logits, _ = self.target.forward_ragged(batch, self.cache)
        dsspark.verify(logits, batch, proposal.draft, uniforms)
        self.cache.rollback(self.positions)


@torch.no_grad()
def profile_costs(
    target: Target,
    drafter: Drafter,
    contexts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    on_step: Callable[[], None] | None = None,
) -> CostTable:
    """Measure SPS(B) of whole decoding steps (draft, target pass, verification) on this machine.

    Args:
        target: the target.
        drafter: the drafter.
        contexts: token ids of real texts, repeated as often as needed.
        sizes: the batch tokens B to measure.
        repeats: timed steps a size.
        on_step: told of every step.
    """
    count = -(-max(sizes) // PROFILED_BUDGET)
    engine = _Engine(target, drafter, [contexts[i % len(contexts)] for i in range(count)])

    def step(size: int) -> None:
        engine.step(size)
        if on_step is not None:
            on_step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a flat curve is a result here, and the report shows it
        return CostTable.profile(step, sorted(sizes, reverse=True), repeats)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """What happens with R requests at once.

    Attributes:
        num_requests: R.
        budgets: mean verified tokens a request and step, 1 + l, of each scheduler.
        tokens_per_second: of all requests together, measured over the counted steps, by policy.
    """

    num_requests: int
    budgets: dict[str, float]
    tokens_per_second: dict[str, float]


class _EnoughError(Exception):
    """Leaves `generate` once enough steps were counted."""


def sweep_schedulers(
    target: Target,
    drafter: Drafter,
    contexts: Sequence[Sequence[int]],
    table: CostTable,
    counts: Sequence[int],
    *,
    steps: int = 10,
    temperature: float = 1.0,
    seed: int = 0,
    on_point: Callable[[], None] | None = None,
) -> list[SweepPoint]:
    """Decode R requests at once for growing R, under both schedulers, whole blocks and no drafter.

    Args:
        target: the target.
        drafter: with a confidence head.
        contexts: prompts, repeated as often as needed.
        table: the cost table both schedulers read.
        counts: the R.
        steps: steps counted at each R, all of them with R requests.
        temperature: of the target and the draft.
        seed: of the texts.
        on_point: told of every R.
    """
    points = []
    for count in counts:
        prompts = [contexts[i % len(contexts)] for i in range(count)]
        policies: dict[str, Policy] = {
            "Algorithm 1": EarlyStopping(table),
            "delayed": DelayedScheduler(table, drafter.block_size),
            "whole blocks": FixedLength(drafter.block_size),
        }
        budgets, rates = {}, {}
        for name, policy in (*policies.items(), ("target alone", FixedLength(0))):
            used = None if name == "target alone" else drafter
            budget, rates[name] = _some_steps(target, used, prompts, policy, steps, temperature, seed)
            if isinstance(policy, (EarlyStopping, DelayedScheduler)):
                budgets[name] = budget
        points.append(SweepPoint(num_requests=count, budgets=budgets, tokens_per_second=rates))
        if on_point is not None:
            on_point()
    return points


def _some_steps(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    steps: int,
    temperature: float,
    seed: int,
) -> tuple[float, float]:
    """Return the mean budget and the tokens a second of `steps` steps after the warm-up."""
    budgets: list[float] = []
    emitted, started, seconds = 0, 0.0, 0.0
    seen = 0

    def on_round(report: RoundReport) -> None:
        nonlocal emitted, started, seconds, seen
        seen += 1
        if seen > _WARMUP_STEPS:
            budgets.append(1 + report.lengths.float().mean().item())
            emitted += int(report.verification.num_emitted.sum())
            seconds = time.perf_counter() - started
        if seen == _WARMUP_STEPS:
            started = time.perf_counter()
        if len(budgets) == steps:
            raise _EnoughError

    # Enough for every step to have all requests, even if each round emitted the most it can.
    block_size = 0 if drafter is None else drafter.block_size
    longest = (steps + _WARMUP_STEPS + 1) * (block_size + 1)
    seeds = [seed + i for i in range(len(prompts))]
    with contextlib.suppress(_EnoughError):
        generate(target, drafter, prompts, longest, temperature, policy, seeds, on_round=on_round)
    return statistics.fmean(budgets), emitted / seconds


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Wall-clock of decoding with the drafter against the target alone, one request at a time.

    Attributes:
        temperature: of both.
        policy: what chose the verified lengths.
        ratios: drafted over plain tokens a second, of each pair; above 1 the drafter is faster.
        drafted, alone: median tokens a second.
    """

    temperature: float
    policy: str
    ratios: list[float]
    drafted: float
    alone: float

    @property
    def median(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)


def time_pairs(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperature: float,
    policy_name: str = "whole blocks",
    policy: Policy | None = None,
    seed: int = 0,
    on_pair: Callable[[], None] | None = None,
) -> Speed:
    """Decode each prompt both ways, `new_tokens` each, prefill included; which goes first alternates from pair to pair."""

    def rate(used: Drafter | None, index: int) -> float:
        start = time.perf_counter()
        generate(target, used, [prompts[index]], new_tokens, temperature, policy, seeds=[seed + index])
        return new_tokens / (time.perf_counter() - start)

    drafted: list[float] = []
    alone: list[float] = []
    for index in range(len(prompts)):
        ways = ((drafter, drafted), (None, alone))
        for used, rates in ways if index % 2 else reversed(ways):
            rates.append(rate(used, index))
        if on_pair is not None:
            on_pair()
    return Speed(
        temperature=temperature,
        policy=policy_name,
        ratios=[a / b for a, b in zip(drafted, alone, strict=True)],
        drafted=statistics.median(drafted),
        alone=statistics.median(alone),
    )

"""Sweeps of the simulator, and what they are compared by: speed at matched throughput, throughput at matched speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dsspark.cost_table import CostTable
from dsspark.serving import assumptions
from dsspark.serving.acceptance import RoundPool
from dsspark.serving.assumptions import H200_NODE, Hardware, Model
from dsspark.serving.roofline import StepCosts, measured_costs, roofline_costs
from dsspark.serving.simulated import DrafterName, make_policy
from dsspark.serving.simulator import Outcome, simulate
from dsspark.serving.workload import draw_workload

POLICIES = ("none", "mtp-1", "fixed-5", "threshold-0.5", "algorithm-1", "delayed")
BASELINE, SUBJECT = "mtp-1", "delayed"
LEAST_REQUESTS, REQUESTS_A_USER = 400, 4


@dataclass(frozen=True, kw_only=True)
class Load:
    """What arrives at one point of a sweep.

    Attributes:
        users: places in the batch; in a closed loop, users.
        rate: requests a second; None for a closed loop.
        requests: how many in all; enough for a steady state if None.
        prompt_tokens, output_tokens, output_spread, mix, seed: as `draw_workload`.
    """

    users: int
    rate: float | None = None
    requests: int | None = None
    prompt_tokens: float = assumptions.PROMPT_TOKENS.value
    output_tokens: float = assumptions.OUTPUT_TOKENS.value
    output_spread: str = "exponential"
    mix: Mapping[str, float] | None = None
    seed: int = 0

    @property
    def count(self) -> int:
        """Requests simulated."""
        return self.requests or max(LEAST_REQUESTS, REQUESTS_A_USER * self.users)


@dataclass(frozen=True, kw_only=True)
class System:
    """The engine under test: costs and rounds of each drafter.

    Attributes:
        name: in figures.
        costs, pools: by drafter.
    """

    name: str
    costs: Mapping[DrafterName, StepCosts]
    pools: Mapping[DrafterName, RoundPool]

    @property
    def tables(self) -> dict[DrafterName, CostTable]:
        """What the schedulers know, by drafter."""
        return {name: costs.table for name, costs in self.costs.items()}


def roofline_system(
    model: Model,
    pools: tuple[RoundPool, RoundPool],
    *,
    max_requests: int,
    hardware: Hardware = H200_NODE,
    context: float,
    overlap: bool = True,
    draft_scale: float = 1.0,
    sizes: Sequence[int] | None = None,
) -> System:
    """Return a node that serves `model` without a drafter, with MTP-1 and with a DSpark-like one.

    Args:
        model: the target.
        pools: (DSpark-like, MTP-1) rounds.
        max_requests: the largest batch.
        hardware: the node.
        context: mean cached tokens, for the profiled table.
        overlap, draft_scale, sizes: as `roofline_costs`.
    """
    drafter, mtp = pools

    def costs(block_size: int, stages: float, scale: float) -> StepCosts:
        return roofline_costs(
            model,
            hardware,
            max_requests=max_requests,
            block_size=block_size,
            stages=stages,
            context=context,
            overlap=overlap,
            draft_scale=scale,
            sizes=sizes,
        )

    return System(
        name=model.name,
        costs={
            "none": costs(0, 0, 1.0),
            "mtp": costs(1, assumptions.MTP_STAGES.value, 1.0),
            "dspark": costs(drafter.block_size, assumptions.DSPARK_STAGES.value, draft_scale),
        },
        pools={"none": mtp, "mtp": mtp, "dspark": drafter},
    )


def measured_system(table: CostTable, pools: tuple[RoundPool, RoundPool], *, max_requests: int, name: str) -> System:
    """Return an engine that was profiled: every policy pays the same whole steps."""
    drafter, mtp = pools
    costs = measured_costs(table, max_requests=max_requests)
    return System(
        name=name,
        costs={"none": costs, "mtp": costs, "dspark": costs},
        pools={"none": mtp, "mtp": mtp, "dspark": drafter},
    )


def run_point(system: System, load: Load, policy: str, on_progress: Callable[[int], None] | None = None) -> Outcome:
    """Simulate one policy under one load; the same load is the same requests with the same rounds for every policy."""
    chosen = make_policy(policy, system.tables)
    pool = system.pools[chosen.drafter]
    workload = draw_workload(
        load.count,
        domains=pool.domains,
        mix=load.mix or {name: 1.0 for name in pool.domains},  # what DeepSeek serves is not public
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        output_spread=load.output_spread,
        rate=load.rate,
        seed=load.seed,
    )
    return simulate(workload, pool, system.costs[chosen.drafter], chosen, users=load.users, on_progress=on_progress)


def sweep(
    system: System,
    loads: Sequence[Load],
    policies: Sequence[str] = POLICIES,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, list[Outcome]]:
    """Simulate every policy under every load."""
    return {policy: [run_point(system, load, policy, on_progress) for load in loads] for policy in policies}


def crossing(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Return the largest y where the curve of points (x, y), joined in their order, passes x = at; NaN if it never does.

    Interpolated between logarithms: throughput and speed are rates. A throughput curve bends back when an engine is overloaded, so
    it may pass twice.
    """
    best = float("nan")
    lx, ly, target = np.log(x), np.log(y), np.log(at)
    for i in range(len(lx)):
        j = min(i + 1, len(lx) - 1)
        low, high = min(lx[i], lx[j]), max(lx[i], lx[j])
        if low <= target <= high:
            share = (target - lx[i]) / (lx[j] - lx[i]) if lx[j] != lx[i] else 0.0
            found = float(np.exp(ly[i] + share * (ly[j] - ly[i])))
            best = found if not best >= found else best
    return best


@dataclass(frozen=True, kw_only=True)
class Match:
    """The subject beside the baseline, at a load of the baseline.

    Attributes:
        concurrency: of the baseline.
        throughput, user_speed: of the baseline there.
        speedup: the subject's tokens/s/user at the same throughput, over the baseline's; NaN if it never reaches that.
        throughput_gain: the subject's throughput at the same tokens/s/user, over the baseline's; NaN if it never has that speed.
    """

    concurrency: float
    throughput: float
    user_speed: float
    speedup: float
    throughput_gain: float


def match(baseline: Sequence[Outcome], subject: Sequence[Outcome]) -> list[Match]:
    """Compare two curves at every point of the baseline.

    Below the subject's lightest load its speed is that of the lightest load: the engine idles in between.
    """
    throughput, speed = [o.throughput for o in subject], [o.user_speed for o in subject]
    lightest = min(throughput)
    return [
        Match(
            concurrency=base.concurrency,
            throughput=base.throughput,
            user_speed=base.user_speed,
            speedup=crossing(throughput, speed, max(base.throughput, lightest)) / base.user_speed,
            throughput_gain=crossing(speed, throughput, base.user_speed) / base.throughput,
        )
        for base in baseline
    ]


def best_at_speed(curves: Mapping[str, Sequence[Outcome]], target: float) -> dict[str, float]:
    """Return the largest throughput of each policy at which a user gets `target` tokens/s or more; NaN where none does.

    A policy that is still faster at its heaviest simulated load could take more: its figure is what was simulated.

    Raises:
        ValueError: if no policy is that fast at any load.
    """
    found = {}
    for name, curve in curves.items():
        fast_enough = [o.throughput for o in curve if o.user_speed >= target]
        at_target = crossing([o.user_speed for o in curve], [o.throughput for o in curve], target)
        found[name] = float(np.fmax(at_target, max(fast_enough, default=float("nan"))))
    if all(np.isnan(value) for value in found.values()):
        fastest, name = max((o.user_speed, name) for name, curve in curves.items() for o in curve)
        raise ValueError(
            f"--target-speed: got {target:g} tokens/s/user, expected at most {fastest:.4g}, the fastest that was simulated "
            f"({name}); ask for less, or simulate fewer --users"
        )
    return found


def verdicts(
    curves: Mapping[str, Sequence[Outcome]],
    matches: Sequence[Match],
    paper_speedup: tuple[float, float] | None,
    paper_gain: float | None = None,
) -> dict[str, object]:
    """Return how the simulated shape compares with the paper's claims; what cannot be said with these policies is left out.

    Args:
        curves: outcomes by policy, lightest load first.
        matches: of the delayed scheduler with MTP-1.
        paper_speedup: the range of the paper's speed-ups for this model; None if it says nothing of it.
        paper_gain: the paper's throughput gain at a moderate speed.
    """
    found: dict[str, object] = {}
    ratios = [m.speedup for m in matches if not np.isnan(m.speedup)]
    if ratios:
        median = float(np.median(ratios))
        found["matched-throughput speed-up, simulated: least, median, most"] = [min(ratios), median, max(ratios)]
        found["loads of MTP-1 whose throughput the delayed scheduler reaches, and does not"] = [
            len(ratios),
            len(matches) - len(ratios),
        ]
        if paper_speedup is not None:
            low, high = paper_speedup
            found["matched-throughput speed-up, paper (self-reported)"] = list(paper_speedup)
            found["loads below, inside, above the paper's range"] = [
                sum(r < low for r in ratios),
                sum(low <= r <= high for r in ratios),
                sum(r > high for r in ratios),
            ]
            found["simulated median minus the middle of the paper's range"] = median - (low + high) / 2
    if matches and paper_gain is not None:
        rising = [m for m in matches if not np.isnan(m.throughput_gain)]
        found["throughput gain at matched speed, paper (self-reported, at a moderate speed)"] = paper_gain
        found["tokens/s/user at which the simulated gain is the paper's"] = crossing(
            [m.throughput_gain for m in rising], [m.user_speed for m in rising], paper_gain
        )
    return found | _budget_verdicts(curves)


def _budget_verdicts(curves: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """Return what becomes of the verification budget, and of a fixed one, as load grows."""
    if SUBJECT not in curves:
        return {}
    budgets = [o.budget for o in curves[SUBJECT]]
    found: dict[str, object] = {
        "budget 1 + l of the delayed scheduler, lightest and heaviest load": [budgets[0], budgets[-1]],
        "budget when calm, paper (self-reported); it falls towards 1": list(assumptions.PAPER_BUDGET),
        "most that the budget rises from one load to the next": max(
            (after - before for before, after in itertools.pairwise(budgets)), default=0.0
        ),
    }
    fixed = next((name for name in curves if name.startswith("fixed-")), None)
    if fixed is not None:
        heaviest = curves[fixed][-1].throughput
        found[f"{fixed} throughput over delayed, heaviest load"] = heaviest / curves[SUBJECT][-1].throughput
        if BASELINE in curves:
            found[f"{fixed} throughput over mtp-1, heaviest load"] = heaviest / curves[BASELINE][-1].throughput
    return found

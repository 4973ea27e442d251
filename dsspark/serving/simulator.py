"""A discrete-event simulation of one engine: every step is an event, everything within a step is vectorised over requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsspark.serving.acceptance import RoundPool
from dsspark.serving.roofline import StepCosts
from dsspark.serving.simulated import SimulatedPolicy
from dsspark.serving.workload import Workload

_REPORT_EVERY = 512
"""Steps between two calls of `on_progress`."""
_MIN_FINISHED = 20
"""Requests that a percentile needs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one policy under one load. Rates and means are over the counted steps (see `simulate`).

    Attributes:
        policy: its name.
        concurrency: mean requests in a step.
        throughput: tokens a second of the whole engine.
        user_speed: tokens a second of one user: throughput / concurrency.
        budget: verified tokens a request and step, 1 + l.
        tokens_per_round: emitted, correction or bonus included.
        waste: share of the verified drafts that were not accepted.
        step_seconds: mean step.
        p50_token_seconds, p95_token_seconds: of each request's seconds a token from its first step on; NaN below 20 requests.
        p50_wait_seconds, p95_wait_seconds: from arrival to the first step; NaN for a closed loop.
        requests: requests finished, counted or not.
        tokens: tokens emitted, counted or not.
        steps: steps taken.
        simulated_seconds: on the engine's clock.
    """

    policy: str
    concurrency: float
    throughput: float
    user_speed: float
    budget: float
    tokens_per_round: float
    waste: float
    step_seconds: float
    p50_token_seconds: float
    p95_token_seconds: float
    p50_wait_seconds: float
    p95_wait_seconds: float
    requests: int
    tokens: int
    steps: int
    simulated_seconds: float


@dataclass
class _Counts:
    """Sums over the counted steps."""

    seconds: float = 0.0
    request_seconds: float = 0.0
    rounds: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    steps: int = 0
    token_seconds: list[NDArray[np.float64]] = field(default_factory=list)
    waits: list[NDArray[np.float64]] = field(default_factory=list)


def simulate(
    workload: Workload,
    pool: RoundPool,
    costs: StepCosts,
    policy: SimulatedPolicy,
    *,
    users: int,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serve a workload and measure it.

    A step takes costs.verify[B] + costs.draft[R] + costs.cached_token * (tokens in the caches). Requests wait in order of arrival
    for one of `users` places. Counted are the steps from the moment when as many requests have finished as there are places (or a
    quarter of all, if that is less) until no request is left to take a place that falls free: neither the cold start nor the
    emptying engine. If no step is left over, all are counted.

    Args:
        workload: the requests.
        pool: the rounds of the policy's drafter.
        costs: of the engine with that drafter.
        policy: how many drafts are verified.
        users: places; in a closed loop, users who ask again at once.
        on_progress: told how many requests have finished since it was last called.

    Raises:
        ValueError: if the cost table ends below what the policy may ask for, or `users` is below 1.
    """
    if users < 1:
        raise ValueError(f"--users: got {users}, expected 1 or more")
    most = policy.most_tokens(users, pool.block_size)
    if most >= len(costs.verify) or users >= len(costs.draft):
        raise ValueError(
            f"cost table: got {len(costs.verify) - 1} batch tokens and {len(costs.draft) - 1} requests, expected at least {most} "
            f"and {users} for {policy.name} with {users} users; profile larger sizes or simulate fewer users"
        )
    engine = _Engine(workload, pool, costs, policy, users)
    reported = 0
    while engine.step():
        if on_progress is not None and engine.steps % _REPORT_EVERY == 0:
            on_progress(engine.finished - reported)
            reported = engine.finished
    if on_progress is not None:
        on_progress(engine.finished - reported)
    return engine.outcome()


class _Engine:
    """The places of the engine: the first `active` entries of every array are the batch, in no particular order."""

    def __init__(
        self, workload: Workload, pool: RoundPool, costs: StepCosts, policy: SimulatedPolicy, users: int
    ) -> None:
        self.workload, self.costs, self.policy = workload, costs, policy
        domains, self.size, self.block_size = pool.survival.shape
        self.survival = pool.survival.reshape(domains * self.size, self.block_size)
        self.accepted = pool.accepted.reshape(domains * self.size)
        self.domain_start = workload.domain * self.size
        self.request, self.left, self.cached, self.round = (np.zeros(users, dtype=np.int64) for _ in range(4))
        self.began = np.zeros(users)
        # history[0] is the oldest survival: `delay` steps ago. 1 is the optimistic prior of a request without a record.
        self.history = np.ones((policy.delay, users, self.block_size), dtype=np.float32)
        self.places, self.active, self.following, self.finished, self.steps = users, 0, 0, 0, 0
        self.now, self.tokens = 0.0, 0
        self.warm = min(users, max(1, len(workload) // 4))
        self.counts, self.everything = _Counts(), _Counts()

    def step(self) -> bool:
        """Take requests in, run one step, let the finished ones go; return whether there is more to do."""
        self._take_in()
        n = self.active
        if not n:
            return False
        request = self.request[:n]
        rows = (self.workload.start[request] + self.round[:n] * self.workload.stride[request]) % self.size
        rows += self.domain_start[request]
        # A policy that reads no survival only looks at its shape.
        survival = self.survival[rows if self.policy.reads_survival else np.broadcast_to(0, n)]
        stale = self.history[0, :n] if self.policy.delay else survival
        lengths = self.policy.lengths(survival, stale)
        accepted = np.minimum(self.accepted[rows], lengths)
        emitted = np.minimum(accepted + 1, self.left[:n])
        verified = int(lengths.sum())
        seconds = float(
            self.costs.verify[n + verified]
            + self.costs.draft[n]
            + self.costs.cached_token * float(self.cached[:n].sum())
        )
        self._remember(survival)
        self._advance(n, emitted, seconds)
        self._count(n, verified, int(accepted.sum()), int(emitted.sum()), seconds)
        self._let_go()
        return True

    def _remember(self, survival: NDArray[np.float32]) -> None:
        if self.policy.delay:
            self.history[:-1, : self.active] = self.history[1:, : self.active]
            self.history[-1, : self.active] = survival

    def _advance(self, n: int, emitted: NDArray[np.int64], seconds: float) -> None:
        self.now += seconds
        self.left[:n] -= emitted
        self.cached[:n] += emitted
        self.round[:n] += 1
        self.steps += 1

    def _count(self, n: int, verified: int, accepted: int, emitted: int, seconds: float) -> None:
        self.tokens += emitted
        counted = self.finished >= self.warm and self.following < len(self.workload)
        for counts in (self.counts, self.everything) if counted else (self.everything,):
            counts.seconds += seconds
            counts.request_seconds += n * seconds
            counts.rounds += n
            counts.emitted += emitted
            counts.verified += verified
            counts.accepted += accepted
            counts.steps += 1

    def _take_in(self) -> None:
        """Fill free places with requests that have arrived; an idle engine waits for the next."""
        free = self.places - self.active
        if not free or self.following >= len(self.workload):
            return
        end = min(self.following + free, len(self.workload))
        arrival = self.workload.arrival
        if arrival is not None:
            if not self.active:
                self.now = max(self.now, float(arrival[self.following]))
            end = min(end, int(np.searchsorted(arrival, self.now, side="right")))
        new = np.arange(self.following, end)
        place = slice(self.active, self.active + len(new))
        self.request[place], self.left[place], self.cached[place] = (
            new,
            self.workload.output[new],
            self.workload.prompt[new],
        )
        self.round[place], self.began[place] = 0, self.now
        self.history[:, place] = 1.0
        if arrival is not None and len(new):
            self._keep("waits", self.now - arrival[new])
        self.active, self.following = self.active + len(new), end

    def _keep(self, name: str, values: NDArray[np.float64]) -> None:
        counted = self.finished >= self.warm and self.following < len(self.workload)
        for counts in (self.counts, self.everything) if counted else (self.everything,):
            getattr(counts, name).append(values)

    def _let_go(self) -> None:
        """Close the gaps that finished requests leave with the last requests of the batch."""
        done = np.flatnonzero(self.left[: self.active] <= 0)
        if not len(done):
            return
        spent = self.now - self.began[done]
        self._keep("token_seconds", spent / self.workload.output[self.request[done]])
        self.finished += len(done)
        remain = self.active - len(done)
        gaps = done[done < remain]
        movers = np.flatnonzero(self.left[remain : self.active] > 0) + remain
        for state in (self.request, self.left, self.cached, self.round, self.began):
            state[gaps] = state[movers]
        self.history[:, gaps] = self.history[:, movers]
        self.active = remain

    def outcome(self) -> Outcome:
        """Return what was measured."""
        counts = self.counts if self.counts.steps else self.everything
        p50, p95 = _percentiles(counts.token_seconds)
        wait50, wait95 = _percentiles(counts.waits)
        throughput, concurrency = counts.emitted / counts.seconds, counts.request_seconds / counts.seconds
        return Outcome(
            policy=self.policy.name,
            concurrency=concurrency,
            throughput=throughput,
            user_speed=throughput / concurrency,
            budget=1 + counts.verified / counts.rounds,
            tokens_per_round=counts.emitted / counts.rounds,
            waste=1 - counts.accepted / counts.verified if counts.verified else 0.0,
            step_seconds=counts.seconds / counts.steps,
            p50_token_seconds=p50,
            p95_token_seconds=p95,
            p50_wait_seconds=wait50,
            p95_wait_seconds=wait95,
            requests=self.finished,
            tokens=self.tokens,
            steps=self.steps,
            simulated_seconds=self.now,
        )


def _percentiles(parts: list[NDArray[np.float64]]) -> tuple[float, float]:
    values = np.concatenate(parts) if parts else np.zeros(0)
    if len(values) < _MIN_FINISHED:
        return float("nan"), float("nan")
    p50, p95 = np.percentile(values, (50, 95))
    return float(p50), float(p95)

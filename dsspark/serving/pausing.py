"""A drafter that stops drafting where drafting does not pay, so that hard text is decoded at the speed of the target alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import dsspark
from dsspark._checks import check_range
from dsspark.cost_table import CostTable
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Proposal

if TYPE_CHECKING:
    from dsspark._dispatch import Backend
    from dsspark.decoding import Drafter

FIRST_CREDIT, LATER_CREDIT = 0.5, 0.1
"""What an attempt may lose on average before it ends, in plain steps: the first of a text, and one after a pause."""
LONGEST_PAUSE = 16
"""Times the first pause."""


@dataclass
class PausingContext:
    """A drafter's context of one request, and how drafting has been going.

    Attributes:
        inner: the context of the drafter.
        gain: mean seconds that a drafted round saved against plain decoding, an exponential average.
        pause: rounds of the next pause.
        waiting: features and request ids that came during a pause.
        paused: rounds until the next attempt; 0 while drafting.
        verified: drafts that the round in progress verifies; None before the first round.
    """

    inner: Any
    gain: float
    pause: int
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    paused: int = 0
    verified: int | None = None

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order: the one request, or none once it is finished."""
        self.inner.keep(rows)
        self.waiting.clear()


class PausingDrafter:
    """Drafter and policy in one: drafts while that is faster than plain decoding, judged by the rounds before, one request at a time.

    A drafted round that emits n tokens and verifies B saves n * plain - table.seconds[B] seconds. When their average falls below 0 the
    drafter pauses for `pause` rounds, twice as long after every attempt that fails again. A paused round costs what a plain one does:
    nothing is drafted, nothing is verified, and the drafter's context is brought up to date when it resumes. Drafted rounds are
    scheduled by Algorithm 1. Whether a round is drafted depends on earlier rounds alone, so the law stays the target's.

        drafter = PausingDrafter(drafter, table, plain)
        generate(target, drafter, [prompt], 100, policy=drafter)

    Args:
        drafter: with a confidence head.
        table: seconds of a drafted round that verifies B tokens, the draft included.
        plain: seconds of a round of the target alone.
        memory: rounds that the average looks back on, about.
        pause: rounds of the first pause.

    Raises:
        ValueError: for numbers out of range.
    """

    def __init__(
        self, drafter: Drafter, table: CostTable, plain: float, *, memory: float = 6.0, pause: int = 8
    ) -> None:
        check_range("memory", memory, 1.0, math.inf, "1 looks at the last round only")
        check_range("pause", pause, 1, math.inf, "pause for at least a round")
        if not 0 < plain < math.inf:
            raise ValueError(f"plain: got {plain}, expected the seconds of a round, a positive number; measure one")
        self.drafter, self.table, self.plain = drafter, table, plain
        self.memory, self.pause = memory, pause
        self.block_size, self.sts_temperatures = drafter.block_size, drafter.sts_temperatures
        self._seconds = table.seconds.tolist()
        self._context: PausingContext | None = None

    def new_context(self, num_requests: int) -> PausingContext:
        """Return the empty context of one request.

        Raises:
            ValueError: for several requests: a pause is a decision about one.
        """
        if num_requests != 1:
            raise ValueError(f"num_requests: got {num_requests}, expected 1; decode requests one at a time")
        return PausingContext(self.drafter.new_context(1), FIRST_CREDIT * self.plain, self.pause)

    def extend(self, context: PausingContext, features: Tensor, request_ids: Tensor) -> None:
        """Append the target's features of verified tokens, and learn how many tokens the round emitted."""
        context.waiting.append((features, request_ids))
        if context.verified is None:  # the prompt
            return
        if context.paused:
            context.paused -= 1
        else:
            saved = len(request_ids) * self.plain - self._seconds[1 + context.verified]
            self._judge(context, saved)

    def _judge(self, context: PausingContext, saved: float) -> None:
        context.gain += (saved - context.gain) / self.memory
        if context.gain < 0:
            context.paused, context.pause = context.pause, min(2 * context.pause, LONGEST_PAUSE * self.pause)
            context.gain = LATER_CREDIT * self.plain
        elif context.gain > FIRST_CREDIT * self.plain:
            context.pause = self.pause

    def propose(
        self,
        anchors: Tensor,
        context: PausingContext,
        uniforms: Uniforms,
        *,
        temperature: Tensor,
        keep_logits: bool = True,
        backend: Backend = "auto",
    ) -> Proposal:
        """Draft a block, or nothing during a pause."""
        self._context = context
        if context.paused:
            nothing = torch.zeros_like(uniforms.accept, dtype=torch.int64)
            return Proposal(DraftBlock.point(nothing), torch.full_like(uniforms.accept, -math.inf))
        for features, request_ids in context.waiting:
            self.drafter.extend(context.inner, features, request_ids)
        context.waiting.clear()
        return self.drafter.propose(
            anchors, context.inner, uniforms, temperature=temperature, keep_logits=keep_logits, backend=backend
        )

    def step(self, survival: Tensor, request_ids: Sequence[int]) -> Tensor:
        """Return how many drafts are verified: none during a pause, else `dsspark.schedule` of the survival.

        Raises:
            RuntimeError: for a policy that is used without its drafter.
        """
        if self._context is None:
            raise RuntimeError(
                "policy: got a PausingDrafter that drafts nothing, expected the drafter of the same generate; pass it as both"
            )
        lengths = dsspark.schedule(survival, self.table)
        self._context.verified = int(lengths[0])
        return lengths

"""A drafter that stops drafting where drafting does not pay, so that hard text is decoded at the speed of the target alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsspark._checks import check_range
from dsspark._dispatch import Backend
from dsspark.cost_table import CostTable
from dsspark.decoding import Drafter
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Proposal

_NEVER = -math.inf
"""A confidence logit whose survival is 0: no scheduler verifies such a draft."""


@dataclass
class PausingContext:
    """A drafter's context of one request, with the features it has not been given yet.

    Attributes:
        inner: the context of the drafter.
        waiting: features and request ids that came during a pause.
        gain: mean seconds that a drafted round saved against plain decoding, an exponential average.
        paused: rounds until the next attempt; 0 while drafting.
        pause: length of the next pause.
        drafted: whether the round in progress was drafted.
        prefilled: whether a round has begun; what comes before is the prompt.
    """

    inner: Any
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gain: float = 0.0
    paused: int = 0
    pause: int = 0
    drafted: bool = False
    prefilled: bool = False

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.inner.keep(rows)
        if not rows:
            self.waiting.clear()


class PausingDrafter:
    """Drafts while that is faster than plain decoding, judged by the rounds before and a cost table, one request at a time.

    A round that emits n tokens in `table.seconds[B]` saves n * plain - table.seconds[B] seconds. When the average falls below 0 the
    drafter pauses for `pause` rounds, twice as long after every attempt that fails again, at most 16 times as long. A paused round costs
    what a plain one does: nothing is drafted, nothing is appended to the drafter's context until it resumes, and the survival of what is proposed is
    0, so that a scheduler verifies nothing. Whether a round is drafted depends on earlier rounds alone: the law stays the target's.

    Args:
        drafter: the drafter. Its policy in `generate` must be a scheduler that never verifies a draft of survival 0.
        table: seconds of a drafted round that verifies B tokens.
        plain: seconds of a step of the target alone.
        memory: rounds that the average looks back on, about.
        pause: rounds of the first pause.

    Raises:
        ValueError: for numbers that are not positive.
    """

    def __init__(
        self, drafter: Drafter, table: CostTable, plain: float, *, memory: float = 6.0, pause: int = 8
    ) -> None:
        check_range("memory", memory, 1.0, math.inf, "1 looks at the last round only")
        check_range("pause", pause, 1, math.inf, "pause for at least a round")
        if not 0 < plain < math.inf:
            raise ValueError(f"plain: got {plain}, expected the seconds of a step, a positive number")
        self.drafter, self.seconds, self.plain = drafter, table.seconds.tolist(), plain
        self.memory, self.pause = memory, pause
        self.block_size = drafter.block_size
        self._last: PausingContext | None = None

    @property
    def sts_temperatures(self) -> Tensor | None:
        """The drafter's."""
        return self.drafter.sts_temperatures

    def new_context(self, num_requests: int) -> PausingContext:
        """Return the empty context of one request.

        Raises:
            ValueError: for several requests: a pause is a decision about one.
        """
        if num_requests != 1:
            raise ValueError(f"num_requests: got {num_requests}, expected 1; decode requests one at a time")
        return PausingContext(self.drafter.new_context(num_requests), pause=self.pause)

    def extend(self, context: PausingContext, features: Tensor, request_ids: Tensor) -> None:
        """Append the target's features of verified tokens, and learn how many tokens the round emitted."""
        context.waiting.append((features, request_ids))
        if not context.prefilled:
            return
        if context.drafted:
            emitted = len(request_ids)
            self._judge(context, emitted)
        else:
            context.paused -= 1

    def _judge(self, context: PausingContext, emitted: int) -> None:
        # The accepted drafts and the correction or bonus; what was verified is not known here, at least what was accepted.
        saved = emitted * self.plain - self.seconds[min(emitted + 1, len(self.seconds) - 1)]
        context.gain += (saved - context.gain) / self.memory
        if context.gain < 0:
            context.paused, context.pause = context.pause, min(2 * context.pause, 16 * self.pause)
            context.gain = 0.0
        elif saved > 0:
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
        context.prefilled = True
        context.drafted = context.paused <= 0
        if not context.drafted:
            nothing = torch.zeros_like(uniforms.accept, dtype=torch.int64)
            return Proposal(DraftBlock.point(nothing), torch.full_like(uniforms.accept, _NEVER))
        for features, request_ids in context.waiting:
            self.drafter.extend(context.inner, features, request_ids)
        context.waiting.clear()
        return self.drafter.propose(
            anchors, context.inner, uniforms, temperature=temperature, keep_logits=keep_logits, backend=backend
        )

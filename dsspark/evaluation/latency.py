"""Where a round's time goes: drafting, its sequential part, the target's pass, and the rest (paper figure 4, right).

Times are medians on this machine, so only their shares say anything about another one. The sequential part is the difference between
drafting the block with the Markov head and without it, on the same base logits, timed in turn.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsspark.decoding import Drafter, Target, generate
from dsspark.models.drafter import DSparkDrafter, draft_block
from dsspark.models.drafters import AnyDrafter, view_for
from dsspark.models.target import TargetLM
from dsspark.randomness import Uniforms


class _Timed:
    """A target or a drafter whose named methods are timed; everything else is the wrapped object's own."""

    def __init__(self, wrapped: Any, methods: Sequence[str]) -> None:
        self._wrapped, self._methods = wrapped, methods
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._wrapped, name)
        if name not in self._methods:
            return method

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begun)
            return result

        return timed


def measure_latency(
    target: TargetLM,
    drafter: AnyDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Decode the prompts as one batch and return median milliseconds a step.

    Args:
        target: the target.
        drafter: any of `dsspark.models.drafters`.
        prompts: token ids; their number is the batch size.
        max_new_tokens: of each.
        temperature: of both.

    Returns:
        "round_ms", "draft_ms", "target_ms", "sequential_ms" (0 for a drafter without a Markov head; all of the drafting for one
        that passes through its layers token by token), "draft_share" and "sequential_share" of the round, "batch".
    """
    timed_target = _Timed(view_for(target, drafter), ("forward_ragged",))
    timed_drafter = _Timed(drafter, ("propose",))
    ends: list[float] = []
    generate(
        _as_target(timed_target),
        _as_drafter(timed_drafter),
        prompts,
        max_new_tokens,
        temperature,
        on_round=lambda report: ends.append(time.perf_counter()),
    )
    rounds = [after - before for before, after in itertools.pairwise(ends)]
    whole, draft = statistics.median(rounds), statistics.median(timed_drafter.seconds)
    passes = statistics.median(timed_target.seconds[-len(rounds) :])
    if isinstance(drafter, DSparkDrafter):
        sequential = 0.0 if drafter.markov_head is None else sequential_seconds(drafter, len(prompts), temperature)
    else:
        sequential = draft
    parts = {"round": whole, "draft": draft, "target": passes, "sequential": sequential}
    milliseconds = {f"{name}_ms": round(1e3 * seconds, 4) for name, seconds in parts.items()}
    shares = {"draft_share": round(draft / whole, 5), "sequential_share": round(sequential / whole, 5)}
    return milliseconds | shares | {"batch": len(prompts)}


def sequential_seconds(drafter: DSparkDrafter, batch: int, temperature: float = 1.0, repeats: int = 31) -> float:
    """Return the median seconds that the Markov head adds to drafting a block of `batch` requests.

    Raises:
        ValueError: for a drafter without a Markov head.
    """
    head, config = drafter.markov_head, drafter.config.backbone
    if head is None:
        raise ValueError("drafter: got one without a Markov head, expected a sequential head to time")
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(batch, config.block_size, head.markov_w2.weight.shape[0], generator=generator)
    hidden = torch.randn(batch, config.block_size, config.hidden_size, generator=generator)
    anchors, uniforms = torch.zeros(batch, dtype=torch.int64), Uniforms.draw(batch, config.block_size, generator)

    def draft(with_head: bool) -> None:
        draft_block(base, anchors, head if with_head else None, uniforms, temperature=temperature, hidden=hidden)

    return statistics.median(_seconds(draft, True) - _seconds(draft, False) for _ in range(repeats))


def _seconds(call: Callable[[bool], None], argument: bool) -> float:
    begun = time.perf_counter()
    call(argument)
    return time.perf_counter() - begun


def _as_target(timed: Any) -> Target:
    target: Target = timed
    return target


def _as_drafter(timed: Any) -> Drafter:
    drafter: Drafter = timed
    return drafter

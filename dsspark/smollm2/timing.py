"""What decoding one chat costs on this machine, and how much faster than plain decoding the drafter makes it."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import dsspark
from dsspark.cost_table import CostTable
from dsspark.decoding import Drafter, Target, generate, pack_prompts
from dsspark.randomness import Uniforms
from dsspark.serving.pausing import PausingDrafter
from dsspark.types import DraftBlock


class Stepper:
    """One chat in the middle of its text, on which a round can be repeated.

    Args:
        target: the target, with the features that the drafter reads, or without any.
        drafter: None for plain decoding.
        chat: its ids, two or more.
    """

    def __init__(self, target: Target, drafter: Drafter | None, chat: Sequence[int]) -> None:
        self.target, self.drafter = target, drafter
        self.anchors, self.positions = torch.tensor([chat[-1]]), torch.tensor([len(chat) - 1])
        self.cache = target.new_cache(1)
        self.cache.reserve(self.positions)
        batch = pack_prompts([list(chat[:-1])], 0)
        _, self.features = target.forward_ragged(batch, self.cache)
        self.context = None if drafter is None else drafter.new_context(1)
        if drafter is not None:
            drafter.extend(self.context, self.features, batch.request_ids)

    @torch.no_grad()
    def step(self, size: int) -> None:
        """Draft, verify `size` tokens, and forget them again."""
        block_size = 1 if self.drafter is None else self.drafter.block_size
        uniforms = Uniforms.from_seeds([0], torch.zeros(1, dtype=torch.int64), block_size)
        draft = DraftBlock.point(torch.zeros(1, block_size, dtype=torch.int64))
        if self.drafter is not None:
            proposal = self.drafter.propose(self.anchors, self.context, uniforms, temperature=torch.zeros(1))
            draft = proposal.draft
        lengths = torch.tensor([size - 1], dtype=torch.int32)
        batch = dsspark.pack(self.anchors, draft.tokens, lengths, self.positions)
        self.cache.reserve(self.positions + lengths + 1)
        logits, _ = self.target.forward_ragged(batch, self.cache)
        dsspark.verify(logits, batch, draft, uniforms, temperature=0.0)
        self.cache.rollback(self.positions)


@dataclass(frozen=True)
class Costs:
    """Seconds a round: of plain decoding, and of a drafted round by the tokens it verifies."""

    plain: float
    table: CostTable


def profile_costs(target: Target, alone: Target, drafter: Drafter, chat: Sequence[int], repeats: int = 9) -> Costs:
    """Measure rounds on this machine, plain ones among the others.

    Args:
        target: with the features that the drafter reads.
        alone: the same model without them.
        drafter: the drafter.
        chat: a real chat of typical length.
        repeats: timed rounds a size.
    """
    plain, drafted = Stepper(alone, None, chat), Stepper(target, drafter, chat)
    sizes = list(range(1, drafter.block_size + 2))
    seconds: dict[int, list[float]] = {size: [] for size in (0, *sizes)}
    for repeat in range(repeats + 1):
        for size in (0, *sizes):  # 0 stands for a plain round; sizes take turns, so that a busy moment hits them all
            start = time.perf_counter()
            (drafted.step(size) if size else plain.step(1))
            if repeat:
                seconds[size].append(time.perf_counter() - start)
    medians = {size: statistics.median(values) for size, values in seconds.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        table = CostTable.from_points(sizes, [medians[size] for size in sizes])
    return Costs(medians[0], table)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One chat decoded both ways.

    Attributes:
        plain, drafted: seconds, prefill included.
        tokens: new tokens.
        rounds: of the drafted way.
        text: the drafted tokens.
        equal: whether both texts are the same.
    """

    plain: float
    drafted: float
    tokens: int
    rounds: int
    text: list[int]
    equal: bool

    @property
    def ratio(self) -> float:
        """How many times faster the drafted way was."""
        return self.plain / self.drafted


def time_pair(
    target: Target,
    alone: Target,
    drafter: Drafter,
    costs: Costs,
    chat: Sequence[int],
    new_tokens: int,
    stop_tokens: Sequence[int],
    *,
    temperature: float = 0.0,
    drafted_first: bool = False,
    seed: int = 0,
) -> Pair:
    """Decode a chat with the drafter and without, one after the other in the same process."""
    pausing = PausingDrafter(drafter, costs.table, costs.plain)
    found = {}
    for used in (True, False) if drafted_first else (False, True):
        start = time.perf_counter()
        result = generate(
            target if used else alone,
            pausing if used else None,
            [chat],
            new_tokens,
            temperature,
            pausing if used else None,
            seeds=[seed],
            stop_tokens=stop_tokens,
        )
        found[used] = time.perf_counter() - start, result
    (drafted, result), (plain, other) = found[True], found[False]
    return Pair(
        plain=plain,
        drafted=drafted,
        tokens=len(result.tokens[0]),
        rounds=result.statistics.rounds,
        text=result.tokens[0],
        equal=result.tokens == other.tokens,
    )

r"""Laws on a grid, and the lattice of uniforms on which a sampler's outcome counts are exactly proportional to its law.

Vocabulary small, probabilities rational. With every combination of the midpoints (i + 1/2) / n as one big batch, each outcome
of an inverse CDF whose breakpoints are multiples of 1/n is hit exactly n times its probability, whatever the rounding (a midpoint
is 1/2n away from any breakpoint). n is computed from the law: the denominators of the cell masses, of the masses within cells, and
of every acceptance ratio below one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from dsspark._checks import check_block_size, check_cell
from dsspark.models.heads import MarkovHead
from dsspark.randomness import Uniforms

MAX_POINTS = 1 << 20
"""Most lattice points that are enumerated."""
CHUNK_ROWS = 1 << 16
"""Requests in one call of the round: what bounds the memory."""
_MAX_SIZE = 1 << 12
"""Largest n on one axis: its midpoints stay far above float32 rounding."""
_NEVER = -1e30
"""Finite logit of a token that is never drawn: a one-hot times it is 0, where -inf would give NaN."""

Row = tuple[int, ...]


def _as_rows(name: str, rows: Sequence[Sequence[int]]) -> tuple[Row, ...]:
    """Return rows of non-negative integers with a positive sum, or raise."""
    checked = tuple(tuple(row) for row in rows)
    for index, row in enumerate(checked):
        if any(isinstance(n, bool) or not isinstance(n, int) for n in row):
            raise TypeError(f"{name}[{index}]: got {row}, expected ints: the numerators of a law, such as (1, 2, 1)")
        if any(n < 0 for n in row) or sum(row) == 0:
            raise ValueError(
                f"{name}[{index}]: got {row}, expected numerators >= 0 with a positive sum, such as (1, 2, 1)"
            )
    if not checked or len({len(row) for row in checked}) != 1:
        raise ValueError(
            f"{name}: got rows of lengths {[len(row) for row in checked]}, expected equal lengths, one row a token"
        )
    return checked


@dataclass(frozen=True, kw_only=True)
class GridLaw:
    """A target and a drafter with rational laws: what each says after every previous token.

    Attributes:
        target: [V][V], numerators of p(. | previous token).
        draft: [V][V_draft], numerators of q(. | previous token).
        block_size: gamma.
        confidence: [gamma][V], c_k given x_{k-1}, as the confidence head reads it; None: 1 everywhere.
        draft_to_target: [V_draft] strictly increasing target ids, or None where draft ids are target ids.

    Raises:
        ValueError: for rows that are no laws or shapes that do not belong together.
        TypeError: for numerators that are no ints.
    """

    target: tuple[Row, ...]
    draft: tuple[Row, ...]
    block_size: int = 1
    confidence: tuple[tuple[float, ...], ...] | None = None
    draft_to_target: Row | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", _as_rows("target", self.target))
        object.__setattr__(self, "draft", _as_rows("draft", self.draft))
        check_block_size("block_size", self.block_size)
        size = len(self.target)
        if len(self.target[0]) != size or len(self.draft) != size:
            raise ValueError(
                f"target, draft: got {size} rows of {len(self.target[0])} and {len(self.draft)} rows, expected a row after each "
                "of the V tokens: target [V][V], draft [V][V_draft]; GridLaw.independent repeats one row"
            )
        ids = self.draft_ids
        if len(ids) != len(self.draft[0]) or sorted(set(ids)) != list(ids) or ids[0] < 0:
            raise ValueError(f"draft_to_target: got {ids}, expected {len(self.draft[0])} strictly increasing ids")
        if self.confidence is not None:
            shape = {len(row) for row in self.confidence}
            if len(self.confidence) != self.block_size or shape != {size}:
                raise ValueError(
                    f"confidence: got {len(self.confidence)} rows of {shape}, expected [{self.block_size}][{size}]"
                )
            object.__setattr__(self, "confidence", tuple(tuple(float(c) for c in row) for row in self.confidence))

    @classmethod
    def independent(
        cls,
        target: Sequence[int],
        draft: Sequence[int],
        block_size: int = 1,
        confidence: Sequence[Sequence[float]] | None = None,
        draft_to_target: Sequence[int] | None = None,
    ) -> GridLaw:
        """Return the law of tokens that do not depend on the previous one."""
        return cls(
            target=(tuple(target),) * len(target),
            draft=(tuple(draft),) * len(target),
            block_size=block_size,
            confidence=None if confidence is None else tuple(tuple(row) for row in confidence),
            draft_to_target=None if draft_to_target is None else tuple(draft_to_target),
        )

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.target)

    @property
    def draft_ids(self) -> Row:
        """The target id of each draft id."""
        return tuple(range(len(self.draft[0]))) if self.draft_to_target is None else self.draft_to_target

    @functools.cached_property
    def p(self) -> list[list[Fraction]]:
        """p(v | previous), [V][V]."""
        return [[Fraction(n, sum(row)) for n in row] for row in self.target]

    @functools.cached_property
    def q(self) -> list[dict[int, Fraction]]:
        """q(v | previous) by target id, positive entries only; an id past the target's vocabulary has p = 0."""
        return [{v: Fraction(n, sum(row)) for v, n in zip(self.draft_ids, row, strict=True) if n} for row in self.draft]

    def acceptance(self, previous: int, token: int) -> Fraction:
        """Return min(1, p / q) of a token that the draft can draw."""
        p = self.p[previous][token] if token < self.vocab_size else Fraction(0)
        return min(Fraction(1), p / self.q[previous][token])

    def residual(self, previous: int) -> list[Fraction]:
        """Return max(0, p - q), unnormalised; all zero where nothing is ever rejected."""
        q = self.q[previous]
        return [max(Fraction(0), p - q.get(v, Fraction(0))) for v, p in enumerate(self.p[previous])]

    def survival(self, anchors: Tensor, drafts: Tensor) -> Tensor:
        """Return a, [N, gamma] float32: the running product of c_k(x_{k-1}); it never reads x_k for a_k."""
        if self.confidence is None:
            return torch.ones(drafts.shape)
        table = torch.tensor(self.confidence)
        previous = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1).clamp(max=self.vocab_size - 1)
        return table[torch.arange(self.block_size), previous].cumprod(dim=1)


def logits_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return float32 logits [M, V] of the laws rows / sum: their logarithms, -inf for 0."""
    return torch.log(torch.tensor(rows, dtype=torch.float64)).to(torch.float32)


@functools.lru_cache(maxsize=256)
def drafter_of(law: GridLaw, temperature: float) -> MarkovHead:
    """Return a Markov head that draws exactly q at `temperature` on base logits of zero (paper eq. 5 with one-hot W1)."""
    with torch.random.fork_rng(devices=[]):  # the head's own initialisation must not disturb the caller's generator
        # What follows a token that the target lacks does not matter: that token is rejected.
        num_ids = max(law.vocab_size, law.draft_ids[-1] + 1)
        head = MarkovHead(num_ids, law.vocab_size, draft_vocab_size=len(law.draft[0]))
    logits = logits_of(law.draft).T * (temperature or 1.0)
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.eye(num_ids, law.vocab_size))
        head.markov_w2.weight.copy_(logits.clamp(min=_NEVER))
    return head


@dataclass(frozen=True, kw_only=True)
class LatticeSizes:
    """Midpoints on each axis: (cell, token) of a draft position, of an acceptance test, and (cell, token) of the final draw."""

    draft: tuple[int, int]
    accept: int
    final: tuple[int, int]


def two_level_sizes(row: Sequence[int], cell: int) -> tuple[int, int]:
    """Return the n of the cell axis and of the token axis on which a two-level draw from `row` is exact.

    The first is the common denominator of the cell masses, the second of the masses within every cell.

    Example:
        >>> two_level_sizes((1, 2, 3, 2), 2)
        (8, 15)
    """
    cells = [row[start : start + cell] for start in range(0, len(row), cell)]
    masses = [sum(entries) for entries in cells]
    within = [mass // math.gcd(*entries) for mass, entries in zip(masses, cells, strict=True) if mass]
    return sum(masses) // math.gcd(*masses), math.lcm(*within)


def _integers(row: Sequence[Fraction]) -> list[int]:
    scale = math.lcm(*(f.denominator for f in row))
    return [int(f * scale) for f in row]


def lattice_sizes(law: GridLaw, cell: int) -> LatticeSizes:
    """Return the smallest sizes on which every draw and every acceptance test of the law is exact."""
    draft = [two_level_sizes(row, cell) for row in law.draft]
    ratios = [law.acceptance(previous, token) for previous in range(law.vocab_size) for token in law.q[previous]]
    finals = [*law.p, *(row for row in map(law.residual, range(law.vocab_size)) if any(row))]
    final = [two_level_sizes(_integers(row), cell) for row in finals]
    return LatticeSizes(
        draft=(math.lcm(*(n for n, _ in draft)), math.lcm(*(n for _, n in draft))),
        accept=math.lcm(*(ratio.denominator for ratio in ratios)),
        final=(math.lcm(*(n for n, _ in final)), math.lcm(*(n for _, n in final))),
    )


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Every combination of midpoints; iterating gives chunks, each a tuple with the `Uniforms` [points * R, ...] of every round.

    Attributes:
        sizes: midpoints on each axis.
        block_size: gamma.
        num_requests: R; the rows of a chunk are point-major: row i belongs to point i // R.
        rounds: rounds with independent uniforms.
        cell: tokens in a cell of the draws that the sizes fit.
    """

    sizes: LatticeSizes
    block_size: int
    num_requests: int
    rounds: int
    cell: int

    @property
    def axes(self) -> list[int]:
        """Sizes of the axes of one request's round: draft (cell, token) by position, accept by position, final (cell, token)."""
        return [*self.sizes.draft * self.block_size, *[self.sizes.accept] * self.block_size, *self.sizes.final]

    def __len__(self) -> int:
        """Return the number of points."""
        return int(math.prod(self.axes) ** (self.num_requests * self.rounds))

    def __iter__(self) -> Iterator[tuple[Uniforms, ...]]:
        """Yield the points in chunks of bounded memory."""
        per_chunk = max(1, CHUNK_ROWS // self.num_requests)
        for start in range(0, len(self), per_chunk):
            yield self.points(start, min(start + per_chunk, len(self)))

    def points(self, start: int, stop: int) -> tuple[Uniforms, ...]:
        """Return points start .. stop - 1."""
        digits = []
        rest = torch.arange(start, stop)
        axes = self.axes * (self.num_requests * self.rounds)
        for size in axes:
            digits.append((2 * (rest % size) + 1).to(torch.float64) / (2 * size))
            rest = rest // size
        values = torch.stack(digits, dim=1).to(torch.float32)
        shaped = values.view(-1, self.rounds, self.num_requests, len(self.axes))
        return tuple(self._uniforms(shaped[:, t].flatten(0, 1)) for t in range(self.rounds))

    def _uniforms(self, values: Tensor) -> Uniforms:
        gamma = self.block_size
        return Uniforms(
            draft=values[:, : 2 * gamma].reshape(-1, gamma, 2),
            accept=values[:, 2 * gamma : 3 * gamma],
            final=values[:, 3 * gamma :],
        )


def lattice(
    law: GridLaw,
    *,
    cell: int = 4,
    num_requests: int = 1,
    rounds: int = 1,
    sizes: LatticeSizes | None = None,
    max_points: int = MAX_POINTS,
) -> Lattice:
    """Return the uniforms on which the outcome counts of a lossless round are exactly proportional to the target's law.

    Args:
        law: the laws; the sizes are computed from it.
        cell: tokens in a cell of the draws; below V, so that there are several.
        num_requests: R requests decoded together.
        rounds: rounds with independent uniforms each.
        sizes: sizes of your own, refused unless they fit the law; computed if None.
        max_points: refuse more points than this.

    Raises:
        ValueError: for sizes that do not fit the law, an axis too fine for float32, or too many points.

    Example:
        >>> law = GridLaw.independent((3, 1), (1, 1), block_size=2)
        >>> len(lattice(law)), len(lattice(law, num_requests=2))
        (64, 4096)
    """
    check_cell(cell)
    if num_requests < 1 or rounds < 1:
        raise ValueError(f"num_requests, rounds: got {num_requests}, {rounds}, expected 1 or more each")
    fitting = lattice_sizes(law, cell)
    sizes = sizes or fitting
    pairs = {
        "draft cell": (sizes.draft[0], fitting.draft[0]),
        "draft token": (sizes.draft[1], fitting.draft[1]),
        "accept": (sizes.accept, fitting.accept),
        "final cell": (sizes.final[0], fitting.final[0]),
        "final token": (sizes.final[1], fitting.final[1]),
    }
    for name, (size, needed) in pairs.items():
        if size < 1 or size % needed:
            raise ValueError(
                f"sizes: got {size} on the {name} axis, expected a multiple of {needed}, the law's denominator there"
            )
        if size > _MAX_SIZE:
            raise ValueError(
                f"law: got {size} midpoints on the {name} axis, expected at most {_MAX_SIZE}; use smaller denominators, "
                "or law_error(...)"
            )
    result = Lattice(sizes=sizes, block_size=law.block_size, num_requests=num_requests, rounds=rounds, cell=cell)
    points = math.prod(result.axes) ** (num_requests * rounds)
    if points > max_points:
        raise ValueError(
            f"law: got {points} lattice points, expected at most {max_points}; take smaller denominators, fewer requests or "
            "rounds, or compose rounds with composed_law(...)"
        )
    return result

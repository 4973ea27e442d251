r"""Exact output laws as integer counts, and their comparison with the target's law without a tolerance.

A round emits between one and gamma + 1 tokens. It is lossless if finishing its text with the target gives the target's law: with
counts N(e) of emitted texts e over N lattice points, for every text x of the full length

$$\sum_{e \text{ prefix of } x} N(e) \prod_{i > |e|} p(x_i \mid x_{i-1}) = N \prod_i p(x_i \mid x_{i-1})$$

and likewise for the texts of several requests jointly. Over the common denominator both sides are integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from dsspark.randomness import Uniforms
from dsspark.testing.errors import LosslessnessError
from dsspark.testing.grid import GridLaw, Lattice, lattice
from dsspark.testing.rounds import Stages, play_round

Text = tuple[int, ...]
Outcome = tuple[Text, ...]
"""The emitted text of each request."""
Weight = TypeVar("Weight", int, Fraction)


@dataclass(frozen=True)
class Counts:
    """How often each outcome occurs over a lattice.

    Attributes:
        counts: outcome -> points that gave it.
        total: points of the lattice.
    """

    counts: Mapping[Outcome, int]
    total: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An observed law beside the target's.

    Attributes:
        exact: outcome -> probability under the target.
        observed: outcome -> probability under the sampler, texts finished by the target.
        total_variation: half the summed difference.
        worst: the outcome with the largest difference.
    """

    exact: Mapping[Outcome, Fraction]
    observed: Mapping[Outcome, Fraction]
    total_variation: Fraction
    worst: Outcome

    @property
    def equal(self) -> bool:
        """Whether the laws are the same, exactly."""
        return self.total_variation == 0

    def __str__(self) -> str:
        if self.equal:
            return "the law is exactly the target's"
        got, wanted = self.observed[self.worst], self.exact[self.worst]
        return f"texts {self.worst} come with probability {got} instead of {wanted} (total variation {self.total_variation})"


def exact_law(round_fn: Callable[[Sequence[Uniforms]], Tensor], points: Lattice) -> Counts:
    """Return the counts of emitted texts over a lattice.

    Args:
        round_fn: maps the `Uniforms` [P R, ...] of every round to texts [P, R, L] padded with -1: see `grid_round`.
        points: from `lattice(law, ...)`, which computed sizes on which the counts are exact.

    Raises:
        ValueError: if `round_fn` returns anything else.
    """
    counts: Counter[Outcome] = Counter()
    for chunk in points:
        texts = round_fn(chunk)
        num_points = chunk[0].accept.shape[0] // points.num_requests
        wanted = f"expected an int64 tensor [{num_points}, {points.num_requests}, L] of texts padded with -1"
        if not isinstance(texts, Tensor):
            raise ValueError(f"round_fn: returned {type(texts).__name__}, {wanted}")
        if texts.dim() != 3 or texts.shape[:2] != (num_points, points.num_requests) or texts.is_floating_point():
            raise ValueError(f"round_fn: returned {list(texts.shape)} of {texts.dtype}, {wanted}")
        unique, multiplicity = torch.unique(texts, dim=0, return_counts=True)
        for outcome, count in zip(unique.tolist(), multiplicity.tolist(), strict=True):
            counts[tuple(_strip(text) for text in outcome)] += count
    return Counts(counts, len(points))


def _strip(text: Sequence[int]) -> Text:
    end = len(text)
    while end and text[end - 1] == -1:
        end -= 1
    return tuple(text[:end])


def finished(
    weights: Mapping[Outcome, Weight], law: GridLaw, anchors: Sequence[int], horizon: int
) -> tuple[dict[Outcome, Weight], int]:
    """Finish every text with the target up to `horizon` tokens.

    Returns:
        outcome -> weight times D ** (R * horizon), and that factor; D is the common denominator of the target's rows. With integer
        weights everything stays an integer.
    """
    common = math.lcm(*(sum(row) for row in law.target))
    rows = [[n * (common // sum(row)) for n in row] for row in law.target]
    done: dict[Outcome, Weight] = {}
    for outcome, weight in weights.items():
        done[outcome] = weight * common ** sum(len(text) for text in outcome)
    for request, anchor in enumerate(anchors):
        for _ in range(horizon):
            done = _one_longer(done, rows, request, anchor, horizon)
    return done, common ** (len(anchors) * horizon)


def _one_longer(
    weights: Mapping[Outcome, Weight], rows: Sequence[Sequence[int]], request: int, anchor: int, horizon: int
) -> dict[Outcome, Weight]:
    """Continue one request's unfinished texts by every token, weighted by the target's numerators."""
    longer: dict[Outcome, Weight] = {}
    for outcome, weight in weights.items():
        before: Outcome = outcome[:request]
        text: Text = outcome[request]
        after: Outcome = outcome[request + 1 :]
        if len(text) >= horizon:
            longer[outcome] = longer.get(outcome, 0) + weight
            continue
        for token, numerator in enumerate(rows[text[-1] if text else anchor]):
            if numerator:
                key = (*before, (*text, token), *after)
                longer[key] = longer.get(key, 0) + weight * numerator
    return longer


def compare(
    weights: Mapping[Outcome, Weight], total: Weight, law: GridLaw, anchors: Sequence[int] = (0,)
) -> Comparison:
    """Compare an observed law of emitted texts, jointly over the requests, with the product of the target's laws.

    Args:
        weights: outcome -> count or probability.
        total: what the weights would sum to if every point emitted something lawful.
        law: the grid law.
        anchors: the first anchor of each request.

    Raises:
        ValueError: for an outcome that has another number of texts than there are anchors.
    """
    if any(len(outcome) != len(anchors) for outcome in weights):
        raise ValueError(f"anchors: got {len(anchors)}, expected one for each request of the outcomes")
    horizon = max((len(text) for outcome in weights for text in outcome), default=1)
    # A text with an impossible token cannot be finished: it stands as it is, and differs.
    lawful = {o: w for o, w in weights.items() if all(0 <= v < law.vocab_size for text in o for v in text)}
    observed, scale = finished(lawful, law, anchors, horizon)
    nothing: dict[Outcome, int] = {((),) * len(anchors): 1}
    expected, _ = finished(nothing, law, anchors, horizon)
    rest = {o: w for o, w in weights.items() if o not in lawful}
    got = {o: Fraction(w) / (total * scale) for o, w in observed.items()}
    got.update({o: Fraction(w) / total for o, w in rest.items()})
    exact = {o: Fraction(w, scale) for o, w in expected.items()}
    keys = sorted(exact.keys() | got.keys())
    difference = {o: abs(got.get(o, Fraction(0)) - exact.get(o, Fraction(0))) for o in keys}
    zero = Fraction(0)
    return Comparison(
        exact={o: exact.get(o, zero) for o in keys},
        observed={o: got.get(o, zero) for o in keys},
        total_variation=sum(difference.values(), zero) / 2,
        worst=max(keys, key=lambda o: difference[o]),
    )


def is_exact(counts: Counts, law: GridLaw, anchors: Sequence[int] = (0,)) -> bool:
    """Return whether the counts are exactly proportional to the target's law: one comparison of integers a text."""
    if any(not 0 <= v < law.vocab_size for outcome in counts.counts for text in outcome for v in text):
        return False
    horizon = max((len(text) for outcome in counts.counts for text in outcome), default=1)
    observed, _ = finished(counts.counts, law, anchors, horizon)
    start: dict[Outcome, int] = {((),) * len(anchors): counts.total}
    expected, _ = finished(start, law, anchors, horizon)
    return observed == expected


def assert_exact(counts: Counts, law: GridLaw, anchors: Sequence[int] = (0,)) -> None:
    """Raise `LosslessnessError` unless the counts are exactly proportional to the target's law."""
    if not is_exact(counts, law, anchors):
        raise LosslessnessError(str(compare(counts.counts, counts.total, law, anchors)))


def first_token_law(counts: Counts, law: GridLaw, anchors: Sequence[int] = (0,), request: int = 0) -> list[Fraction]:
    """Return the law of the first token of one request, [V], in exact fractions."""
    comparison = compare(counts.counts, counts.total, law, anchors)
    result = [Fraction(0)] * law.vocab_size
    for outcome, probability in comparison.observed.items():
        token = outcome[request][0]
        if 0 <= token < law.vocab_size:
            result[token] += probability
    return result


def composed_law(law: GridLaw, stages: Stages | None = None, *, rounds: int, anchors: Sequence[int] = (0,)) -> Counts:
    """Return the exact law of several rounds, composed from the counts of single rounds.

    For laws whose joint lattice over the rounds would be too large. The rounds' uniforms are taken to be independent, so noise
    that is reused does not show here: enumerate the rounds jointly for that.

    Args:
        law: the grid law.
        stages: the stages; a scheduler is given the survivals of all earlier rounds. The library's own if None.
        rounds: how many.
        anchors: the first anchor of each request.

    Returns:
        Weights of emitted texts and their total, integers.
    """
    stages = stages or Stages()
    points = lattice(law, cell=stages.cell, num_requests=len(anchors))
    start = tuple(anchors)
    # A state is what the next round depends on: the texts, and what the scheduler has seen.
    states: dict[tuple[Outcome, tuple[Survival, ...]], int] = {(((),) * len(start), ()): 1}
    known: dict[tuple[Text, tuple[Survival, ...]], Counter[tuple[Outcome, Survival]]] = {}
    for _ in range(rounds):
        following: Counter[tuple[Outcome, tuple[Survival, ...]]] = Counter()
        for (texts, seen), weight in states.items():
            last = tuple(text[-1] if text else anchor for text, anchor in zip(texts, start, strict=True))
            if (last, seen) not in known:
                known[last, seen] = _one_round(law, stages, points, last, seen)
            for (emitted, survival), count in known[last, seen].items():
                longer = tuple(text + new for text, new in zip(texts, emitted, strict=True))
                following[longer, (*seen, survival) if stages.scheduler else ()] += weight * count
        states = dict(following)
    totals: Counter[Outcome] = Counter()
    for (texts, _), weight in states.items():
        totals[texts] += weight
    return Counts(totals, len(points) ** rounds)


Survival = tuple[tuple[float, ...], ...]
"""[R][gamma], hashable."""


def _one_round(
    law: GridLaw, stages: Stages, points: Lattice, anchors: Text, seen: tuple[Survival, ...]
) -> Counter[tuple[Outcome, Survival]]:
    """Return how often a round from these anchors gives each pair of emitted texts and survivals."""
    counts: Counter[tuple[Outcome, Survival]] = Counter()
    for (uniforms,) in points:
        num_points = uniforms.accept.shape[0] // len(anchors)
        anchor = torch.tensor(anchors).expand(num_points, -1)
        past = [torch.tensor(step).expand(num_points, -1, -1) for step in seen]
        played = play_round(law, stages, anchor, [uniforms], past)
        shown = torch.cat((played.tokens.to(torch.float64), played.survival.to(torch.float64)), dim=2)
        unique, multiplicity = torch.unique(shown, dim=0, return_counts=True)
        for point, count in zip(unique.tolist(), multiplicity.tolist(), strict=True):
            width = law.block_size + 1
            emitted = tuple(_strip([int(v) for v in row[:width]]) for row in point)
            counts[emitted, tuple(tuple(row[width:]) for row in point)] += count
    return counts

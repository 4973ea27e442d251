r"""What a scheduler does to the output law, with an ideal drafter and verifier: exact fractions, no sampling at all.

$$P(e) = \sum_x \prod_r q(x_r) \prod_r V\big(e_r \mid x_r, l_r(x)\big)$$

over all drafted blocks x of all requests; V is the law of what lossless verification of the first l drafts emits. Lengths come from
the scheduler, which sees the survivals, hence through them the drafted tokens: that is the only way it can leak.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch
from einops import rearrange
from torch import Tensor

from dsspark.testing.enumeration import Comparison, Outcome, Text, compare
from dsspark.testing.grid import GridLaw

LengthsFn = Callable[[Tensor], Tensor]
"""survival [R, gamma] of this step -> lengths [R]."""


def draft_paths(law: GridLaw, anchor: int) -> list[tuple[Text, Fraction]]:
    """Return every block the drafter can draw after an anchor, with its probability."""
    paths: list[tuple[Text, Fraction]] = [((), Fraction(1))]
    for _ in range(law.block_size):
        longer = []
        for path, probability in paths:
            previous = path[-1] if path else anchor
            longer += [((*path, token), probability * q) for token, q in law.q[previous].items()]
        paths = longer
    return paths


def _then(text: Text, token: int) -> Text:
    return (*text, token)


def verified_law(law: GridLaw, anchor: int, path: Text, length: int) -> dict[Text, Fraction]:
    """Return the law of what lossless verification of the first `length` tokens of a block emits."""
    emitted: dict[Text, Fraction] = {}
    alive = Fraction(1)
    previous = anchor
    for k in range(length):
        accepted = law.acceptance(previous, path[k])
        if accepted < 1:
            residual = law.residual(previous)
            mass = sum(residual, Fraction(0))
            for token, weight in enumerate(residual):
                if weight:
                    emitted[_then(path[:k], token)] = alive * (1 - accepted) * weight / mass
        alive *= accepted
        if not alive:
            return emitted
        previous = path[k]
    for token, p in enumerate(law.p[previous]):
        if p:
            emitted[_then(path[:length], token)] = alive * p
    return emitted


def scheduled_law(law: GridLaw, lengths_fn: LengthsFn, anchors: Sequence[int] = (0,)) -> Mapping[Outcome, Fraction]:
    """Return the joint law of the texts that R requests emit in one round under a scheduler, in exact fractions.

    Args:
        law: the grid law; its `confidence` is what the scheduler sees.
        lengths_fn: the scheduler, at this step. Called once for each distinct survival matrix.
        anchors: the anchor of each request.
    """
    known: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    weights: dict[Outcome, Fraction] = defaultdict(Fraction)
    drafted = list(itertools.product(*(draft_paths(law, anchor) for anchor in anchors)))
    flat = torch.tensor([path for blocks in drafted for path, _ in blocks])
    flat_survivals = law.survival(torch.tensor(anchors).repeat(len(drafted)), flat)
    survivals = rearrange(flat_survivals, "(x r) k -> x r k", r=len(anchors))
    for blocks, survival in zip(drafted, survivals, strict=True):
        paths = [path for path, _ in blocks]
        key = tuple(tuple(row) for row in survival.tolist())
        if key not in known:
            known[key] = lengths_fn(survival).tolist()
        drawn = Fraction(1)
        for _, probability in blocks:
            drawn *= probability
        laws = [
            verified_law(law, anchor, path, length).items()
            for anchor, path, length in zip(anchors, paths, known[key], strict=True)
        ]
        for texts in itertools.product(*laws):
            weight = drawn
            for _, probability in texts:
                weight *= probability
            weights[tuple(text for text, _ in texts)] += weight
    return weights


def compare_scheduled(law: GridLaw, lengths_fn: LengthsFn, anchors: Sequence[int] = (0,)) -> Comparison:
    """Compare the joint law under a scheduler with the product of the target's laws."""
    return compare(scheduled_law(law, lengths_fn, anchors), Fraction(1), law, anchors)


def anticipates(lengths_fn: LengthsFn, survival: Tensor, other: Tensor) -> Tensor | None:
    """Check joint non-anticipation on one pair of survival matrices.

    Whatever stands behind the first draft left out, j > l_r + 1, in all requests at once, is replaced by the values of `other`,
    cut to [0, a_{r, l_r + 1}] and made non-increasing. Lengths must not change: they would depend on tokens whose admission they
    decide.

    Args:
        lengths_fn: the scheduler, at this step.
        survival: a, [R, gamma].
        other: [R, gamma], any values in [0, 1].

    Returns:
        The replaced survivals if the lengths changed, None otherwise.
    """
    lengths = lengths_fn(survival.clone())
    block_size = survival.shape[1]
    position = torch.arange(block_size)
    hidden = position > lengths[:, None]
    first_left_out = survival.gather(1, lengths.clamp(max=block_size - 1).to(torch.int64)[:, None])
    replaced = torch.where(hidden, torch.minimum(other, first_left_out).cummin(dim=1).values, survival)
    return None if torch.equal(lengths_fn(replaced.clone()), lengths) else replaced

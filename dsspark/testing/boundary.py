"""Draws at the edges, which midpoints never hit: u = 0, u = p / q exactly, the largest u, no mass, hardly any mass.

Every case is one request with one draft; all probabilities that matter are exact in float32 (rows of equal logits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import dsspark
from dsspark.randomness import Uniforms
from dsspark.testing.bisection import TOP
from dsspark.types import DraftBlock, Verification

_OUT = -math.inf
_EVEN = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class EdgeCase:
    """One edge: rows of logits, uniforms, and what must come out.

    Attributes:
        name: what the edge is.
        target: logits of the draft's row; the bonus row is `bonus`.
        draft: logits the token was drawn from; None for a deterministic proposal.
        token: the drafted token; None verifies no draft at all.
        accept: u of the acceptance test.
        final: u of the residual or bonus draw.
        emitted: the tokens that must be emitted.
    """

    name: str
    target: tuple[float, ...]
    draft: tuple[float, ...] | None = None
    token: int | None
    accept: float = 0.5
    final: float = 0.5
    bonus: tuple[float, ...] = (_OUT, _OUT, _OUT, 0.0, _OUT)
    emitted: tuple[int, ...]


EDGES = (
    EdgeCase(
        name="u = 0 never accepts a token of p = 0",
        target=(0.0, _OUT, _OUT, _OUT, _OUT),
        draft=_EVEN,
        token=1,
        accept=0.0,
        emitted=(0,),
    ),
    EdgeCase(
        name="u = p / q exactly rejects",
        target=(0.0, 0.0, 0.0, 0.0, _OUT),
        draft=(0.0, 0.0, _OUT, _OUT, _OUT),
        token=0,
        accept=0.5,
        final=0.0,
        emitted=(2,),
    ),
    EdgeCase(
        name="u just below p / q accepts",
        target=(0.0, 0.0, 0.0, 0.0, _OUT),
        draft=(0.0, 0.0, _OUT, _OUT, _OUT),
        token=0,
        accept=0.5 - 2.0**-25,
        emitted=(0, 3),
    ),
    EdgeCase(
        # Thirds: no exponential, so p = q to the last bit whichever body made each of them.
        name="the largest u accepts where p = q",
        target=(0.0, _OUT, 0.0, 0.0, _OUT),
        draft=(0.0, _OUT, 0.0, 0.0, _OUT),
        token=2,
        accept=TOP,
        emitted=(2, 3),
    ),
    EdgeCase(
        name="the largest u accepts where p > q",
        target=(0.0, 0.0, _OUT, _OUT, _OUT),
        draft=(0.0, 0.0, 0.0, 0.0, _OUT),
        token=1,
        accept=TOP,
        emitted=(1, 3),
    ),
    EdgeCase(
        name="u = 0 draws the first token of positive mass from the residual",
        target=(_OUT, _OUT, _OUT, 0.0, 0.0),
        draft=(0.0, 0.0, 0.0, _OUT, _OUT),
        token=1,
        final=0.0,
        emitted=(3,),
    ),
    EdgeCase(
        name="the largest u draws the last token of positive mass from the residual",
        target=(0.0, 0.0, _OUT, _OUT, _OUT),
        draft=(_OUT, _OUT, 0.0, 0.0, 0.0),
        token=3,
        final=TOP,
        emitted=(1,),
    ),
    EdgeCase(
        name="u = 0 draws the first token of positive mass from the bonus row",
        target=_EVEN,
        draft=_EVEN,
        token=0,
        final=0.0,
        bonus=(_OUT, _OUT, 0.0, 0.0, _OUT),
        emitted=(0, 2),
    ),
    EdgeCase(
        name="the largest u draws the last token of positive mass from the bonus row",
        target=_EVEN,
        draft=_EVEN,
        token=4,
        final=TOP,
        bonus=(_OUT, 0.0, 0.0, _OUT, _OUT),
        emitted=(4, 2),
    ),
    EdgeCase(
        name="a residual of 2e-9 is a law like any other",
        target=(0.0, -20.0, -30.0, _OUT, _OUT),
        draft=(0.0, -30.0, -20.0, _OUT, _OUT),
        token=2,
        emitted=(1,),
    ),
    EdgeCase(
        name="a residual that rounding left empty falls back to p",
        target=(0.0, -17.0, _OUT, _OUT, _OUT),
        draft=(0.0, -16.9, _OUT, _OUT, _OUT),
        token=1,
        accept=0.99,
        emitted=(0,),
    ),
    EdgeCase(
        name="a ratio p / q of 1e-9 still rejects and resamples",
        target=(-20.7, 0.0, _OUT, _OUT, _OUT),
        draft=(0.0, _OUT, _OUT, _OUT, _OUT),
        token=0,
        accept=1e-6,
        emitted=(1,),
    ),
    EdgeCase(
        name="a placeholder token -1 is rejected",
        target=(_OUT, _OUT, _OUT, _OUT, 0.0),
        token=-1,
        accept=0.0,
        emitted=(4,),
    ),
    EdgeCase(
        name="a token past the vocabulary is rejected",
        target=(_OUT, 0.0, _OUT, _OUT, _OUT),
        token=7,
        accept=0.0,
        emitted=(1,),
    ),
    EdgeCase(
        name="a deterministic draft of p = 1 is accepted at the largest u",
        target=(_OUT, 0.0, _OUT, _OUT, _OUT),
        token=1,
        accept=TOP,
        emitted=(1, 3),
    ),
    EdgeCase(
        name="no draft at all draws from the anchor's row",
        target=(_OUT, _OUT, 0.0, _OUT, _OUT),
        token=None,
        emitted=(2,),
    ),
)


def edge_failures(
    verify: Callable[..., Verification], *, cell: int = 2, edges: tuple[EdgeCase, ...] = EDGES
) -> list[str]:
    """Return what went wrong at the edges, one line each; empty if nothing did.

    Args:
        verify: called as `dsspark.verify`.
        cell: tokens in a cell of the two-level draw.
        edges: the cases.
    """
    failures = []
    for edge in edges:
        tokens = torch.tensor([[0 if edge.token is None else edge.token]])
        if edge.draft is None:
            block = DraftBlock.point(tokens)
        else:
            block = DraftBlock.from_logits(tokens, torch.tensor([[edge.draft]]))
        anchor = torch.zeros(1, dtype=torch.int64)
        batch = dsspark.pack(anchor, tokens, torch.tensor([0 if edge.token is None else 1]), anchor)
        rows = torch.tensor([edge.target] if edge.token is None else [edge.target, edge.bonus])
        uniforms = Uniforms(
            draft=torch.full((1, 1, 2), 0.5),
            accept=torch.tensor([[edge.accept]]),
            final=torch.full((1, 2), edge.final),
        )
        result = verify(rows, batch, block, uniforms, temperature=1.0, cell=cell)
        emitted = tuple(result.tokens[0, : int(result.num_emitted[0])].tolist())
        if emitted != edge.emitted:
            failures.append(f"{edge.name}: emitted {emitted} instead of {edge.emitted}")
    return failures

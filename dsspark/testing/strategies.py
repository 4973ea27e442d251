"""Hypothesis strategies for what a round is made of: awkward values come often, and everything shrinks to small and plain.

Needs Hypothesis: `pip install 'dsspark[test]'`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

import dsspark
from dsspark._dispatch import Backend
from dsspark.randomness import Uniforms
from dsspark.testing.bisection import TOP
from dsspark.testing.grid import GridLaw, lattice_sizes
from dsspark.types import DraftBlock, PackedBatch

try:
    from hypothesis import assume
    from hypothesis import strategies as st
except ModuleNotFoundError as error:  # pragma: no cover
    raise RuntimeError(
        "dsspark.testing.strategies needs Hypothesis; install it with: pip install 'dsspark[test]'"
    ) from error

_PLAIN = [0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.125, 7.25]
_EXTREME = [80.0, -80.0, 1e4, -1e4, 1e-7, 3e4]
_PALETTES = [(1.0, 0.0), (1.0, 0.5), (1.0, 0.0, 0.5, 0.75, 0.25, 0.9, 0.8, 0.1)]
"""Confidences of one case: from few values, so that survivals tie."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of a request: small ones, and any 64-bit integer."""
    return st.one_of(st.integers(0, 16), st.integers(-(2**63), 2**63 - 1))


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Dtypes of logits: float32, bfloat16, float16."""
    return st.sampled_from(FLOATS)


@st.composite
def grid_rows(draw: st.DrawFn, size: int, denominator: int = 4, full: bool = False) -> tuple[int, ...]:
    """Numerators of a law in `denominator`-ths over `size` tokens; zeros and one-hots included unless `full`."""
    least = 1 if full else 0
    left = denominator - least * size
    row = []
    for _ in range(size - 1):
        row.append(draw(st.integers(0, left)))
        left -= row[-1]
    return tuple(n + least for n in (*row, left))


MOST_POINTS = 1 << 20
"""Cap on every lattice, read at each draw: lowered where a row costs milliseconds (interpreted kernels)."""


@st.composite
def grid_laws(
    draw: st.DrawFn,
    vocab_sizes: Sequence[int] = (2, 3),
    block_sizes: Sequence[int] = (1, 2),
    num_requests: int = 1,
    rounds: int = 1,
    cell: int = 2,
    max_points: int = 1 << 14,
    with_confidence: bool = False,
) -> GridLaw:
    """Laws whose whole lattice has at most `max_points` points: target in quarters, draft in halves or quarters."""
    vocab_size, block_size = draw(st.sampled_from(vocab_sizes)), draw(st.sampled_from(block_sizes))
    after_each = draw(st.booleans())
    num_rows = vocab_size if after_each else 1
    draft_size = draw(st.integers(1, vocab_size))
    denominator = draw(st.sampled_from([2, 4]))
    target = [draw(grid_rows(vocab_size)) for _ in range(num_rows)]
    draft = [draw(grid_rows(draft_size, denominator)) for _ in range(num_rows)]
    confidence = draw(confidences(block_size, vocab_size)) if with_confidence else None
    ids = None
    if draft_size < vocab_size:
        ids = tuple(sorted(draw(st.permutations(range(vocab_size)))[:draft_size]))
    law = GridLaw(
        target=tuple(target) if after_each else tuple(target) * vocab_size,
        draft=tuple(draft) if after_each else tuple(draft) * vocab_size,
        block_size=block_size,
        confidence=confidence,
        draft_to_target=ids,
    )
    sizes = lattice_sizes(law, cell)
    one = math.prod(sizes.draft) ** block_size * sizes.accept**block_size * math.prod(sizes.final)
    assume(one ** (num_requests * rounds) <= min(max_points, MOST_POINTS))
    return law


@st.composite
def confidences(draw: st.DrawFn, block_size: int, vocab_size: int) -> tuple[tuple[float, ...], ...]:
    """c_k given the previous token, [gamma][V]: 0, 1 and ties often."""
    value = st.sampled_from(draw(st.sampled_from(_PALETTES)))
    return tuple(tuple(draw(value) for _ in range(vocab_size)) for _ in range(block_size))


@st.composite
def survivals(
    draw: st.DrawFn,
    num_requests: int | None = None,
    block_size: int | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> Tensor:
    """a, [R, gamma] of one of `dtypes`, never increasing along a row: certain, impossible and tied entries often."""
    r = draw(st.integers(1, 3)) if num_requests is None else num_requests
    k = draw(st.integers(1, 4)) if block_size is None else block_size
    factor = st.sampled_from(draw(st.sampled_from(_PALETTES)))
    rows = [[draw(factor) for _ in range(k)] for _ in range(r)]
    exact = torch.tensor(rows, dtype=torch.float64).view(r, k).cumprod(dim=1)
    return exact.to(draw(st.sampled_from(list(dtypes))))


@st.composite
def cost_tables(draw: st.DrawFn, max_tokens: int) -> dsspark.CostTable:
    """Steps per second for B = 1..max_tokens: flat, smooth, staircase or non-monotone."""
    kind = draw(st.sampled_from(["flat", "any", "staircase", "smooth"]))
    if kind == "flat":
        sps = [1.0] * max_tokens
    elif kind == "any":
        sps = [draw(st.integers(1, 20)) / 20 for _ in range(max_tokens)]
    elif kind == "staircase":
        step, drop = draw(st.integers(1, 4)), draw(st.sampled_from([0.5, 0.8, 0.9]))
        sps = [round(drop ** (b // step), 4) for b in range(max_tokens)]
    else:
        slope = draw(st.sampled_from([0.1, 0.5, 1.0]))
        sps = [round(1 / (1 + slope * b), 4) for b in range(max_tokens)]
    return dsspark.CostTable([1.0, *sps])


@st.composite
def logit_rows(
    draw: st.DrawFn, num_rows: int, vocab_size: int, dtype: torch.dtype | None = None, padded: bool | None = None
) -> Tensor:
    """Rows of logits [N, V]: dyadic laws, ties, one-hots, -inf masks, huge and tiny magnitudes, any dtype, odd strides.

    Every row is a distribution. Padded rows have a stride larger than V with +inf between them.
    """
    dtype = draw(dtypes()) if dtype is None else dtype
    rows = []
    for _ in range(num_rows):
        kind = draw(st.sampled_from(["plain", "extreme", "dyadic", "one-hot", "masked", "tied"]))
        rows.append(_logit_row(draw, kind, vocab_size))
    result = torch.tensor(rows, dtype=torch.float32).view(num_rows, vocab_size).to(dtype)
    if draw(st.booleans()) if padded is None else padded:
        wide = torch.full((num_rows, vocab_size + draw(st.integers(1, 5))), torch.inf, dtype=dtype)
        wide[:, :vocab_size] = result
        return wide[:, :vocab_size]
    return result


def _logit_row(draw: st.DrawFn, kind: str, size: int) -> list[float]:
    if kind == "one-hot":
        hot = draw(st.integers(0, size - 1))
        return [0.0 if v == hot else -math.inf for v in range(size)]
    if kind == "tied":
        return [draw(st.sampled_from(_PLAIN))] * size
    if kind == "dyadic":
        return [draw(st.integers(-8, 0)) * math.log(2) for _ in range(size)]
    values = _PLAIN if kind != "extreme" else _PLAIN + _EXTREME
    row = [draw(st.sampled_from(values)) for _ in range(size)]
    if kind == "masked":
        kept = draw(st.integers(0, size - 1))
        row = [x if v == kept or draw(st.booleans()) else -math.inf for v, x in enumerate(row)]
    return row


@st.composite
def uniforms(draw: st.DrawFn, num_requests: int, block_size: int, edges: bool = True) -> Uniforms:
    """The uniforms of a round: random ones, with `edges` some replaced by 0 or by the largest below 1."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    drawn = Uniforms.draw(num_requests, block_size, generator)
    edge = draw(st.sampled_from(["none", "draft", "accept", "final"])) if edges else "none"
    if edge == "none":
        return drawn
    value = draw(st.sampled_from([0.0, TOP]))
    parts = {name: getattr(drawn, name) for name in ("draft", "accept", "final")}
    parts[edge] = torch.full_like(parts[edge], value)
    return Uniforms(**parts)


@st.composite
def ragged_lengths(draw: st.DrawFn, num_requests: int, block_size: int) -> Tensor:
    """l, [R] int64 in 0..gamma: zeros, whole blocks, anything between."""
    values = [draw(st.integers(0, block_size)) for _ in range(num_requests)]
    return torch.tensor(values, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class RoundCase:
    """The arguments of `dsspark.verify`, and what they were made from."""

    target_logits: Tensor
    batch: PackedBatch
    draft: DraftBlock
    uniforms: Uniforms
    temperature: Tensor
    lengths: Tensor
    cell: int


@st.composite
def drafts(
    draw: st.DrawFn,
    num_requests: int,
    block_size: int,
    vocab_size: int,
    noise: Uniforms | None = None,
    cell: int = 3,
    backends: Sequence[Backend] = ("reference",),
    recomputed: bool = False,
) -> DraftBlock:
    """Drafted blocks: drawn at any temperature on one of `backends`, or a deterministic proposal.

    With `recomputed`, some have a Markov head and did not keep its logits.
    """
    kind = draw(st.sampled_from(["point", "stored", *(["recomputed"] if recomputed else [])]))
    if kind == "point":
        ids = [draw(st.integers(0, vocab_size - 1)) for _ in range(num_requests * block_size)]
        return DraftBlock.point(torch.tensor(ids, dtype=torch.int64).view(num_requests, block_size))
    rows = draw(logit_rows(num_requests * block_size, vocab_size))
    base = rearrange(rows, "(r k) v -> r k v", r=num_requests)
    temperature = draw(st.sampled_from([1.0, 0.0, 0.5, 1.7]))
    noise = draw(uniforms(num_requests, block_size)) if noise is None else noise
    anchors = torch.zeros(num_requests, dtype=torch.int64)
    head = _eighths_head(vocab_size, draw(st.integers(0, 1000))) if kind == "recomputed" else None
    return dsspark.draft_block(
        base,
        anchors,
        head,
        noise,
        temperature=temperature,
        keep_logits=head is None,
        cell=cell,
        backend=draw(st.sampled_from(list(backends))),
    )


def _eighths_head(vocab_size: int, seed: int) -> dsspark.MarkovHead:
    """A head whose weights are eighths: its biases are exact, in whatever order they are summed."""
    generator = torch.Generator().manual_seed(seed)
    head = dsspark.MarkovHead(vocab_size, 2).requires_grad_(False)
    for weight in head.parameters():
        weight.copy_(torch.randint(-8, 9, weight.shape, generator=generator) / 8)
    return head


@st.composite
def verify_rounds(
    draw: st.DrawFn,
    max_requests: int = 4,
    max_block: int = 3,
    max_vocab: int = 7,
    edges: bool = True,
    backends: Sequence[Backend] = ("reference",),
    recomputed: bool = False,
) -> RoundCase:
    """Whole ragged rounds, ready for `dsspark.verify`, drafted as `drafts` does; now and then the vocabulary is the largest."""
    num_requests, block_size = draw(st.integers(1, max_requests)), draw(st.integers(1, max_block))
    vocab_size = draw(st.integers(1, min(max_vocab, 7)) | st.just(max_vocab))
    cell = draw(st.integers(1, 4)) if vocab_size <= 7 else draw(st.sampled_from([1, 5, 8, 12, 64]))
    noise = draw(uniforms(num_requests, block_size, edges))
    draft = draw(drafts(num_requests, block_size, vocab_size, noise, cell, backends, recomputed))
    lengths = draw(ragged_lengths(num_requests, block_size))
    zeros = torch.zeros(num_requests, dtype=torch.int64)
    batch = dsspark.pack(zeros, draft.tokens, lengths, zeros)
    temperatures = [draw(st.sampled_from([1.0, 0.0, 0.5, 1.7])) for _ in range(num_requests)]
    return RoundCase(
        target_logits=draw(logit_rows(len(batch.tokens), vocab_size)),
        batch=batch,
        draft=draft,
        uniforms=noise,
        temperature=torch.tensor(temperatures),
        lengths=lengths,
        cell=cell,
    )

r"""What the samplers share: the law of a row, its statistics a chunk, and the two-level inverse CDF over them.

A row is cut into cells, as in `dsspark.reference.sampling`, and a large cell into chunks, so that a tile of any size has statistics of
its own. One pass over a row leaves of each chunk $c$ its maximum $m_c$ and $s_c = \sum_{i \in c} e^{(x_i - m_c) / T}$, eight bytes; the
row's law is then

$$p_i = e^{(x_i - m) / T} / s, \qquad m = \max_c m_c, \qquad s = \sum_c e^{(m_c - m) / T} s_c.$$

A draw finds the cell by u_0, then, by u_1, the chunk inside the cell and the token inside the chunk: of the row it reads one chunk.
A row that is no distribution shows as a NaN sum: NaN is looked for with comparisons, never left to a maximum, which drops it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark._checks import check_dtype
from dsspark.kernels.elementwise import divide

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that the kernels take; float64, the oracle's dtype, is for the references."""

_LANES_A_PROGRAM = 2048

_LOG2E = tl.constexpr(1.4426950408889634)
_STEEPEST = tl.constexpr(3.0e38)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a row is cut: cells into chunks, and how many chunks make a tile.

    Attributes:
        vocab_size: V.
        cell: tokens in a cell, at most V.
        chunk: tokens in a chunk; the last chunk of a cell may be shorter.
        per_tile: chunks in a tile.
    """

    vocab_size: int
    cell: int
    chunk: int
    per_tile: int

    @classmethod
    def cut(cls, vocab_size: int, cell: int, block_v: int) -> Tiling:
        """Return the tiling whose tiles hold about block_v tokens, a power of two, and never straddle a cell."""
        cell = min(cell, vocab_size)
        chunk = min(cell, block_v)
        return cls(
            vocab_size=vocab_size, cell=cell, chunk=chunk, per_tile=max(1, block_v // triton.next_power_of_2(chunk))
        )

    @property
    def lanes(self) -> int:
        """Lanes a chunk is padded to."""
        return int(triton.next_power_of_2(self.chunk))

    @property
    def chunks_per_cell(self) -> int:
        """Chunks in a cell."""
        return int(triton.cdiv(self.cell, self.chunk))

    @property
    def num_cells(self) -> int:
        """Cells in a row."""
        return int(triton.cdiv(self.vocab_size, self.cell))

    @property
    def num_chunks(self) -> int:
        """Chunks in a row."""
        return self.num_cells * self.chunks_per_cell

    @property
    def num_tiles(self) -> int:
        """Tiles in a row."""
        return int(triton.cdiv(self.num_chunks, self.per_tile))

    @property
    def summary_lanes(self) -> int:
        """Lanes that hold one number a chunk, padded."""
        return int(triton.next_power_of_2(self.num_cells) * triton.next_power_of_2(self.chunks_per_cell))

    def shape(self) -> dict[str, int]:
        """Return the constexprs of a kernel that reads tiles."""
        return {"CELL": self.cell, "CHUNK": self.chunk, "LANES": self.lanes, "PER": self.per_tile}

    def search(self) -> dict[str, int]:
        """Return the constexprs of a kernel that searches the chunks of a row."""
        return {
            "CELL": self.cell,
            "CHUNK": self.chunk,
            "LANES": self.lanes,
            "CELLS": int(triton.next_power_of_2(self.num_cells)),
            "SUBS": int(triton.next_power_of_2(self.chunks_per_cell)),
        }


def rows_a_program(lanes: int) -> int:
    """Return how many rows of `lanes` lanes a program takes: few tokens make many rows, so that no program is tiny."""
    return max(1, min(64, _LANES_A_PROGRAM // lanes))


def check_logits(name: str, logits: Tensor) -> None:
    """Raise `TypeError` unless the kernels take these logits."""
    check_dtype(name, logits, KERNEL_DTYPES)


def check_uniforms(name: str, uniforms: Tensor) -> None:
    """Raise `TypeError` unless these uniforms are float32."""
    check_dtype(name, uniforms, (torch.float32,))


@triton.jit
def temperature_terms(temperature):
    """Return log2(e) / T, whether the row is greedy, and whether T is a temperature at all."""
    usable = (temperature >= 0) & (temperature < float("inf"))
    greedy = temperature == 0
    rate = divide(tl.zeros_like(temperature) + _LOG2E, tl.where(usable & (temperature > 0), temperature, 1.0))
    return tl.minimum(rate, _STEEPEST), greedy, usable  # an infinite rate would make 0 * inf of the maximum


@triton.jit
def weight(x, top, rate):
    """Return exp((x - top) / T): the maximum is subtracted first. The one definition of a weight."""
    return tl.exp2((x - top) * rate)


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 x rounded to nearest even in another dtype, as float32."""
    # The interpreter truncates to bfloat16; what it then stores is already representable.
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(dtype).to(tl.float32)
    return y


@triton.jit
def chunk_tokens(chunk, lane, CELL: tl.constexpr, CHUNK: tl.constexpr):
    """Return the token in a lane of a chunk, and whether the chunk has that lane."""
    PARTS: tl.constexpr = (CELL + CHUNK - 1) // CHUNK
    if PARTS == 1:
        token = chunk * CELL + lane
        inside = lane < CHUNK
    else:
        within = (chunk % PARTS) * CHUNK + lane
        token = (chunk // PARTS) * CELL + within
        inside = (lane < CHUNK) & (within < CELL)
    return token, inside


@triton.jit
def tile_tokens(tile, vocab_size, CELL: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, PER: tl.constexpr):
    """Return the tokens of a tile, [PER * LANES], and which of them there are."""
    offs = tl.arange(0, PER * LANES)
    if CHUNK == LANES and CELL % CHUNK == 0:
        token = tile * (PER * LANES) + offs  # contiguous, and the compiler can see it
        inside = token < vocab_size
    else:
        token, inside = chunk_tokens(tile * PER + offs // LANES, offs % LANES, CELL, CHUNK)
        inside = inside & (token < vocab_size)
    return token, inside


@triton.jit
def chunk_of(token, CELL: tl.constexpr, CHUNK: tl.constexpr):
    """Return the chunk that holds a token."""
    PARTS: tl.constexpr = (CELL + CHUNK - 1) // CHUNK
    return (token // CELL) * PARTS + (token % CELL) // CHUNK


@triton.jit
def chunk_statistics(x, mask, rate, ROWS: tl.constexpr, PER: tl.constexpr, LANES: tl.constexpr):
    """Return the maximum and the weight sum of each chunk of a tile, [ROWS, PER]; the sum is NaN if the chunk has NaN or +inf.

    x is float32 [ROWS, PER * LANES], mask which of it counts, rate [ROWS].
    """
    finite = x < float("inf")  # false for NaN and +inf
    bad = tl.max(tl.reshape(tl.where(mask & (finite == 0), 1, 0), [ROWS, PER, LANES]), axis=2) > 0
    x = tl.reshape(tl.where(mask & finite, x, float("-inf")), [ROWS, PER, LANES])
    top = tl.max(x, axis=2)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(weight(x, base[:, :, None], rate[:, None, None]), axis=2)
    return top, tl.where(bad, float("nan"), total)


@triton.jit
def row_statistics(tops, totals, rate, usable):
    """Return a row's maximum and weight sum from its chunks', [ROWS]; the sum is NaN where the row is no distribution.

    tops and totals are [ROWS, chunks], padded with -inf and 0. Also returns the weight of each chunk.
    """
    top = tl.max(tops, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = weight(tops, base[:, None], rate[:, None]) * totals
    total = tl.sum(mass, axis=1)
    return base, tl.where(usable & (top > float("-inf")), total, float("nan")), mass


@triton.jit
def summary_chunks(CELL: tl.constexpr, CHUNK: tl.constexpr, CELLS: tl.constexpr, SUBS: tl.constexpr, num_chunks):
    """Return the chunk in each lane of a row's summary, [CELLS * SUBS], and which of them there are."""
    PARTS: tl.constexpr = (CELL + CHUNK - 1) // CHUNK
    offs = tl.arange(0, CELLS * SUBS)
    chunk = (offs // SUBS) * PARTS + offs % SUBS
    return chunk, (offs % SUBS < PARTS) & (chunk < num_chunks)


@triton.jit
def first_exceeding(mass, threshold, SIZE: tl.constexpr):
    """Return the first index of positive mass at which the running mass exceeds the threshold, and the mass before it.

    mass is [ROWS, SIZE]. Should rounding leave none that exceeds, the last of positive mass is taken; 0 where there is none. A scan in
    parallel is not monotone to the last bit, hence the condition on the mass itself.
    """
    offs = tl.arange(0, SIZE)[None, :]
    running = tl.cumsum(mass, axis=1)
    positive = mass > 0
    first = tl.min(tl.where(positive & (running > threshold[:, None]), offs, SIZE), axis=1)
    last = tl.max(tl.where(positive, offs, 0), axis=1)
    index = tl.where(first < SIZE, first, last)
    before = tl.sum(tl.where(offs == index[:, None], running - mass, 0.0), axis=1)
    return index, before


@triton.jit
def choose_chunk(
    mass,
    cell_uniform,
    token_uniform,
    ROWS: tl.constexpr,
    CELL: tl.constexpr,
    CHUNK: tl.constexpr,
    CELLS: tl.constexpr,
    SUBS: tl.constexpr,
):
    """Return the chunk of each row that a draw falls into, and what the running mass inside it must exceed.

    mass is [ROWS, CELLS * SUBS]. Where a cell is one chunk the second result is not used: see `choose_lane`.
    """
    PARTS: tl.constexpr = (CELL + CHUNK - 1) // CHUNK
    if SUBS == 1:
        chunk, _ = first_exceeding(mass, cell_uniform * tl.sum(mass, axis=1), CELLS)
        remaining = token_uniform
    else:
        parts = tl.reshape(mass, [ROWS, CELLS, SUBS])
        cells = tl.sum(parts, axis=2)
        cell, _ = first_exceeding(cells, cell_uniform * tl.sum(cells, axis=1), CELLS)
        here = tl.arange(0, CELLS)[None, :, None] == cell[:, None, None]
        inside = tl.sum(tl.where(here, parts, 0.0), axis=1)
        threshold = token_uniform * tl.sum(inside, axis=1)
        part, before = first_exceeding(inside, threshold, SUBS)
        chunk = cell * PARTS + part
        remaining = threshold - before
    return chunk, remaining


@triton.jit
def choose_lane(mass, token_uniform, remaining, LANES: tl.constexpr, SUBS: tl.constexpr):
    """Return the lane of a chunk that a draw falls into; mass is [ROWS, LANES]."""
    if SUBS == 1:
        threshold = token_uniform * tl.sum(mass, axis=1)
    else:
        threshold = remaining
    lane, _ = first_exceeding(mass, threshold, LANES)
    return lane


@triton.jit
def at_lane(values, lane, LANES: tl.constexpr):
    """Return values[row, lane[row]]."""
    return tl.sum(tl.where(tl.arange(0, LANES)[None, :] == lane[:, None], values, 0.0), axis=1)

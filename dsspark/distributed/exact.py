r"""Arithmetic whose result depends neither on the number of ranks nor on the order in which they answer.

Ranks must agree on every choice, and a choice must not change when the vocabulary is cut differently. Maxima and integers have that
property, float sums do not: masses are added in 64-bit fixed point, maxima travel as integers that order as the floats do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsspark.reference.sampling import first_exceeding

MASS_BITS = 42
"""Fractional bits of a row's total. Weights are at most 1, so a vocabulary of 2 ** 20 stays below 2 ** 62, and the error,
2 ** -43 a cell, is far below a float32 rounding of a total that is at least 1."""

_LOW = 0x7FFFFFFF
_WORD = 0xFFFFFFFF


def order_key(values: Tensor) -> Tensor:
    """Return int64 keys that order as the values do: 32 bits of float32, 16 bits of bfloat16 and float16; -0 equals 0.

    A NaN orders above everything or below everything, by its sign; callers mark its row invalid.
    """
    short = values.dtype in (torch.bfloat16, torch.float16)
    bits = (values + 0.0).view(torch.int16 if short else torch.int32).to(torch.int64)
    return torch.where(bits < 0, bits ^ (0x7FFF if short else _LOW), bits)


def pack_maximum(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys whose maximum is the largest value and, among equals, the lowest id.

    Args:
        values: float32, any shape; NaN counts as +inf, which no law has either.
        ids: int64 in 0 .. 2 ** 31 - 1.
    """
    return (order_key(torch.where(values.isnan(), torch.inf, values)) << 32) | (_LOW - ids)


def unpack_maximum(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values float32, ids int64) of `pack_maximum`."""
    order = keys >> 32
    bits = torch.where(order < 0, order ^ _LOW, order).to(torch.int32)
    return bits.view(torch.float32), _LOW - (keys & _LOW)


def pack_choice(ids: Tensor, values: Tensor, owned: Tensor) -> Tensor:
    """Return int64 words whose *sum* over ranks is the owner's word; exactly one rank owns each entry, or none."""
    word = (ids << 32) | (values.contiguous().view(torch.int32).to(torch.int64) & _WORD)
    return torch.where(owned, word, 0)


def unpack_choice(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ids int64, values float32) of `pack_choice`; zeros where nobody owned the entry."""
    bits = words & _WORD
    signed = torch.where(bits > _LOW, bits - (_WORD + 1), bits).to(torch.int32)
    return words >> 32, signed.view(torch.float32)


def to_fixed(weights: Tensor) -> Tensor:
    """Return weights >= 0 in fixed point, int64 with `MASS_BITS` fractional bits."""
    return torch.round(weights.to(torch.float64) * 2.0**MASS_BITS).to(torch.int64)


def from_fixed(mass: Tensor) -> Tensor:
    """Return a fixed-point mass as float32."""
    return (mass.to(torch.float64) * 2.0**-MASS_BITS).to(torch.float32)


def cell_masses(weights: Tensor, cell: int) -> Tensor:
    """Return the mass of each cell, [N, size] -> [N, cells], summed in float32 as on a single rank."""
    padding = -weights.shape[1] % cell
    cells = F.pad(weights, (0, padding)) if padding else weights
    return cells.view(weights.shape[0], cells.shape[1] // cell, cell).sum(dim=-1)


def choose_cell(masses: Tensor, uniform: Tensor) -> Tensor:
    """Return the first cell whose running mass exceeds uniform * total, [N]; the running masses are exact integers.

    Args:
        masses: [N, C] float32 >= 0, any scale; a row without mass gives some cell in range.
        uniform: [N] in [0, 1).

    Numerics: cells are rounded to 2 ** -61 C of the row's largest; none of zero mass is ever chosen. Float running sums may differ
        from one rank to another (a GPU's cumsum is not deterministic); these cannot.
    """
    largest = masses.amax(dim=1, keepdim=True).to(torch.float64)
    scale = 2.0**61 / (masses.shape[1] * torch.where(largest > 0, largest, 1.0))
    running = torch.round(masses.to(torch.float64) * scale).to(torch.int64).cumsum(dim=1)
    total = running[:, -1:]
    threshold = (uniform[:, None].to(torch.float64) * total.to(torch.float64)).floor().to(torch.int64)
    chosen = torch.searchsorted(running, torch.minimum(threshold, total - 1).contiguous(), right=True)
    return chosen[:, 0].clamp(max=masses.shape[1] - 1)


def draw_in_cell(weights: Tensor, local_cell: Tensor, uniform: Tensor, cell: int) -> Tensor:
    """Return the token drawn within a cell of this rank, as a column of `weights`; some column in range for a cell of another rank.

    Args:
        weights: [N, size] float32, this rank's columns.
        local_cell: [N] int64, counted from this rank's first cell.
        uniform: [N] in [0, 1).
        cell: tokens in a cell.
    """
    size = weights.shape[1]
    first = local_cell.clamp(0, (size - 1) // cell)[:, None] * cell
    columns = first + torch.arange(cell, device=weights.device)
    in_cell = torch.where(columns < size, weights.gather(1, columns.clamp(max=size - 1)), 0.0)
    offset = first_exceeding(in_cell.cumsum(dim=1), uniform.to(weights.dtype))
    return (first[:, 0] + offset).clamp(max=size - 1)

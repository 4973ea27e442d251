"""Shared by the kernel tests: uniforms kept away from every breakpoint of a two-level draw, where rounding cannot change the token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = 1e-5
"""Distance from every breakpoint, relative to the mass that a uniform is compared with: some 100 roundings of float32."""


def away_from_breakpoints(weights: Tensor, uniforms: Tensor, cell: int) -> Tensor:
    """Return uniforms of which both are at least `MARGIN` away from every breakpoint of the draw they make.

    Args:
        weights: w, [N, V] float64, need not sum to one. A row that is no distribution keeps its uniforms.
        uniforms: u, [N, 2] float32.
        cell: tokens in a cell.

    Returns:
        [N, 2] float32: u moved within its own interval between breakpoints, or, if that is narrower than two margins, to the middle
        of the nearest one that is not.
    """
    if weights.dtype != torch.float64:
        raise TypeError(f"weights: got {weights.dtype}, expected float64; breakpoints are exact or of no use")
    num_rows, vocab_size = weights.shape
    cells = F.pad(weights, (0, -vocab_size % cell)).view(num_rows, -1, cell)
    first, chosen = _moved(cells.sum(dim=2), uniforms[:, 0])
    second, _ = _moved(cells[torch.arange(num_rows), chosen], uniforms[:, 1])
    return torch.stack((first, second), dim=1)


def distance_to_breakpoints(weights: Tensor, uniforms: Tensor, cell: int) -> Tensor:
    """Return how near the nearer of two uniforms is to a breakpoint of the draw they make, [N] float64; inputs as above."""
    num_rows, vocab_size = weights.shape
    cells = F.pad(weights, (0, -vocab_size % cell)).view(num_rows, -1, cell)
    first, chosen = _distance(cells.sum(dim=2), uniforms[:, 0])
    second, _ = _distance(cells[torch.arange(num_rows), chosen], uniforms[:, 1])
    return torch.minimum(first, second)


def _running(mass: Tensor) -> Tensor:
    """Return the breakpoints of each row, in [0, 1], 0 first."""
    running = F.pad(mass.cumsum(dim=1), (1, 0))
    return running / running[:, -1:]


def _interval(running: Tensor, uniform: Tensor) -> Tensor:
    index = torch.searchsorted(running, uniform.double()[:, None].contiguous(), right=True)[:, 0] - 1
    return index.clamp(0, running.shape[1] - 2)


def _distance(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    running = _running(mass)
    return (running - uniform.double()[:, None]).abs().amin(dim=1), _interval(running, uniform)


def _moved(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the uniforms moved, and the interval each of them is in."""
    running = _running(mass)
    margin = MARGIN + 2.0**-23  # rounding the result to float32 must not eat into it
    usable = ~running.isnan().any(dim=1)
    running = running.nan_to_num(nan=0.0)
    low, high = running[:, :-1], running[:, 1:]
    wide = high - low > 2 * margin
    if not bool((wide.any(dim=1) | ~usable).all()):
        raise ValueError("weights: got a row whose every interval is narrow, expected one to draw from")
    index = _interval(running, uniform)
    far = torch.where(wide, ((low + high) / 2 - uniform.double()[:, None]).abs(), torch.inf)
    rows = torch.arange(len(mass))
    stays = wide[rows, index]
    index = torch.where(stays, index, far.argmin(dim=1))
    low, high = low[rows, index], high[rows, index]
    moved = torch.where(stays, uniform.double().clamp(low + margin, high - margin), (low + high) / 2)
    return torch.where(usable, moved, uniform.double()).to(torch.float32), torch.where(usable, index, 0)

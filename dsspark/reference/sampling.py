r"""Two-level inverse-CDF sampling: two uniforms a row, whatever the vocabulary.

The row is cut into cells. With w the weights of a row, u = (u_0, u_1):

$$c^* = \min\{c : \sum_{c' \le c} W_{c'} > u_0 \sum_{c'} W_{c'}\}, \qquad W_c = \sum_{i \in c} w_i$$

$$i^* = \min\{i \in c^* : \sum_{j \in c^*, j \le i} w_j > u_1 W_{c^*}\}$$
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dsspark._checks import check_cell, check_device, check_shape
from dsspark.numerics import CELL


def first_exceeding(running: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index whose running mass exceeds uniform * total: the inverse CDF, [N].

    Args:
        running: [N, M], non-decreasing running mass along the last dimension; the total is its last entry.
        uniform: [N], in [0, 1).

    Numerics: an entry of zero mass does not raise the running mass, so it is never the first to exceed. Should rounding leave
        none that exceeds, the last entry that raised it is returned.
    Source: design choice of this library.
    """
    total = running[:, -1:]
    exceeds = torch.searchsorted(running, (uniform[:, None] * total).contiguous(), right=True)
    last_positive = torch.searchsorted(running, total.contiguous(), right=False)
    return torch.minimum(exceeds, last_positive)[:, 0]


def sample_two_level(weights: Tensor, uniforms: Tensor, *, cell: int = CELL) -> Tensor:
    """Draw one index from each row of non-negative weights.

    Args:
        weights: w, [N, V] float32 or float64, need not sum to one; at least one positive entry a row.
        uniforms: u, [N, 2] in [0, 1).
        cell: tokens in a cell; the same value gives the same tokens in every implementation.

    Returns:
        [N] int64 in [0, V). A row without a positive weight, or with a NaN, gives some index in range.

    Raises:
        ValueError: for shapes that do not match, an empty vocabulary or a cell below 1.

    Numerics: cell masses and running masses in the dtype of `weights`. Deterministic. u = 0 picks the first token of positive
        weight; no u picks a token of zero weight.
    Cost: reads each row twice; temporaries of V / cell + cell entries a row.
    Source: design choice of this library; any inverse CDF has the law w / sum(w).
    """
    check_cell(cell)
    check_shape("weights", weights, ("N", "V"))
    num_rows, vocab_size = weights.shape
    if vocab_size < 1:
        raise ValueError(f"weights: got shape {list(weights.shape)}, expected at least one token in the vocabulary")
    check_shape("uniforms", uniforms, (num_rows, 2))
    check_device("uniforms", uniforms, "weights", weights)
    padding = -vocab_size % cell
    cells = rearrange(F.pad(weights, (0, padding)) if padding else weights, "n (c w) -> n c w", w=cell)
    uniforms = uniforms.to(weights.dtype)
    chosen_cell = first_exceeding(cells.sum(dim=-1).cumsum(dim=-1), uniforms[:, 0])
    chosen_cell = chosen_cell.clamp(max=cells.shape[1] - 1)
    in_cell = cells[torch.arange(num_rows, device=weights.device), chosen_cell].cumsum(dim=-1)
    offset = first_exceeding(in_cell, uniforms[:, 1])
    return (chosen_cell * cell + offset).clamp(max=vocab_size - 1)

"""The two-level inverse CDF."""

from __future__ import annotations

import pytest
import torch
from helpers import TOP, every, law_counts, midpoints

from dsspark.reference.sampling import sample_two_level


@pytest.mark.parametrize(
    ("numerators", "cell", "n_cells", "n_tokens"),
    [
        ([1, 2, 3, 2], 2, 8, 15),
        ([3, 0, 1, 4], 2, 8, 15),
        ([1, 2, 3, 2, 5], 2, 13, 15),  # a tail cell
        ([0, 0, 1, 0, 0, 2, 1], 3, 4, 6),  # empty ends of cells, an empty first cell
        ([1, 2, 3, 2], 8, 1, 8),  # one cell, larger than the vocabulary
        ([1, 2, 1], 1, 4, 1),  # cells of one token
    ],
)
def test_counts_are_exactly_the_law(numerators, cell, n_cells, n_tokens):
    uniforms = every(midpoints(n_cells), midpoints(n_tokens))
    weights = torch.tensor([numerators], dtype=torch.float32).expand(len(uniforms), -1)
    counts = law_counts(sample_two_level(weights, uniforms, cell=cell), len(numerators))
    total = sum(numerators)
    assert counts == [n * len(uniforms) // total for n in numerators]
    assert all(n * len(uniforms) % total == 0 for n in numerators)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_a_plain_search_over_the_running_mass(dtype, generator):
    weights = torch.rand(200, 37, generator=generator, dtype=dtype) ** 8
    uniforms = torch.rand(200, 2, generator=generator)
    drawn = sample_two_level(weights, uniforms, cell=5)
    for row, (u0, u1), got in zip(weights.tolist(), uniforms.tolist(), drawn.tolist(), strict=True):
        cells = [row[i : i + 5] for i in range(0, len(row), 5)]
        mass, chosen = 0.0, 0
        for chosen, entries in enumerate(cells):
            mass += sum(entries)
            if mass > u0 * sum(row):
                break
        mass, offset = 0.0, 0
        for offset, entry in enumerate(cells[chosen]):
            mass += entry
            if mass > u1 * sum(cells[chosen]):
                break
        assert got == chosen * 5 + offset


def test_boundary_draws_never_pick_a_token_of_zero_weight():
    weights = torch.tensor([[0, 0, 0, 2.0, 0, 1.0, 0, 0, 0]]).expand(4, -1)
    uniforms = torch.tensor([[0, 0], [0, TOP], [TOP, 0], [TOP, TOP]])
    assert sample_two_level(weights, uniforms, cell=3).tolist() == [3, 5, 3, 5]
    # every u at once, on a row whose running mass rounds: 1 + 2**-30 is 1 in float32
    weights = torch.tensor([[1.0, 2.0**-30, 0.0, 2.0**-30, 0.0]]).expand(4, -1)
    for cell in (1, 2, 5):
        drawn = sample_two_level(weights, uniforms, cell=cell)
        assert (weights[torch.arange(4), drawn] > 0).all()


def test_breakpoints_belong_to_the_next_token():
    weights = torch.tensor([[1.0, 1.0, 2.0]]).expand(3, -1)
    uniforms = torch.tensor([[0.0, 0.25], [0.0, 0.5], [0.0, 0.5 - 2.0**-20]])
    assert sample_two_level(weights, uniforms, cell=4).tolist() == [1, 2, 1]


def test_strided_rows_and_zero_rows():
    wide = torch.rand(6, 40)
    uniforms = torch.rand(6, 2)
    assert torch.equal(
        sample_two_level(wide[:, :21], uniforms, cell=4), sample_two_level(wide[:, :21].clone(), uniforms, cell=4)
    )
    assert sample_two_level(torch.rand(0, 5), torch.rand(0, 2)).shape == (0,)


def test_a_row_without_a_law_stays_in_range():
    weights = torch.tensor([[torch.nan] * 5, [0.0] * 5])
    drawn = sample_two_level(weights, torch.full((2, 2), 0.7), cell=2)
    assert ((drawn >= 0) & (drawn < 5)).all()


@pytest.mark.parametrize(
    ("weights", "uniforms", "cell", "names"),
    [
        (torch.rand(2, 3), torch.rand(2, 3), 4, "uniforms"),
        (torch.rand(2, 3), torch.rand(1, 2), 4, "uniforms"),
        (torch.rand(3), torch.rand(3, 2), 4, "weights"),
        (torch.rand(2, 0), torch.rand(2, 2), 4, "weights"),
        (torch.rand(2, 3), torch.rand(2, 2), 0, "cell"),
        (torch.rand(2, 3), torch.rand(2, 2), 2.0, "cell"),
    ],
)
def test_bad_arguments_name_themselves(weights, uniforms, cell, names):
    with pytest.raises(ValueError, match=names):
        sample_two_level(weights, uniforms, cell=cell)

"""The arithmetic that lets ranks agree: order keys, packed words, fixed point, and the choice of a cell by exact integers."""

from __future__ import annotations

import doctest
import importlib
from fractions import Fraction

import pytest
import torch
from helpers import TOP

from dsspark.distributed import exact
from dsspark.distributed.collectives import all_reduce
from dsspark.distributed.partition import VocabularyShard, largest_cell

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_order_as_values_do(dtype, generator):
    values = torch.randn(400, generator=generator).to(dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, -1e-40, 65000.0, -65000.0], dtype=dtype)
    values = torch.cat((values, special))
    keys = exact.order_key(values)
    assert torch.equal(keys[:, None] < keys, values[:, None] < values)
    assert torch.equal(keys[:, None] == keys, values[:, None] == values)


def test_the_packed_maximum_prefers_the_lowest_id(generator):
    values = torch.randn(50, 8, generator=generator).round()
    ids = torch.arange(8).expand(50, 8) * 1000
    value, found = exact.unpack_maximum(exact.pack_maximum(values, ids).amax(dim=1))
    assert torch.equal(value, values.amax(dim=1))
    assert torch.equal(found, values.argmax(dim=1) * 1000)
    value, _ = exact.unpack_maximum(exact.pack_maximum(torch.tensor([1.0, torch.nan, -torch.inf]), torch.arange(3)))
    assert value.tolist() == [1.0, torch.inf, -torch.inf]


def test_words_survive_a_sum_over_ranks(generator):
    ids = torch.randint(0, 2**20, (100,), generator=generator)
    values = torch.randn(100, generator=generator)
    values[:3] = torch.tensor([0.0, torch.inf, -1e-42])
    owner = torch.arange(100) % 4
    total = sum(exact.pack_choice(ids, values, owner == rank) for rank in range(3))
    found_ids, found_values = exact.unpack_choice(total)
    assert torch.equal(found_ids, torch.where(owner < 3, ids, 0))
    assert torch.equal(found_values, torch.where(owner < 3, values, 0.0))


def test_a_total_does_not_depend_on_the_order(generator):
    masses = torch.rand(40, 594, generator=generator)
    mixed = masses[:, torch.randperm(594, generator=generator)]
    assert torch.equal(exact.to_fixed(masses).sum(1), exact.to_fixed(mixed).sum(1))
    torch.testing.assert_close(exact.from_fixed(exact.to_fixed(masses).sum(1)), masses.double().sum(1).float())
    largest = exact.to_fixed(torch.ones(1, 2**20)).sum(1)
    assert exact.from_fixed(largest).tolist() == [2.0**20]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_cell_is_the_first_whose_running_mass_exceeds(scale, generator):
    """Against fractions: integer masses, uniforms on and next to every breakpoint."""
    masses = torch.randint(0, 4, (30, 9), generator=generator).float()
    masses[:, 3] = 1
    for row in masses:
        total = Fraction(int(row.sum()))
        running = [Fraction(int(x)) / total for x in row.cumsum(0)]
        uniforms = [0.0, TOP, *(float(x) for x in torch.rand(5, generator=generator))]
        for x in running[:-1]:
            uniforms += [min(TOP, max(0.0, float(x) + d)) for d in (-1e-6, 1e-6)]
        uniform = torch.tensor(uniforms, dtype=torch.float32)
        chosen = exact.choose_cell((row * scale).expand(len(uniform), 9), uniform)
        expected = [next(c for c, x in enumerate(running) if x > Fraction(u)) for u in uniform.tolist()]
        assert chosen.tolist() == expected


def test_no_cell_without_mass_is_chosen(generator):
    masses = torch.zeros(200, 6)
    masses[:, 2], masses[:, 4] = 1e-38, 3.0
    masses[:100, 4] = 0
    uniform = torch.cat((torch.zeros(50), torch.full((50,), TOP), torch.rand(99, generator=generator), torch.ones(1)))
    chosen = exact.choose_cell(masses, uniform)
    assert bool((chosen[:100] == 2).all())
    assert bool((chosen[100:] == 4).all())
    assert bool((exact.choose_cell(torch.zeros(3, 6), torch.rand(3)) >= 0).all())


def test_a_float_sum_over_ranks_is_refused():
    with pytest.raises(TypeError, match="expected integers"):
        all_reduce(torch.zeros(2), VocabularyShard.single(8), "sum", "masses")


def test_the_largest_cell_that_works():
    assert largest_cell((37984, 75968, 113952), 256) == 32
    assert largest_cell((512, 768), 256) == 256
    assert largest_cell((7, 14), 256) == 7
    assert largest_cell((7, 15), 256) == 1


@pytest.mark.parametrize("module", ["collectives", "partition", "drafting", "scheduling", "verification"])
def test_the_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"dsspark.distributed.{module}"))
    assert result.attempted > 0
    assert result.failed == 0

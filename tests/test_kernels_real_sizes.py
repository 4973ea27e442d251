"""The vocabulary of Qwen3, 151,936: verification and filters against the reference, a few rows in large tiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from test_kernels_filters import find, keeps
from test_kernels_rejection import moved
from verification_rounds import make_round, same

from dsspark import Filters
from dsspark.kernels.filters import Config as FiltersConfig
from dsspark.kernels.packing import unpack
from dsspark.kernels.rejection import Config, verify
from dsspark.numerics import row_weights
from dsspark.reference import rejection as reference
from dsspark.reference import verification as packing
from dsspark.reference.filters import target_weights

V = 151_936
WIDE = Config(block_v=1 << 15, block_w=1 << 13)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


@pytest.mark.parametrize(("source", "cell"), [("stored", 256), ("mapped", 128), ("recomputed", 64), ("point", 300)])
def test_verify(source, cell, generator, device):
    made = make_round(
        source,
        lengths=[2, 0, 1],
        block_size=2,
        vocab=V,
        cell=cell,
        dtype=torch.bfloat16,
        temperature=torch.tensor([1.0, 0.0, 0.7]),
        draft_temperature=torch.tensor([1.0, 0.5, 0.7]),
        generator=generator,
    )
    found = moved(made, device).run(verify, config=WIDE)
    same(found, made.run(reference.verify))
    assert found.valid.all()


def test_a_row_that_is_no_distribution_in_the_last_token(generator, device):
    made = make_round(
        lengths=[1, 1], block_size=1, vocab=V, dtype=torch.bfloat16, temperature=1.0, draft_temperature=1.0,
        generator=generator, settle=False,
    )  # fmt: skip
    rows = made.rows.clone()
    rows[0, V - 1] = math.nan
    assert moved(replace(made, rows=rows), device).run(verify, config=WIDE).valid.tolist() == [False, True]


def test_filters(generator, device):
    logits = (torch.randn(4, V, generator=generator) * 3).to(device, torch.bfloat16)
    filters = Filters(
        top_k=torch.tensor([50, 0, 20_000, 1], device=device), top_p=torch.tensor([0.9, 0.95, 0.99, 1.0], device=device)
    )
    temperature = torch.tensor([1.0, 0.6, 2.0, 1.0], device=device)
    found = find(logits, temperature, filters, config=FiltersConfig(block_r=4, block_v=1 << 15, block_s=4))
    weights, _, _ = row_weights(logits, temperature)
    expected, total = target_weights(logits, temperature, filters)
    # A running mass of tens of thousands of terms is within rounding of top-p's target at most at the crossing token.
    assert ((keeps(logits, weights, found) != (expected > 0)).sum(dim=1) <= 1).all()
    torch.testing.assert_close(found.kept_sum, total, rtol=1e-4, atol=0)


def test_unpack(generator, device):
    batch = packing.pack(*(torch.tensor(x) for x in ([1, 2], [[3], [4]], [1, 0], [0, 0])), capacity=4)
    values = torch.randn(4, V, generator=generator).to(torch.bfloat16)
    found = unpack(moved(batch, device), values.to(device), 1)
    assert torch.equal(found.cpu(), packing.unpack(batch, values, 1))

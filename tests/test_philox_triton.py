"""Our Philox against Triton's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from dsspark.randomness import philox4x32

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
tl = pytest.importorskip("triton.language", reason="Triton exists on Linux only")


@triton.jit
def philox_kernel(out_ptr, seed, c0):
    w0, w1, w2, w3 = tl.philox(seed, c0, 1, 2, 3)
    tl.store(out_ptr + 0, w0.to(tl.int64))
    tl.store(out_ptr + 1, w1.to(tl.int64))
    tl.store(out_ptr + 2, w2.to(tl.int64))
    tl.store(out_ptr + 3, w3.to(tl.int64))


@pytest.mark.parametrize(("seed", "c0"), [(0x1234_5678_9ABC_DEF0, 77), (1, 0), (2**63 - 1, 2**31 - 1)])
def test_philox_equals_triton(seed, c0):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.zeros(4, dtype=torch.int64, device=device)
    philox_kernel[(1,)](out, seed, c0)
    counter = [torch.tensor([word]) for word in (c0, 1, 2, 3)]
    key = [torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])]
    expected = [int(word) for word in philox4x32(counter, key)]
    assert [word & 0xFFFFFFFF for word in out.tolist()] == expected

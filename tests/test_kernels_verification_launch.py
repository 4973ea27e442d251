"""How the verification kernels are launched: specialisations, offsets beyond 31 bits, ahead-of-time compilation."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

import triton.language as tl
from specialise import specialise
from test_verification import GAMMA, inputs
from triton.runtime import interpreter

from dsspark.kernels import packing, verification
from dsspark.kernels.attention import ATTENTION_INTEGERS, attention_kernel
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.kernels.launch import interpreted
from dsspark.kernels.packing import unpack_kernel
from dsspark.kernels.verification import pack, ragged_attention, unpack
from dsspark.reference import verification as reference

needs_interpreter = pytest.mark.skipif(not interpreted(unpack_kernel), reason="counts what the interpreter touches")


def test_every_launch_is_one_of_the_variants(monkeypatch):
    launches = []
    for module in (verification, packing):
        monkeypatch.setattr(
            module, "launch", lambda kernel, _, *given, **named: launches.append(specialise(kernel, *given, **named))
        )
    for integers in (torch.int64, torch.int32):
        pack(*inputs([2, 0, 3], integers))
    batch = reference.pack(*inputs([3] * 64))
    rows = len(batch.tokens)
    for values in (
        torch.zeros(rows, 32_768, dtype=torch.bfloat16),
        torch.zeros(rows, 37),
        torch.zeros(rows, 4, 6)[:, :, ::2],
    ):
        unpack(batch, values, GAMMA)
    for num_requests in (64, 2):
        batch = reference.pack(*inputs([3] * num_requests))
        table, lens = torch.zeros(num_requests, 2048, dtype=torch.int64), torch.full((num_requests,), 9)
        for head_dim in (64, 128, 256):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                cache = torch.zeros(1, 16, 8, head_dim, dtype=dtype)
                query = torch.zeros(len(batch.tokens), 32, head_dim, dtype=dtype)
                ragged_attention(query, cache, cache, batch, table, lens)
    variants = verification.variants()
    for launch in launches:
        assert any(launch.is_described_by(variant) for variant in variants), launch
    assert {launch.kernel for launch in launches} == {variant.kernel for variant in variants}


def addresses_of(kernel, grid, **arguments):
    """Return the addresses a launch touches; where no tensor lies, nothing is read or written."""
    builder = interpreter.interpreter_builder
    load, touched = builder.create_masked_load, set()
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in arguments.values() if isinstance(t, torch.Tensor)]

    def safe_load(pointers, mask, *rest, **options):
        addresses = pointers.data.astype("int64")
        touched.update(addresses[mask.data.astype(bool)].tolist())
        inside = sum((addresses >= start) & (addresses < stop) for start, stop in spans).astype(bool)
        present = interpreter.TensorHandle(mask.data.astype(bool) & inside, mask.dtype)
        return load(pointers, present, *rest, **options)

    def no_store(pointers, value, mask, *rest, **options):
        touched.update(pointers.data.astype("int64")[mask.data.astype(bool)].tolist())

    with (
        mock.patch.object(builder, "create_masked_load", safe_load),
        mock.patch.object(builder, "create_masked_store", no_store),
    ):
        kernel[grid](**arguments)
    return touched


@needs_interpreter
def test_attention_offsets_do_not_overflow():
    far, unit = 2**27, 16  # far * unit entries need more than 31 bits
    small = torch.zeros(4, dtype=torch.float32)
    keys, values, query, out = small.clone(), small.clone(), small.clone(), small.clone()
    strides = {name: 0 for name in ATTENTION_INTEGERS if name.startswith("stride")}
    strides |= {"stride_cu": 1, "stride_id": 1, "stride_pos": 1, "stride_tp": 1}
    strides |= {
        "stride_qn": far,
        "stride_qh": 1,
        "stride_kp": far,
        "stride_vp": far,
        "stride_kh": far,
        "stride_vh": far,
    }
    touched = addresses_of(
        attention_kernel,
        (2, 2, 1),
        query_ptr=query,
        keys_ptr=keys,
        values_ptr=values,
        out_ptr=out,
        stats_ptr=None,
        cu_ptr=torch.tensor([0, 2], dtype=torch.int32),
        ids_ptr=torch.zeros(2, dtype=torch.int32),
        positions_ptr=torch.tensor([0, 1]),
        table_ptr=torch.tensor([0, 3]),
        lens_ptr=torch.tensor([2]),
        scale_high=1.0,
        scale_low=0.0,
        num_requests=1,
        num_rows=2,
        heads=far,
        group=1,
        **{"tiles": 1, "num_pages": 4, "page_size": 1, "max_context": 2, **strides},
        COMPUTE=tl.float32,
        HEAD_DIM=16,
        BLOCK_D=16,
        BLOCK_M=16,
        BLOCK_N=16,
        MULTIPLE=unit,
        CONTIGUOUS=True,
        HALVES=False,
        SHARED=False,
        INTERPRETED=True,
    )
    for cache in (keys, values):
        assert {cache.data_ptr() + 4 * unit * far * n for n in (0, 1, 3, 4)} <= touched
    assert query.data_ptr() + 4 * unit * far in touched
    assert out.data_ptr() + 4 * 16 * far in touched


@needs_interpreter
def test_unpack_offsets_do_not_overflow():
    far = 2**27
    values, out = torch.zeros(4), torch.zeros(4)
    touched = addresses_of(
        unpack_kernel,
        (1, 1),
        values_ptr=values,
        cu_ptr=torch.tensor([0, 2], dtype=torch.int32),
        out_ptr=out,
        num_rows=2,
        num_out_rows=2,
        query_len=2,
        inner_size=1,
        size_1=1,
        size_2=1,
        stride_cu=1,
        stride_vn=far,
        stride_v0=1,
        stride_v1=1,
        stride_v2=1,
        MULTIPLE=16,
        STRIDED=False,
        BLOCK_U=2,
        BLOCK_D=16,
    )
    assert {values.data_ptr(), values.data_ptr() + 4 * 16 * far, out.data_ptr() + 4 * 16} <= touched


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_one_variant_of_each_kernel_compiles_for_a_gpu_that_is_not_here():
    for report in compile_variants(one_per_kernel(verification.variants()), "sm_90"):
        assert report.problems == ()

r"""Ragged packing from lengths that only the device knows, and its inverse (paper 5.3).

Request r owns the rows $c_r, \ldots, c_{r+1} - 1$ with $c_r = \sum_{r' < r} (1 + l_{r'})$.

Each program of `pack` owns a tile of packed rows and sums the lengths again to find whose they are: R integers, from cache, instead
of a second launch or a program that waits for another. Every row, padding included, is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark.contracts import check_pack_arguments, check_unpack_arguments
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.types import PackedBatch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_INNER_DIMS = 3
_MULTIPLE = 16
"""What sizes and strides are multiples of where a row is read in 16-byte loads, whatever the dtype."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size a power of two.

    Attributes:
        block_n: packed rows a program of `pack`.
        block_r: requests whose lengths are summed at once.
        block_u: rows a program of `unpack`.
        block_d: entries of a row at once.
        num_warps: warps a program.
    """

    block_n: int = 64
    block_r: int = 32
    block_u: int = 16
    block_d: int = 256
    num_warps: int = 4


def choose_config() -> Config:
    """Return the configuration for every size: tiles of 2,048 lengths by rows, and of 4,096 entries."""
    return Config()


_PACK_INTEGERS = (
    "num_requests",
    "block_size",
    "capacity",
    *("stride_ar", "stride_dr", "stride_dk", "stride_lr", "stride_sr"),
)
_PACK_POINTERS = (
    *("anchors_ptr", "drafts_ptr", "lengths_ptr", "starts_ptr"),
    *("tokens_ptr", "positions_ptr", "ids_ptr", "cu_ptr", "num_tokens_ptr"),
)


@triton.jit(do_not_specialize=_PACK_INTEGERS, do_not_specialize_on_alignment=_PACK_POINTERS)
def pack_kernel(
    anchors_ptr,  # [R]
    drafts_ptr,  # [R, gamma]
    lengths_ptr,  # [R]
    starts_ptr,  # [R]
    tokens_ptr,  # [capacity] contiguous
    positions_ptr,  # [capacity] contiguous
    ids_ptr,  # [capacity] contiguous
    cu_ptr,  # [R + 1] contiguous
    num_tokens_ptr,  # scalar
    num_requests,
    block_size,
    capacity,
    stride_ar,
    stride_dr,
    stride_dk,
    stride_lr,
    stride_sr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write BLOCK_N packed rows; the first program also writes the prefix sums and their total."""
    pid_n = tl.program_id(0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    request = tl.zeros((BLOCK_N,), tl.int32)
    first_row = tl.zeros((BLOCK_N,), tl.int32)
    total = tl.full((), 0, tl.int32)
    broken = tl.full((), 0, tl.int32)
    for start in range(0, num_requests, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask_r = offs_r < num_requests
        length = tl.load(lengths_ptr + offs_r.to(tl.int64) * stride_lr, mask=mask_r, other=0)
        admitted = tl.minimum(tl.maximum(length, 0), block_size)
        broken += tl.sum((length != admitted).to(tl.int32), axis=0)
        rows = tl.where(mask_r, admitted.to(tl.int32) + 1, 0)
        end = total + tl.cumsum(rows, axis=0)
        passed = mask_r[None, :] & (end[None, :] <= offs_n[:, None])
        request += tl.sum(passed.to(tl.int32), axis=1)
        first_row = tl.maximum(first_row, tl.max(tl.where(passed, end[None, :], 0), axis=1))
        if pid_n == 0:
            tl.store(cu_ptr + 1 + offs_r, end, mask=mask_r)
        total += tl.sum(rows, axis=0)
    if pid_n == 0:
        tl.store(cu_ptr, 0)
        tl.store(num_tokens_ptr, tl.where(broken > 0, tl.maximum(total, capacity + 1), total))

    owned = offs_n < total
    wide_request = tl.where(owned, request, 0).to(tl.int64)
    k = (offs_n - first_row).to(tl.int64)
    anchor = tl.load(anchors_ptr + wide_request * stride_ar, mask=owned & (k == 0), other=0).to(tl.int64)
    draft_ptr = drafts_ptr + wide_request * stride_dr + (k - 1) * stride_dk
    draft = tl.load(draft_ptr, mask=owned & (k > 0), other=0).to(tl.int64)
    position = tl.load(starts_ptr + wide_request * stride_sr, mask=owned, other=0).to(tl.int64)
    mask_n = offs_n < capacity
    tl.store(tokens_ptr + offs_n, tl.where(k == 0, anchor, draft), mask=mask_n)
    tl.store(positions_ptr + offs_n, tl.where(owned, position + k, 0), mask=mask_n)
    tl.store(ids_ptr + offs_n, tl.where(owned, request, -1), mask=mask_n)


_UNPACK_INTEGERS = (
    "num_rows",
    "num_out_rows",
    "query_len",
    "inner_size",
    "size_1",
    "size_2",
    *("stride_cu", "stride_vn", "stride_v0", "stride_v1", "stride_v2"),
)


@triton.jit(do_not_specialize=_UNPACK_INTEGERS, do_not_specialize_on_alignment=("cu_ptr",))
def unpack_kernel(
    values_ptr,  # [N, inner]
    cu_ptr,  # [R + 1]
    out_ptr,  # [R * query_len, inner] contiguous
    num_rows,
    num_out_rows,
    query_len,
    inner_size,  # in units of MULTIPLE, as is stride_vn
    size_1,
    size_2,
    stride_cu,
    stride_vn,
    stride_v0,
    stride_v1,
    stride_v2,
    MULTIPLE: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy a tile of rows to where their request has them, zeros where it has none."""
    offs_u = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    offs_d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_u = offs_u < num_out_rows
    mask_d = offs_d < inner_size * MULTIPLE
    request = offs_u // query_len
    first = tl.load(cu_ptr + request * stride_cu, mask=mask_u, other=0)
    end = tl.load(cu_ptr + (request + 1) * stride_cu, mask=mask_u, other=0)
    row = first + offs_u % query_len
    owned = mask_u & (row < end) & (row < num_rows)
    if STRIDED:
        outer = offs_d // size_2
        offs_v = (outer // size_1) * stride_v0 + (outer % size_1) * stride_v1 + (offs_d % size_2) * stride_v2
    else:
        offs_v = offs_d
    offs_row = row.to(tl.int64) * stride_vn * MULTIPLE
    values = tl.load(values_ptr + offs_row[:, None] + offs_v[None, :], mask=owned[:, None] & mask_d[None, :], other=0)
    offs_out = offs_u[:, None] * (inner_size * MULTIPLE) + offs_d[None, :]
    tl.store(out_ptr + offs_out, values, mask=mask_u[:, None] & mask_d[None, :])


def _merged(values: Tensor) -> tuple[list[int], list[int]]:
    """Return the fewest inner sizes and strides that describe `values` without its rows, padded to three in front."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(values.shape[1:], values.stride()[1:], strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == stride * size:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > _MAX_INNER_DIMS:
        raise ValueError(
            f"values: got shape {list(values.shape)} with strides {list(values.stride())}, expected at most "
            f"{_MAX_INNER_DIMS} inner dimensions that cannot be merged; pass values.contiguous()"
        )
    padding = _MAX_INNER_DIMS - len(sizes)
    return [1] * padding + sizes, [1] * padding + strides


def _launch_pack(
    anchors: Tensor, draft_tokens: Tensor, lengths: Tensor, start_positions: Tensor, capacity: int, config: Config
) -> PackedBatch:
    """Pack without reading a value: an overflow is marked as the reference marks it."""
    num_requests, block_size = draft_tokens.shape

    def empty(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=draft_tokens.device)

    batch = PackedBatch(
        tokens=empty((capacity,), torch.int64),
        positions=empty((capacity,), torch.int64),
        request_ids=empty((capacity,), torch.int32),
        cu_seqlens=empty((num_requests + 1,), torch.int32),
        num_tokens=empty((), torch.int32),
    )
    launch(
        pack_kernel,
        (max(1, triton.cdiv(capacity, config.block_n)),),
        *(anchors, draft_tokens, lengths, start_positions),
        *(batch.tokens, batch.positions, batch.request_ids, batch.cu_seqlens, batch.num_tokens),
        *(num_requests, block_size, capacity),
        *anchors.stride(),
        *draft_tokens.stride(),
        *lengths.stride(),
        *start_positions.stride(),
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        num_warps=config.num_warps,
    )
    return batch


def packing_variants() -> list[Variant]:
    """Return every specialisation that the launchers choose; see `Variant`."""
    integers = (torch.int64, torch.int32)
    found = [_pack_variant(*dtypes) for dtypes in product(integers, repeat=4)]
    for size in _INTEGERS:
        found.append(_unpack_variant(size, _MULTIPLE, strided=False, offset=False))
        found += [
            _unpack_variant(size, 1, strided=strided, offset=offset)
            for strided in (False, True)
            for offset in (False, True)
        ]
    return found


def _pack_variant(anchors: torch.dtype, drafts: torch.dtype, lengths: torch.dtype, starts: torch.dtype) -> Variant:
    names = [TRITON_DTYPES[dtype] for dtype in (anchors, drafts, lengths, starts)]
    config = choose_config()
    pointers = dict(zip(_PACK_POINTERS, (*names, "i64", "i64", "i32", "i32", "i32"), strict=True))
    return Variant(
        name=f"verification/pack/{'-'.join(names)}",
        kernel=pack_kernel,
        signature={name: f"*{dtype}" for name, dtype in pointers.items()} | dict.fromkeys(_PACK_INTEGERS, "i32"),
        constexprs={"BLOCK_N": config.block_n, "BLOCK_R": config.block_r},
        num_warps=config.num_warps,
    )


def _unpack_variant(size: int, multiple: int, *, strided: bool, offset: bool) -> Variant:
    """Describe `unpack_kernel`; with an offset, `values` start where no 16-byte load may."""
    config = choose_config()
    pointer = f"*i{8 * size}"
    kind = "strided" if strided else "aligned" if multiple == _MULTIPLE else "contiguous"
    return Variant(
        name=f"verification/unpack/{size}-byte-{kind}" + ("-offset" if offset else ""),
        kernel=unpack_kernel,
        signature={"values_ptr": pointer, "cu_ptr": "*i32", "out_ptr": pointer}
        | dict.fromkeys(_UNPACK_INTEGERS, "i32"),
        constexprs={"MULTIPLE": multiple, "STRIDED": strided, "BLOCK_U": config.block_u, "BLOCK_D": config.block_d},
        aligned=("out_ptr",) if offset else ("values_ptr", "out_ptr"),
        wide_loads=("values_ptr",) if multiple == _MULTIPLE else (),
        num_warps=config.num_warps,
    )


def pack(
    anchors: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    start_positions: Tensor,
    *,
    capacity: int | None = None,
    config: Config | None = None,
) -> PackedBatch:
    """Fused twin of `dsspark.reference.verification.pack`; same contract, one launch."""
    capacity = check_pack_arguments(anchors, draft_tokens, lengths, start_positions, capacity)
    return _launch_pack(anchors, draft_tokens, lengths, start_positions, capacity, config or choose_config())


def unpack(batch: PackedBatch, values: Tensor, block_size: int, *, config: Config | None = None) -> Tensor:
    """Fused twin of `dsspark.reference.verification.unpack`; same contract, one launch.

    Takes entries of 1, 2, 4 or 8 bytes, and at most three inner dimensions that cannot be merged into one.
    """
    check_unpack_arguments(batch, values, block_size)
    if values.element_size() not in _INTEGERS:
        raise TypeError(f"values: got {values.dtype}, expected entries of 1, 2, 4 or 8 bytes; unpack its parts")
    num_rows, query_len = values.shape[0], block_size + 1
    out = torch.empty((batch.num_requests, query_len, *values.shape[1:]), dtype=values.dtype, device=values.device)
    sizes, strides = _merged(values)
    inner_size = sizes[0] * sizes[1] * sizes[2]
    config = config or choose_config()
    strided = (sizes[0], sizes[1], strides[2]) != (1, 1, 1)
    row_stride = values.stride(0)
    pointers = (values.data_ptr(), out.data_ptr())
    aligned = not strided and not any(number % _MULTIPLE for number in (inner_size, row_stride, *pointers))
    multiple = _MULTIPLE if aligned else 1
    integer = _INTEGERS[values.element_size()]  # a copy of bits, whatever they mean
    num_out_rows = batch.num_requests * query_len
    launch(
        unpack_kernel,
        (triton.cdiv(num_out_rows, config.block_u), triton.cdiv(inner_size, config.block_d)),
        *(values.detach().view(integer), batch.cu_seqlens, out.view(integer)),
        *(num_rows, num_out_rows, query_len, inner_size // multiple, sizes[1], sizes[2]),
        *(batch.cu_seqlens.stride(0), row_stride // multiple, *strides),
        MULTIPLE=multiple,
        STRIDED=strided,
        BLOCK_U=config.block_u,
        BLOCK_D=config.block_d,
        num_warps=config.num_warps,
    )
    return out

r"""Verification plumbing: ragged packing, and attention over the packed batch (paper 5.3).

$$o_i = \sum_{j \le p_i} \mathrm{softmax}_j\big(s\, q_i^\top k_{r(i), j}\big)\, v_{r(i), j}$$

A program owns a request, a key head and a share of the context. Its rows are the request's queries times the query heads of that
key head, so that a page is read once, whatever their number; request_ids and positions say which row sees what. The grid depends on
shapes only, and a share is of the context a request has, not of the one it could have: what it does not have costs nothing.

Bytes moved: keys and values that are seen, once; queries and outputs once; with more than one share also one float32 output each,
which a second launch combines by the usual rule of online softmax.

Departs from the reference: with half-precision caches a weight enters the product with V as the sum of two half-precision numbers,
2 ** -16 relative, so that tensor cores can be used; everything else is float32 (float64 for float64 queries) as there. Where only
the device sees them, a page out of range is read as the nearest page and a context beyond its table ends with the table.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark.contracts import check_attention_arguments
from dsspark.kernels.attention import ATTENTION_INTEGERS, COMBINE_INTEGERS, attention_kernel, combine_kernel
from dsspark.kernels.launch import TRITON_DTYPES, Variant, interpreted, launch
from dsspark.kernels.packing import pack, packing_variants, unpack
from dsspark.numerics import compute_dtype
from dsspark.types import PackedBatch

__all__ = ["Config", "choose_config", "pack", "ragged_attention", "unpack", "variants"]

_MULTIPLE = 16
"""What strides are multiples of where a row of a head is read in 16-byte loads, whatever the dtype."""

_MAX_QUERIES = 33
"""Tokens of a request in one step: gamma is at most 32."""

_MIN_SHARE = 256
"""Positions below which a share of the context is not worth a program."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size but `num_shares` a power of two.

    Attributes:
        block_m: rows (queries times query heads of a key head) a program, at least 16.
        block_n: positions of the context at once, at least 16.
        num_shares: programs along the context.
        block_c: rows a program of the combining launch.
        num_warps: warps a program of the first launch.
        num_stages: software pipelining of the loop over the context.
    """

    block_m: int
    block_n: int
    num_shares: int = 1
    block_c: int = 8
    num_warps: int = 4
    num_stages: int = 2


def choose_config(
    num_rows: int,
    num_requests: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_context: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    aligned: bool = True,
    target_programs: int = 256,
) -> Config:
    """Return the configuration for what the host knows.

    Args:
        num_rows: rows of the batch, N or capacity.
        num_requests: R.
        heads: query heads.
        kv_heads: key heads.
        head_dim: entries of a head.
        max_context: positions that a block table can name.
        query_dtype: of the queries.
        cache_dtype: of keys and values.
        aligned: keys and values are read in 16-byte loads; otherwise each entry costs a register for its address.
        target_programs: how many programs fill the device; about two for each multiprocessor.
    """
    halves = _halves(query_dtype, cache_dtype)
    itemsize = 2 if halves else compute_dtype(torch.empty(0, dtype=query_dtype)).itemsize
    entries = 16_384 // (itemsize * _padded_head(head_dim))
    queries = math.ceil(num_rows / max(num_requests, 1))
    rows = triton.next_power_of_2(max(queries * (heads // kv_heads), 1))
    block_m = max(16, min(rows, entries, 64 if halves and aligned else 32))
    # What a thread holds must fit its registers; float32 products have no tensor core to hold it for them, and operands that are
    # converted before such a product no shared memory.
    converted = not halves and cache_dtype.itemsize == 2
    widest = 16 if not aligned else 64 if halves else 32
    low = not halves and block_m == 16  # fewer warps or stages put 8 or 16 bytes of a thread on the stack
    deep = low or (halves and _padded_head(head_dim) <= 64)  # so do two stages
    heavy = block_m > 32 if halves else low or converted or block_m * _padded_head(head_dim) > 2048
    shares = target_programs // max(num_requests * kv_heads, 1)
    return Config(
        block_m=block_m,
        block_n=max(16, min(entries, widest)),
        num_shares=max(1, min(shares, 64, math.ceil(max_context / _MIN_SHARE))),
        num_warps=8 if heavy else 4,
        num_stages=1 if converted else 3 if deep else 2,
    )


def _padded_head(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _combine_warps(head_dim: int) -> int:
    """Return the warps of the combining launch: a thread has at most 8 entries at once."""
    return 8 if _padded_head(head_dim) > 128 else 4


def _halves(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Return whether products are of half-precision numbers; otherwise they are of float32 (or float64) ones."""
    return query_dtype == cache_dtype and query_dtype.itemsize == 2


def _multiple(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> tuple[int, bool]:
    """Return what all strides are multiples of that must be for 16-byte loads, or 1; and whether the last strides are 1."""
    contiguous, aligned = True, True
    for tensor in (query, key_cache, value_cache):
        contiguous = contiguous and tensor.stride(-1) == 1
        numbers = (*tensor.stride()[:-1], tensor.data_ptr())
        aligned = aligned and not any(number % _MULTIPLE for number in numbers)
    return _MULTIPLE if contiguous and aligned else 1, contiguous


def _tiles(num_rows: int, num_requests: int, group: int, block_m: int) -> int:
    """Return how many programs along its rows the longest request can keep busy; a longer one loops."""
    queries = min(_MAX_QUERIES, max(1, num_rows - num_requests + 1))
    return int(triton.cdiv(queries * group, block_m))


def _constexprs(
    query_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, multiple: int, contiguous: bool, config: Config
) -> dict[str, object]:
    """Return the constexpr arguments of `attention_kernel`, `INTERPRETED` excepted."""
    return {
        "COMPUTE": tl.float64 if query_dtype == torch.float64 else tl.float32,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _padded_head(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "MULTIPLE": multiple,
        "CONTIGUOUS": contiguous,
        "HALVES": _halves(query_dtype, cache_dtype),
        "SHARED": config.num_shares > 1,
    }


def variants() -> list[Variant]:
    """Return the specialisations that the launchers choose for the head sizes of real models; see `Variant`."""
    bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    found = [
        _attention_variant(dtype, dtype, head_dim, shared=shared, queries=queries)
        for dtype in (bf16, fp16, fp32)
        for head_dim in (128, 64, 256)
        for shared in (True, False)
        for queries in (2, 8, 16)
    ]
    for query, cache in (
        (fp32, bf16),
        (fp32, fp16),
        (bf16, fp32),
        (fp16, fp32),
        (bf16, fp16),
        (fp16, bf16),
        (fp64, fp64),
    ):
        found += [_attention_variant(query, cache, 128, shared=shared) for shared in (True, False)]
    for dtype in (bf16, fp16, fp32):
        found += [
            _attention_variant(dtype, dtype, 128, layout=layout, offset=offset)
            for layout in ("contiguous", "strided")
            for offset in (False, True)
        ]
        found.append(_attention_variant(dtype, dtype, 80))
        found.append(_attention_variant(dtype, dtype, 128, integer="i32"))
    found += [_combine_variant(dtype, head_dim) for dtype in (bf16, fp16, fp32, fp64) for head_dim in (128, 64, 256)]
    # Different numbers of queries can lead to the same tile.
    return list({variant.name: variant for variant in found}.values()) + packing_variants()


def _attention_variant(
    query: torch.dtype,
    cache: torch.dtype,
    head_dim: int,
    *,
    shared: bool = True,
    queries: int = 8,
    layout: str = "aligned",
    offset: bool = False,
    integer: str = "i64",
) -> Variant:
    """Describe `attention_kernel` for 4 query heads a key head and `queries` tokens a request.

    With an offset, queries, keys and values start where no 16-byte load may.
    """
    num_requests = 2 if shared else 64
    aligned = layout == "aligned"
    config = choose_config(num_requests * queries, num_requests, 32, 8, head_dim, 32_768, query, cache, aligned=aligned)
    pointers = _attention_pointers(query, cache, integer, shared)
    constexprs = _constexprs(query, cache, head_dim, _MULTIPLE if aligned else 1, layout != "strided", config)
    names = (TRITON_DTYPES[query], TRITON_DTYPES[cache], f"d{head_dim}", f"m{config.block_m}", layout, integer)
    return Variant(
        name=f"verification/attention/{'-'.join(names)}"
        + ("-offset" if offset else "")
        + ("-shared" if shared else ""),
        kernel=attention_kernel,
        signature={name: f"*{dtype}" for name, dtype in pointers.items()}
        | {"scale_high": "fp32", "scale_low": "fp32"}
        | dict.fromkeys(ATTENTION_INTEGERS, "i32"),
        constexprs=constexprs | {"INTERPRETED": False} | ({} if shared else {"stats_ptr": None}),
        aligned=("out_ptr",) if offset else ("query_ptr", "keys_ptr", "values_ptr", "out_ptr"),
        wide_loads=("query_ptr", "keys_ptr", "values_ptr") if aligned else (),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _attention_pointers(query: torch.dtype, cache: torch.dtype, integer: str, shared: bool) -> dict[str, str]:
    """Return the types of what the pointers of `attention_kernel` point to; the last is absent without shares."""
    compute = TRITON_DTYPES[torch.float64 if query == torch.float64 else torch.float32]
    caches = dict.fromkeys(("keys_ptr", "values_ptr"), TRITON_DTYPES[cache])
    integers = {"cu_ptr": "i32", "ids_ptr": "i32", "positions_ptr": "i64", "table_ptr": integer, "lens_ptr": integer}
    outputs = {"out_ptr": compute, "stats_ptr": compute} if shared else {"out_ptr": TRITON_DTYPES[query]}
    return {"query_ptr": TRITON_DTYPES[query], **caches, **integers, **outputs}


def _combine_variant(dtype: torch.dtype, head_dim: int) -> Variant:
    config = choose_config(2, 2, 32, 8, head_dim, 32_768, dtype, dtype)
    compute = compute_dtype(torch.empty(0, dtype=dtype))
    partial = f"*{TRITON_DTYPES[compute]}"
    return Variant(
        name=f"verification/combine/{TRITON_DTYPES[dtype]}-d{head_dim}",
        kernel=combine_kernel,
        signature={
            "partial_ptr": partial,
            "stats_ptr": partial,
            "ids_ptr": "*i32",
            "out_ptr": f"*{TRITON_DTYPES[dtype]}",
        }
        | dict.fromkeys(COMBINE_INTEGERS, "i32"),
        constexprs={
            "COMPUTE": tl.float64 if dtype == torch.float64 else tl.float32,
            "HEAD_DIM": head_dim,
            "BLOCK_D": _padded_head(head_dim),
            "BLOCK_C": config.block_c,
            "INTERPRETED": False,
        },
        aligned=("partial_ptr", "out_ptr"),
        wide_loads=("partial_ptr",),
        num_warps=_combine_warps(head_dim),
    )


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    stats: Tensor | None,
    scale: float,
    config: Config,
) -> None:
    """Write the output, or with statistics the share of each program."""
    num_rows, heads, head_dim = query.shape
    num_pages, page_size, kv_heads, _ = key_cache.shape
    max_context = block_table.shape[1] * page_size if num_pages else 0
    num_requests, group = batch.num_requests, heads // kv_heads
    multiple, contiguous = _multiple(query, key_cache, value_cache)
    exponent = math.log2(math.e) * scale
    scale_high = ctypes.c_float(exponent).value  # no tensor: it would lie on the default device, and be waited for
    tiles = _tiles(num_rows, num_requests, group, config.block_m)
    launch(
        attention_kernel,
        (tiles * (num_requests + 1), kv_heads, config.num_shares),
        *(query, key_cache, value_cache, batch.cu_seqlens, batch.request_ids, batch.positions),
        *(block_table, context_lens, out, stats, scale_high, exponent - scale_high),
        *(num_requests, num_rows, heads, group, tiles, num_pages, page_size, max_context),
        *(number for tensor in (query, key_cache, value_cache) for number in _strides(tensor, multiple)),
        *(batch.cu_seqlens.stride(0), batch.request_ids.stride(0), batch.positions.stride(0)),
        *(*block_table.stride(), context_lens.stride(0)),
        **_constexprs(query.dtype, key_cache.dtype, head_dim, multiple, contiguous, config),
        INTERPRETED=interpreted(attention_kernel),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _strides(tensor: Tensor, multiple: int) -> list[int]:
    """Return the strides as the kernel takes them: all but the last in units of `multiple`."""
    return [*(stride // multiple for stride in tensor.stride()[:-1]), tensor.stride(-1)]


def _combine(partial: Tensor, stats: Tensor, batch: PackedBatch, out: Tensor, config: Config) -> None:
    """Write the output from the shares."""
    num_rows, heads, head_dim = out.shape
    launch(
        combine_kernel,
        (triton.cdiv(num_rows * heads, config.block_c),),
        *(partial, stats, batch.request_ids, out),
        *(num_rows * heads, heads, config.num_shares, batch.request_ids.stride(0)),
        COMPUTE=tl.float64 if out.dtype == torch.float64 else tl.float32,
        HEAD_DIM=head_dim,
        BLOCK_D=_padded_head(head_dim),
        BLOCK_C=config.block_c,
        INTERPRETED=interpreted(combine_kernel),
        num_warps=_combine_warps(head_dim),
    )


def ragged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    config: Config | None = None,
) -> Tensor:
    """Fused twin of `dsspark.reference.verification.ragged_attention`; same contract, one launch or two, no synchronisation."""
    check_attention_arguments(query, key_cache, value_cache, batch, block_table, context_lens)
    num_rows, heads, head_dim = query.shape
    num_pages, page_size, kv_heads, _ = key_cache.shape
    max_context = block_table.shape[1] * page_size if num_pages else 0
    multiple, _ = _multiple(query, key_cache, value_cache)
    config = config or choose_config(
        *(num_rows, batch.num_requests, heads, kv_heads, head_dim, max_context, query.dtype, key_cache.dtype),
        aligned=multiple > 1,
    )
    shares, device = config.num_shares, query.device
    out = torch.empty(query.shape, dtype=query.dtype, device=device)
    if query.numel() == 0:
        return out
    partial, stats = out, None
    if shares > 1:
        partial = torch.empty((shares, *query.shape), dtype=compute_dtype(query), device=device)
        stats = torch.empty((2, shares, num_rows, heads), dtype=compute_dtype(query), device=device)
    scale = head_dim**-0.5 if scale is None else scale
    _attend(query, key_cache, value_cache, batch, block_table, context_lens, partial, stats, scale, config)
    if stats is not None:
        _combine(partial, stats, batch, out, config)
    return out

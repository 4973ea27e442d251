"""The kernels of `ragged_attention`: one share of one request's context, and what combines the shares (paper 5.3)."""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.sampling import rounded


@triton.jit
def _product(a, b, acc, INTERPRETED: tl.constexpr):
    """Return acc + a b; the interpreter would multiply the raw bits of bfloat16."""
    if INTERPRETED:
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def _pages(table_ptr, offs_n, mask_n, num_pages, page_size, stride_tp):
    """Return the page of each position of a request, and the slot in it."""
    page = tl.load(table_ptr + (offs_n // page_size).to(tl.int64) * stride_tp, mask=mask_n, other=0).to(tl.int64)
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
    return page, (offs_n % page_size).to(tl.int64)


@triton.jit
def _store(pointers, x, mask, INTERPRETED: tl.constexpr):
    """Store x rounded to nearest even."""
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        x = rounded(x, pointers.dtype.element_ty, INTERPRETED)
    tl.store(pointers, x, mask=mask)


@triton.jit
def _store_seen(pointers, x, mask, start, stop, BLOCK_M: tl.constexpr, SHARED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store an output unless it is of a share start .. stop that nobody sees."""
    # A branch takes fewer registers than a mask, but of 64 rows Triton 3.6 cannot lower it for sm_100.
    if SHARED and BLOCK_M == 64:
        there = (tl.zeros((BLOCK_M,), tl.int32) + start < stop)[:, None]
        _store(pointers, x, mask & there, INTERPRETED)
    elif not SHARED or start < stop:
        _store(pointers, x, mask, INTERPRETED)


@triton.jit
def _online_softmax(scores, top, total, acc):
    """Return weights, new maximum, and the running sum and output rescaled to it; rows that see nothing stay empty."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - safe_top[:, None])
    rescale = tl.exp2(top - safe_top)
    return weights, new_top, total * rescale + tl.sum(weights, axis=1), acc * rescale[:, None]


@triton.jit
def _share(limit, pid_s, num_shares, BLOCK_N: tl.constexpr, SHARED: tl.constexpr):
    """Return where a program's share of positions 0 .. limit starts and stops."""
    start, stop = tl.full((), 0, tl.int32), limit
    if SHARED:
        share = tl.cdiv(tl.cdiv(limit, BLOCK_N), num_shares) * BLOCK_N
        start = tl.minimum(pid_s * share, limit)
        stop = tl.minimum(start + share, limit)
    return start, stop


@triton.jit
def _attend(
    query,
    keys_ptr,
    values_ptr,
    table_ptr,
    seen,
    start,
    stop,
    scale,
    num_pages,
    page_size,
    offs_kd,
    offs_vd,
    mask_d,
    stride_kp,
    stride_ks,
    stride_vp,
    stride_vs,
    stride_tp,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MULTIPLE: tl.constexpr,
    HALVES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend to positions start .. stop of a request; return the maximum, the sum and the output of each row, not yet normalised."""
    top = tl.full((BLOCK_M,), float("-inf"), COMPUTE)
    total = tl.zeros((BLOCK_M,), COMPUTE)
    acc = tl.zeros((BLOCK_M, BLOCK_D), COMPUTE)
    for offset in range(start, stop, BLOCK_N):
        offs_n = offset + tl.arange(0, BLOCK_N)
        mask_n = offs_n < stop
        mask_nd = mask_n[:, None] & mask_d[None, :]
        page, slot = _pages(table_ptr, offs_n, mask_n, num_pages, page_size, stride_tp)
        cells = (page * stride_kp + slot * stride_ks) * MULTIPLE
        keys = tl.load(keys_ptr + cells[:, None] + offs_kd[None, :], mask=mask_nd, other=0.0)
        if not HALVES:
            keys = keys.to(COMPUTE)
        scores = _product(query, tl.trans(keys), tl.zeros((BLOCK_M, BLOCK_N), COMPUTE), INTERPRETED) * scale
        visible = mask_n[None, :] & (offs_n[None, :] < seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        weights, top, total, acc = _online_softmax(scores, top, total, acc)
        cells = (page * stride_vp + slot * stride_vs) * MULTIPLE
        values = tl.load(values_ptr + cells[:, None] + offs_vd[None, :], mask=mask_nd, other=0.0)
        if HALVES:
            high = rounded(weights, values.dtype, INTERPRETED)
            low = (weights - high).to(values.dtype)
            high = high.to(values.dtype)
            acc = _product(low, values, _product(high, values, acc, INTERPRETED), INTERPRETED)
        else:
            acc = _product(weights, values.to(COMPUTE), acc, INTERPRETED)
    return top, total, acc


ATTENTION_INTEGERS = (
    *("num_requests", "num_rows", "heads", "group", "tiles", "num_pages", "page_size", "max_context"),
    *("stride_qn", "stride_qh", "stride_qd"),
    *("stride_kp", "stride_ks", "stride_kh", "stride_kd"),
    *("stride_vp", "stride_vs", "stride_vh", "stride_vd"),
    *("stride_cu", "stride_id", "stride_pos", "stride_tr", "stride_tp", "stride_len"),
)
_SCALAR_POINTERS = ("cu_ptr", "ids_ptr", "positions_ptr", "table_ptr", "lens_ptr", "stats_ptr")


@triton.jit(do_not_specialize=ATTENTION_INTEGERS, do_not_specialize_on_alignment=_SCALAR_POINTERS)
def attention_kernel(
    query_ptr,  # [N, heads, head_dim]
    keys_ptr,  # [pages, page_size, kv_heads, head_dim]
    values_ptr,  # [pages, page_size, kv_heads, head_dim]
    cu_ptr,  # [R + 1]
    ids_ptr,  # [capacity]
    positions_ptr,  # [capacity]
    table_ptr,  # [R, max_pages]
    lens_ptr,  # [R]
    out_ptr,  # [N, heads, head_dim], or with shares [shares, N, heads, head_dim], contiguous
    stats_ptr,  # [2, shares, N, heads] contiguous: maximum and sum; None without shares
    scale_high,  # the sum of both is scale * log2(e)
    scale_low,
    num_requests,
    num_rows,
    heads,
    group,  # query heads a key head
    tiles,  # programs along the rows of a request
    num_pages,
    page_size,
    max_context,
    stride_qn,  # these, and those of keys and values except along head_dim, in units of MULTIPLE
    stride_qh,
    stride_qd,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_kd,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_vd,
    stride_cu,
    stride_id,
    stride_pos,
    stride_tr,
    stride_tp,
    stride_len,
    COMPUTE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,  # the last stride of queries, keys and values is 1
    HALVES: tl.constexpr,  # queries and caches share a half-precision dtype
    SHARED: tl.constexpr,  # the context is cut into shares
    INTERPRETED: tl.constexpr,
):
    """Attend from the rows of one request and key head to one share of its context."""
    pid_r = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    pid_s = tl.program_id(2)
    num_shares = tl.num_programs(2)
    owned = pid_r < num_requests  # the last programs own the rows that no request does
    begin = tl.minimum(tl.load(cu_ptr + pid_r * stride_cu), num_rows)
    end = tl.minimum(tl.load(cu_ptr + (pid_r + 1) * stride_cu, mask=owned, other=num_rows), num_rows)
    context = tl.load(lens_ptr + pid_r * stride_len, mask=owned, other=0)
    context = tl.minimum(context, max_context).to(tl.int32)
    table_ptr += pid_r * stride_tr
    keys_ptr += kv_head.to(tl.int64) * stride_kh * MULTIPLE
    values_ptr += kv_head.to(tl.int64) * stride_vh * MULTIPLE
    scale = tl.cast(scale_high, COMPUTE) + tl.cast(scale_low, COMPUTE)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    offs_qd, offs_kd, offs_vd = offs_d, offs_d, offs_d
    if not CONTIGUOUS:
        wide_d = offs_d.to(tl.int64)
        offs_qd, offs_kd, offs_vd = wide_d * stride_qd, wide_d * stride_kd, wide_d * stride_vd

    for first in range(tile * BLOCK_M, (end - begin) * group, tiles * BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M)
        mask_m = offs_m < (end - begin) * group
        row = (begin + offs_m // group).to(tl.int64)
        head = kv_head.to(tl.int64) * group + offs_m % group
        owner = tl.load(ids_ptr + row * stride_id, mask=mask_m, other=-1)
        position = tl.load(positions_ptr + row * stride_pos, mask=mask_m, other=-1)
        seen = tl.minimum(tl.where(owner == pid_r, position + 1, 0), context).to(tl.int32)
        start, stop = _share(tl.max(seen, axis=0), pid_s, num_shares, BLOCK_N, SHARED)
        offs_q = ((row * stride_qn + head * stride_qh) * MULTIPLE)[:, None] + offs_qd[None, :]
        query = tl.load(query_ptr + offs_q, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
        if not HALVES:
            query = query.to(COMPUTE)

        top, total, acc = _attend(
            *(query, keys_ptr, values_ptr, table_ptr, seen, start, stop, scale, num_pages, page_size),
            *(offs_kd, offs_vd, mask_d, stride_kp, stride_ks, stride_vp, stride_vs, stride_tp),
            *(COMPUTE, BLOCK_M, BLOCK_N, BLOCK_D, MULTIPLE, HALVES, INTERPRETED),
        )
        offs_cell = row * heads + head
        if SHARED:
            offs_cell += pid_s.to(tl.int64) * num_rows * heads
            tl.store(stats_ptr + offs_cell, top, mask=mask_m)
            tl.store(stats_ptr + num_shares.to(tl.int64) * num_rows * heads + offs_cell, total, mask=mask_m)
        else:
            acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        pointers = out_ptr + offs_cell[:, None] * HEAD_DIM + offs_d[None, :]
        _store_seen(pointers, acc, mask_m[:, None] & mask_d[None, :], start, stop, BLOCK_M, SHARED, INTERPRETED)


COMBINE_INTEGERS = ("num_cells", "heads", "num_shares", "stride_id")


@triton.jit(
    do_not_specialize=COMBINE_INTEGERS,
    do_not_specialize_on_alignment=("stats_ptr", "ids_ptr"),
)
def combine_kernel(
    partial_ptr,  # [shares, N, heads, head_dim] contiguous
    stats_ptr,  # [2, shares, N, heads] contiguous
    ids_ptr,  # [capacity]
    out_ptr,  # [N, heads, head_dim] contiguous
    num_cells,  # N * heads
    heads,
    num_shares,
    stride_id,
    COMPUTE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Combine the shares of BLOCK_C rows; rows that no request owns, or that saw nothing, are 0."""
    offs_c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, BLOCK_D)
    mask_c = offs_c < num_cells
    mask_d = offs_d < HEAD_DIM
    live = mask_c & (tl.load(ids_ptr + (offs_c // heads) * stride_id, mask=mask_c, other=-1) >= 0)
    top = tl.full((BLOCK_C,), float("-inf"), COMPUTE)
    total = tl.zeros((BLOCK_C,), COMPUTE)
    acc = tl.zeros((BLOCK_C, BLOCK_D), COMPUTE)
    for share in range(num_shares):
        offs_s = tl.cast(share, tl.int64) * num_cells + offs_c
        share_top = tl.load(stats_ptr + offs_s, mask=live, other=float("-inf"))
        share_total = tl.load(stats_ptr + num_shares * tl.cast(num_cells, tl.int64) + offs_s, mask=live, other=0.0)
        used = share_total != 0  # a share nobody saw has no output
        offs_p = offs_s[:, None] * HEAD_DIM + offs_d[None, :]
        partial = tl.load(partial_ptr + offs_p, mask=used[:, None] & mask_d[None, :], other=0.0)
        new_top = tl.maximum(top, share_top)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        before, now = tl.exp2(top - safe_top), tl.exp2(share_top - safe_top)
        total = total * before + share_total * now
        acc = acc * before[:, None] + partial * now[:, None]
        top = new_top
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    offs_out = offs_c[:, None] * HEAD_DIM + offs_d[None, :]
    _store(out_ptr + offs_out, acc, mask_c[:, None] & mask_d[None, :], INTERPRETED)

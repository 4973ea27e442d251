r"""Verification plumbing: ragged packing, and attention over the packed batch (paper 5.3).

The verified tokens of all requests travel as one flat batch. Request r owns the rows $c_r, \ldots, c_{r+1} - 1$ with
$c_r = \sum_{r' < r} (1 + l_{r'})$: its anchor, then its $l_r$ drafts. Which request a row belongs to travels in a
marker tensor (`request_ids`); nothing is padded to a fixed query length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from dsspark._checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_block_size,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
)
from dsspark.types import PackedBatch


def pack(
    anchors: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    start_positions: Tensor,
    *,
    capacity: int | None = None,
) -> PackedBatch:
    r"""Flatten each request's anchor and its first l_r drafts into one batch (paper 5.3).

    Args:
        anchors: x_0, [R] int64 or int32.
        draft_tokens: x_1..x_gamma, [R, gamma] int64 or int32; entries past l_r are not read.
        lengths: l, [R] int32 or int64, in 0..gamma.
        start_positions: the anchor's position in its request, [R] int64 or int32.
        capacity: rows of the batch, at least R; None gives exactly N = sum (1 + l_r) rows, which the host must read.

    Returns:
        A `PackedBatch`; padding rows are token 0, position 0, request_id -1.

    Raises:
        ValueError: for shapes or devices that do not belong together, or a capacity below R. Where the host can read
            the lengths (CPU, or capacity=None) also for a length outside 0..gamma and for N above the capacity.
        TypeError: for dtypes that are no integers.

    Numerics: integers, exact. Elsewhere an overflow or a length out of range leaves `num_tokens` above the capacity as
        the mark that makes every request invalid; rows that do not fit are not written.
    Cost: O(R gamma). Synchronises with the device only for capacity=None.
    Source: paper 5.3.

    Example:
        >>> import torch
        >>> drafts, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0])
        >>> batch = pack(torch.tensor([7, 8]), drafts, lengths, torch.tensor([5, 0]))
        >>> batch.tokens.tolist(), batch.request_ids.tolist(), batch.cu_seqlens.tolist()
        ([7, 1, 8], [0, 0, 1], [0, 2, 3])
    """
    check_shape("draft_tokens", draft_tokens, ("R", "gamma"))
    num_requests, block_size = draft_tokens.shape
    check_block_size("draft_tokens: gamma", block_size)
    for name, tensor in (("anchors", anchors), ("lengths", lengths), ("start_positions", start_positions)):
        check_shape(name, tensor, (num_requests,))
        check_dtype(name, tensor, INT_DTYPES)
        check_device(name, tensor, "draft_tokens", draft_tokens)
    check_dtype("draft_tokens", draft_tokens, INT_DTYPES)
    if capacity is not None and capacity < num_requests:
        raise ValueError(
            f"capacity: got {capacity}, expected at least R = {num_requests}; every request has an anchor to verify"
        )
    if capacity is None or lengths.device.type == "cpu":
        num_tokens = _read_num_tokens(lengths, block_size)
        if capacity is not None and num_tokens > capacity:
            raise ValueError(
                f"capacity: got {capacity}, expected at least N = {num_tokens} = sum(1 + lengths); "
                "raise it or admit fewer drafts"
            )
        capacity = num_tokens if capacity is None else capacity
    return _scatter(anchors, draft_tokens, lengths, start_positions, capacity)


def _read_num_tokens(lengths: Tensor, block_size: int) -> int:
    """Return N, read by the host, or raise `ValueError` for a length outside 0..gamma."""
    if lengths.numel() == 0:
        return 0
    low, high = (int(bound) for bound in lengths.aminmax())
    if low < 0 or high > block_size:
        raise ValueError(
            f"lengths: got values in [{low}, {high}], expected 0..gamma = {block_size}; "
            "admit at most the drafts there are"
        )
    return lengths.shape[0] + int(lengths.sum())


def _scatter(
    anchors: Tensor, draft_tokens: Tensor, lengths: Tensor, start_positions: Tensor, capacity: int
) -> PackedBatch:
    """Build the batch without reading a value: rows that do not fit go to a trash row behind the last one."""
    num_requests, block_size = draft_tokens.shape
    device = draft_tokens.device
    admitted = lengths.clamp(0, block_size)
    cu_seqlens = F.pad((1 + admitted).cumsum(dim=0, dtype=torch.int32), (1, 0))
    k = torch.arange(block_size + 1, device=device)
    row = cu_seqlens[:-1, None] + k
    row = torch.where((k <= admitted[:, None]) & (row < capacity), row, capacity)

    def flat(values: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
        rows = torch.full((capacity + 1,), padding, dtype=dtype, device=device)
        return rows.scatter_(0, row.flatten(), values.to(dtype).flatten())[:capacity]

    request = torch.arange(num_requests, device=device)
    broken = (lengths != admitted).any()
    return PackedBatch(
        tokens=flat(torch.cat((anchors[:, None], draft_tokens), dim=1), 0, torch.int64),
        positions=flat(start_positions[:, None] + k, 0, torch.int64),
        request_ids=flat(repeat(request, "r -> r q", q=block_size + 1), -1, torch.int32),
        cu_seqlens=cu_seqlens,
        num_tokens=torch.where(broken, cu_seqlens[-1].clamp(min=capacity + 1), cu_seqlens[-1]),
    )


def unpack(batch: PackedBatch, values: Tensor, block_size: int) -> Tensor:
    """Return the rows of each request, padded to one length: the inverse of `pack`.

    Args:
        batch: the packed batch.
        values: one entry a packed row, [N or capacity, ...], any dtype and strides.
        block_size: gamma; at least every length.

    Returns:
        [R, gamma + 1, ...] in the dtype of `values`: the anchor's row, then the drafts' rows, then zeros.

    Raises:
        ValueError: for more rows than the batch has or another device. On the CPU also for fewer rows than the batch
            holds tokens and for a length above block_size.

    Numerics: a copy. Rows of a marked overflow that were never written are zeros.
    Cost: R (gamma + 1) rows.
    Source: paper 5.3.

    Example:
        >>> import torch
        >>> drafts, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0])
        >>> batch = pack(torch.tensor([7, 8]), drafts, lengths, torch.tensor([5, 0]))
        >>> unpack(batch, batch.tokens, 2).tolist()
        [[7, 1, 0], [8, 0, 0]]
    """
    check_block_size("block_size", block_size)
    _check_rows("values", values, batch)
    if batch.num_requests and batch.cu_seqlens.device.type == "cpu":
        longest = int(batch.cu_seqlens.diff().max()) - 1
        if longest > block_size:
            raise ValueError(
                f"block_size: got {block_size}, expected at least the longest length {longest}; pass gamma"
            )
    return _padded(batch, values, block_size + 1)


def _padded(batch: PackedBatch, values: Tensor, query_len: int) -> Tensor:
    """Return [R, query_len, ...] with zeros where a request has no such row."""
    num_rows = values.shape[0]
    if num_rows == 0:
        return values.new_zeros((batch.num_requests, query_len, *values.shape[1:]))
    row = batch.cu_seqlens[:-1, None] + torch.arange(query_len, device=values.device)
    owned = (row < batch.cu_seqlens[1:, None]) & (row < num_rows)
    owned = owned.view(*owned.shape, *(1,) * (values.dim() - 1))
    return values[row.clamp(max=num_rows - 1)].masked_fill(~owned, 0)


def _check_rows(name: str, values: Tensor, batch: PackedBatch) -> None:
    """Raise `ValueError` unless `values` has one entry for each packed row."""
    check_tensor(name, values)
    check_device(name, values, "the batch", batch.tokens)
    capacity = batch.tokens.shape[0]
    num_rows = values.shape[0] if values.dim() else -1
    fewest = min(capacity, int(batch.num_tokens)) if batch.tokens.device.type == "cpu" else 0
    if not fewest <= num_rows <= capacity:
        raise ValueError(
            f"{name}: got shape {list(values.shape)}, expected N or capacity = {capacity} rows; "
            "pass one row a packed token"
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
) -> Tensor:
    r"""Attend from every packed token to its own request's cache, causally (paper 5.3).

    $$o_i = \sum_{j \le p_i} \mathrm{softmax}_j\big(s\, q_i^\top k_{r(i), j}\big)\, v_{r(i), j}$$

    with r(i) the token's request and p_i its position. Query head h reads key head h // (heads / kv_heads).

    Args:
        query: [N or capacity, heads, head_dim] float.
        key_cache: [pages, page_size, kv_heads, head_dim] float, the keys of this step's tokens already written.
        value_cache: likewise.
        batch: the packed batch.
        block_table: [R, max_pages] int32 or int64: position j of request r lies in page block_table[r, j // page_size].
            Entries past the context may be anything.
        context_lens: [R] int32 or int64: positions present in the cache, this step's included.
        scale: s; head_dim ** -0.5 if None.

    Returns:
        [N or capacity, heads, head_dim] in the dtype of `query`. Padding rows, and tokens that see no position, are 0.

    Raises:
        ValueError: for shapes or devices that do not belong together, heads that are no multiple of kv_heads; on the
            CPU also for a context longer than its block table, or a page out of range.
        TypeError: for dtypes that are not listed.

    Numerics: scores, softmax and sums in float32 (float64 for float64 queries). What the cache holds past a context,
        NaN included, is never used.
    Cost: gathers R * max(context_lens) keys and values once, whatever the number of query heads. Reads the longest
        query and context on the host, so it synchronises on a GPU.
    Source: paper 5.3; the page table follows paged attention (Kwon et al. 2023).

    Example:
        >>> import torch
        >>> batch = pack(torch.tensor([7]), torch.tensor([[1]]), torch.tensor([1]), torch.tensor([0]))
        >>> values = torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
        >>> pages, context_lens = torch.tensor([[0]]), torch.tensor([2])
        >>> out = ragged_attention(torch.zeros(2, 1, 1), values, values, batch, pages, context_lens)
        >>> out.flatten().tolist()
        [2.0, 3.0]
    """
    _check_attention(query, key_cache, value_cache, batch, block_table, context_lens)
    max_context = int(context_lens.max()) if batch.num_requests else 0
    if query.shape[0] == 0 or max_context <= 0:
        return torch.zeros_like(query)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query_len = int(batch.cu_seqlens.diff().max())
    used_pages = -(-max_context // key_cache.shape[1])
    keys, values = _gather_context(key_cache, value_cache, block_table[:, :used_pages], context_lens)

    groups = query.shape[1] // key_cache.shape[2]
    # Query heads that share a key head become rows of one product: keys are never repeated.
    grouped = rearrange(_padded(batch, query, query_len).to(dtype), "r q (h g) d -> r h (g q) d", g=groups)
    seen = torch.minimum(_padded(batch, batch.positions, query_len) + 1, context_lens[:, None])
    visible = torch.arange(keys.shape[2], device=query.device) < seen[:, :, None]
    mask = repeat(visible, "r q j -> r 1 (g q) j", g=groups)
    out = F.scaled_dot_product_attention(grouped, keys.to(dtype), values.to(dtype), attn_mask=mask, scale=scale)

    out = rearrange(out, "r h (g q) d -> r q (h g) d", g=groups)
    request = batch.request_ids[: query.shape[0]].to(torch.int64)
    owner = request.clamp(min=0)
    offset = torch.arange(query.shape[0], device=query.device) - batch.cu_seqlens[owner]
    offset = offset.clamp(0, query_len - 1)
    unanswered = (request < 0) | (seen[owner, offset] <= 0)
    return out[owner, offset].masked_fill(unanswered[:, None, None], 0.0).to(query.dtype)


def _gather_context(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values in the pages of `table`, [R, kv_heads, context, head_dim], zero past each context."""
    num_pages, page_size, kv_heads, _ = key_cache.shape
    first = torch.arange(table.shape[1], device=table.device) * page_size
    used = first < context_lens[:, None]
    if table.device.type == "cpu" and bool((used & ((table < 0) | (table >= num_pages))).any()):
        raise ValueError(
            f"block_table: got a page out of range within a context, expected pages in 0..{num_pages - 1}; "
            "allocate the pages of a context before the step"
        )
    page = rearrange(table.clamp(0, num_pages - 1), "r p -> (r p)")
    position = torch.arange(table.shape[1] * page_size, device=table.device)
    absent = (position >= context_lens[:, None]).flatten().nonzero()[:, 0]

    def gather(cache: Tensor) -> Tensor:
        pages = rearrange(cache, "pages s h d -> pages (s h d)").index_select(0, page)
        rows = rearrange(pages, "rp (s hd) -> (rp s) hd", s=page_size)
        # A weight of zero does not silence a NaN: what lies past a context is erased, not only masked.
        rows.index_fill_(0, absent, 0.0)
        return rearrange(rows, "(r j) (h d) -> r h j d", j=position.shape[0], h=kv_heads)

    return gather(key_cache), gather(value_cache)


def _check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PackedBatch, block_table: Tensor, context_lens: Tensor
) -> None:
    """Raise for shapes, dtypes, devices, and on the CPU contexts, that do not belong together."""
    check_shape("query", query, ("N", "heads", "head_dim"))
    _check_rows("query", query, batch)
    num_requests = batch.num_requests
    check_shape("key_cache", key_cache, ("pages", "page_size", "kv_heads", query.shape[2]))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_shape("block_table", block_table, (num_requests, "max_pages"))
    check_shape("context_lens", context_lens, (num_requests,))
    for name, tensor, allowed in (
        ("query", query, FLOAT_DTYPES),
        ("key_cache", key_cache, FLOAT_DTYPES),
        ("value_cache", value_cache, FLOAT_DTYPES),
        ("block_table", block_table, INT_DTYPES),
        ("context_lens", context_lens, INT_DTYPES),
    ):
        check_dtype(name, tensor, allowed)
        check_device(name, tensor, "the batch", batch.tokens)
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query: got {heads} heads for {kv_heads} key heads, expected a multiple; check kv_heads")
    if context_lens.device.type == "cpu" and num_requests:
        longest, room = int(context_lens.max()), block_table.shape[1] * key_cache.shape[1]
        if longest > room:
            raise ValueError(f"context_lens: got {longest}, expected at most max_pages * page_size = {room}")

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

from dsspark.contracts import check_attention_arguments, check_pack_arguments, check_unpack_arguments
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
    capacity = check_pack_arguments(anchors, draft_tokens, lengths, start_positions, capacity)
    return _scatter(anchors, draft_tokens, lengths, start_positions, capacity)


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
    check_unpack_arguments(batch, values, block_size)
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
        value_cache: likewise, in the dtype of key_cache.
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
    check_attention_arguments(query, key_cache, value_cache, batch, block_table, context_lens)
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

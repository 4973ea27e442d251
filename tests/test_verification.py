"""Ragged packing, its inverse, and attention over a packed batch."""

from __future__ import annotations

import math

import pytest
import torch

from dsspark import pack, ragged_attention
from dsspark.reference.verification import _scatter, unpack

LENGTHS = [[], [0], [3], [2, 0, 3, 1], [0, 0, 0]]
GAMMA = 3


def inputs(lengths, dtype=torch.int64):
    num_requests = len(lengths)
    anchors = torch.arange(100, 100 + num_requests, dtype=dtype)
    drafts = torch.arange(num_requests * GAMMA, dtype=dtype).view(num_requests, GAMMA) + 1
    starts = torch.arange(num_requests, dtype=dtype) * 10 + 4
    return anchors, drafts, torch.tensor(lengths, dtype=dtype), starts


def packed_by_hand(anchors, drafts, lengths, starts):
    """Return (token, position, request) of every row, one request after the other."""
    rows = []
    for request, length in enumerate(lengths.tolist()):
        tokens = [anchors[request].item(), *drafts[request, :length].tolist()]
        rows += [(token, starts[request].item() + k, request) for k, token in enumerate(tokens)]
    return rows


def rows_of(batch):
    return list(zip(batch.tokens.tolist(), batch.positions.tolist(), batch.request_ids.tolist(), strict=True))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("extra", [None, 0, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pack_lays_out_anchor_then_drafts(lengths, extra, dtype):
    arguments = inputs(lengths, dtype)
    expected = packed_by_hand(*arguments)
    batch = pack(*arguments, capacity=None if extra is None else len(expected) + extra)
    assert rows_of(batch) == expected + [(0, 0, -1)] * (extra or 0)
    assert batch.num_tokens.item() == len(expected)
    assert batch.cu_seqlens.tolist() == [sum(1 + length for length in lengths[:r]) for r in range(len(lengths) + 1)]
    assert (batch.tokens.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
    assert {batch.request_ids.dtype, batch.cu_seqlens.dtype, batch.num_tokens.dtype} == {torch.int32}
    assert batch.num_tokens.dim() == 0


def test_pack_takes_strided_inputs_and_leaves_them_alone():
    arguments = inputs([2, 0, 3, 1])
    strided = [torch.stack((value, torch.full_like(value, -9)), dim=-1)[..., 0] for value in arguments]
    strided[1] = strided[1].t().contiguous().t()
    before = [value.clone() for value in strided]
    assert rows_of(pack(*strided)) == rows_of(pack(*arguments))
    assert all(torch.equal(a, b) for a, b in zip(strided, before, strict=True))


def test_pack_ignores_drafts_that_are_not_admitted():
    anchors, drafts, lengths, starts = inputs([1, 0])
    placeholder = torch.where(torch.arange(GAMMA) < lengths[:, None], drafts, -1)
    assert rows_of(pack(anchors, placeholder, lengths, starts)) == rows_of(pack(anchors, drafts, lengths, starts))


@pytest.mark.parametrize(("lengths", "capacity"), [([4, 0], None), ([0, -1], 9), ([4, 0], 9)])
def test_pack_refuses_lengths_out_of_range(lengths, capacity):
    with pytest.raises(ValueError, match=r"lengths: got values in \[-?\d, \d\], expected 0..gamma = 3"):
        pack(*inputs(lengths), capacity=capacity)


def test_pack_refuses_an_overflow_the_host_can_see():
    with pytest.raises(ValueError, match="capacity: got 4, expected at least N = 5"):
        pack(*inputs([2, 1]), capacity=4)
    with pytest.raises(ValueError, match="capacity: got 1, expected at least R = 2"):
        pack(*inputs([0, 0]), capacity=1)
    assert pack(*inputs([2, 1]), capacity=5).num_tokens.item() == 5


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("anchors", torch.zeros(3, dtype=torch.int64), ValueError),
        ("anchors", torch.zeros(2), TypeError),
        ("draft_tokens", torch.zeros(2, dtype=torch.int64), ValueError),
        ("draft_tokens", torch.zeros(2, 33, dtype=torch.int64), ValueError),
        ("draft_tokens", torch.zeros(2, 3), TypeError),
        ("lengths", torch.zeros(2, 1, dtype=torch.int32), ValueError),
        ("lengths", torch.zeros(2), TypeError),
        ("start_positions", [0, 0], TypeError),
        ("start_positions", torch.zeros(2, dtype=torch.int64, device="meta"), ValueError),
    ],
)
def test_pack_names_the_bad_argument(name, value, error):
    arguments = dict(zip(("anchors", "draft_tokens", "lengths", "start_positions"), inputs([1, 0]), strict=True))
    with pytest.raises(error, match=name):
        pack(**{**arguments, name: value})


def test_an_overflow_only_the_device_sees_is_marked_and_stays_in_bounds():
    arguments = inputs([2, 3, 1])
    batch = _scatter(*arguments, capacity=6)
    assert batch.num_tokens.item() == 9
    assert rows_of(batch) == packed_by_hand(*arguments)[:6]
    padded = unpack(batch, batch.tokens, GAMMA)
    assert padded.tolist() == [[100, 1, 2, 0], [101, 4, 5, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("lengths", [[1, -1], [1, 4], [2**20, 0]])
def test_a_length_only_the_device_sees_is_marked(lengths):
    batch = _scatter(*inputs(lengths), capacity=20)
    assert batch.num_tokens.item() > 20
    assert batch.cu_seqlens.diff().max() <= GAMMA + 1
    assert batch.cu_seqlens.diff().min() >= 1
    assert _scatter(*inputs([1, 3]), capacity=20).num_tokens.item() == 6


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("extra", [0, 3])
def test_unpack_inverts_pack(lengths, extra):
    arguments = inputs(lengths)
    num_tokens = len(packed_by_hand(*arguments))
    batch = pack(*arguments, capacity=num_tokens + extra)
    values = torch.randn(num_tokens + extra, 2, 5).transpose(1, 2)
    for rows in {num_tokens, num_tokens + extra}:
        padded = unpack(batch, values[:rows], GAMMA)
        assert padded.shape == (len(lengths), GAMMA + 1, 5, 2)
        for request, length in enumerate(lengths):
            start = batch.cu_seqlens[request]
            assert torch.equal(padded[request, : length + 1], values[start : start + length + 1])
            assert not padded[request, length + 1 :].any()


def test_unpack_keeps_dtypes_and_neighbours_apart():
    batch = pack(*inputs([1, 0, 2]), capacity=8)
    values = torch.full((8,), math.nan)
    values[2] = 7.0
    padded = unpack(batch, values, GAMMA)
    assert padded[1].tolist() == [7.0, 0.0, 0.0, 0.0]
    assert unpack(batch, torch.ones(8, dtype=torch.bool), GAMMA).tolist()[0] == [True, True, False, False]
    assert unpack(batch, batch.request_ids, 32).shape == (3, 33)


def test_unpack_names_the_bad_argument():
    batch = pack(*inputs([1, 3]), capacity=8)
    for values in (torch.zeros(9), torch.zeros(5), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="values: got shape"):
            unpack(batch, values, GAMMA)
    with pytest.raises(ValueError, match="block_size: got 2, expected at least the longest length 3"):
        unpack(batch, torch.zeros(8), 2)
    with pytest.raises(ValueError, match="values: got device meta"):
        unpack(batch, torch.zeros(8, device="meta"), GAMMA)
    with pytest.raises(TypeError, match="values: got list"):
        unpack(batch, [0.0] * 8, GAMMA)
    with pytest.raises(ValueError, match="block_size: got 0"):
        unpack(batch, torch.zeros(8), 0)


# --- attention -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 4, 3


def paged(lengths, contexts, generator, dtype=torch.float64, extra=0):
    """Return a query, caches whose every unused cell is NaN, the batch, a shuffled page table and the context lengths."""
    num_requests, max_pages = len(lengths), 6
    starts = torch.tensor(contexts) - 1 - torch.tensor(lengths)
    batch = pack(*inputs(lengths)[:3], starts, capacity=num_requests + sum(lengths) + extra)
    pages = torch.randperm(num_requests * max_pages + 2, generator=generator)[: num_requests * max_pages]
    table = pages.view(num_requests, max_pages)
    key_cache = torch.full((num_requests * max_pages + 2, PAGE, KV_HEADS, HEAD_DIM), math.nan, dtype=dtype)
    value_cache = key_cache.clone()
    for request, context in enumerate(contexts):
        for j in range(context):
            cell = (table[request, j // PAGE], j % PAGE)
            key_cache[cell] = torch.randn(KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
            value_cache[cell] = torch.randn(KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        table[request, -(-context // PAGE) :] = -(2**31)
    query = torch.randn(len(batch.tokens), HEADS, HEAD_DIM, generator=generator).to(dtype)
    return query, key_cache, value_cache, batch, table, torch.tensor(contexts)


def dense_attention(query, key_cache, value_cache, batch, table, contexts, scale=None):
    """Attend one token and one head at a time, in float64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i, request in enumerate(batch.request_ids.tolist()):
        if request < 0:
            continue
        seen = range(min(batch.positions[i].item() + 1, contexts[request].item()))
        cells = [(table[request, j // PAGE].item(), j % PAGE) for j in seen]
        for head in range(query.shape[1]):
            kv_head = head // (query.shape[1] // key_cache.shape[2])
            weights = torch.tensor(
                [(query[i, head].double() @ key_cache[page, slot, kv_head].double()).item() for page, slot in cells],
                dtype=torch.float64,
            )
            weights = torch.softmax(weights * (HEAD_DIM**-0.5 if scale is None else scale), dim=0)
            for weight, (page, slot) in zip(weights, cells, strict=True):
                out[i, head] += weight * value_cache[page, slot, kv_head].double()
    return out


CASES = [([2, 0, 3], [17, 1, 5]), ([0], [18]), ([3], [4]), ([1, 1], [9, 10])]


@pytest.mark.parametrize(("lengths", "contexts"), CASES)
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("scale", [None, 1.7])
def test_attention_equals_dense_attention_a_request(lengths, contexts, extra, scale, generator):
    arguments = paged(lengths, contexts, generator, extra=extra)
    out = ragged_attention(*arguments, scale=scale)
    expected = dense_attention(*arguments, scale=scale)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    num_tokens = arguments[3].num_tokens
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    without_padding = ragged_attention(arguments[0][:num_tokens], *arguments[1:], scale=scale)
    assert torch.equal(without_padding, out[:num_tokens])


def test_attention_sees_no_further_than_the_context(generator):
    query, keys, values, batch, table, contexts = paged([2, 0, 3], [17, 6, 9], generator)
    for missing in (1, 2, 5):
        arguments = query, keys, values, batch, table, contexts - missing
        torch.testing.assert_close(ragged_attention(*arguments), dense_attention(*arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_accumulates_in_float32(dtype, generator):
    query, keys, values, *rest = paged([2, 0, 3], [17, 1, 5], generator, dtype=dtype)
    values = values + 256  # a sum carried in half precision would lose the differences
    out = ragged_attention(query, keys, values, *rest)
    assert out.dtype == dtype
    expected = dense_attention(query, keys, values, *rest)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 4e-7
    assert ((out.double() - expected).abs() <= expected.abs() * rounding * 1.01).all()


def test_attention_is_causal_and_apart():
    generator = torch.Generator().manual_seed(3)
    query, keys, values, batch, table, contexts = paged([2, 0, 3], [17, 1, 5], generator)
    out = ragged_attention(query, keys, values, batch, table, contexts)
    keys[table[0, 16 // PAGE], 16 % PAGE] += 5.0  # the last draft of request 0
    values[table[2, 0], 0] += 5.0  # the first position of request 2
    changed = (ragged_attention(query, keys, values, batch, table, contexts) != out).flatten(1).any(dim=1)
    assert changed.tolist() == [False, False, True, False, True, True, True, True]


def test_attention_takes_any_strides_and_integer_dtypes(generator):
    query, keys, values, batch, table, contexts = paged([2, 0, 3], [17, 1, 5], generator)
    expected = ragged_attention(query, keys, values, batch, table, contexts)
    both = torch.stack((keys, values), dim=2)  # [pages, page_size, 2, kv_heads, head_dim]
    strided_query = torch.stack((query, query * math.nan), dim=-1)[..., 0]
    strided_table = table.t().contiguous().t()
    out = ragged_attention(strided_query, both[:, :, 0], both[:, :, 1], batch, strided_table.int(), contexts.int())
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    transposed = [cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for cache in (keys, values)]
    torch.testing.assert_close(
        ragged_attention(query, *transposed, batch, table, contexts), expected, rtol=1e-13, atol=1e-13
    )


def test_attention_of_nothing_is_zero(generator):
    query, keys, values, batch, table, contexts = paged([1, 2], [9, 10], generator)
    assert not ragged_attention(query, keys, values, batch, table, torch.zeros_like(contexts)).any()
    out = ragged_attention(query, keys, values, batch, table, torch.tensor([0, 10]))
    assert not out[:2].any()
    assert out[2:].all()
    empty = pack(*inputs([]))
    out = ragged_attention(query[:0], keys, values, empty, table[:0], contexts[:0])
    assert out.shape == (0, HEADS, HEAD_DIM)
    padding = pack(*inputs([]), capacity=2)
    out = ragged_attention(query[:2], keys, values, padding, table[:0], contexts[:0])
    assert torch.equal(out, torch.zeros(2, HEADS, HEAD_DIM, dtype=query.dtype))


def test_attention_of_a_marked_overflow_stays_in_bounds(generator):
    query, keys, values, batch, table, contexts = paged([2, 3], [9, 10], generator)
    anchors, drafts, lengths, _ = inputs([2, 3])
    short = _scatter(anchors, drafts, lengths, torch.tensor([6, 6]), capacity=5)
    out = ragged_attention(query[:5], keys, values, short, table, contexts)
    expected = ragged_attention(query, keys, values, batch, table, contexts)[:5]
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("query", lambda q: q[:, :, 0], ValueError),
        ("query", lambda q: q[:3], ValueError),
        ("query", lambda q: q[:, :5], ValueError),
        ("query", lambda q: q.long(), TypeError),
        ("key_cache", lambda k: k[..., :3], ValueError),
        ("key_cache", lambda k: k.int(), TypeError),
        ("key_cache", lambda k: k[:, :, :0], ValueError),
        ("value_cache", lambda v: v[:-1], ValueError),
        ("value_cache", lambda v: v.to("meta"), ValueError),
        ("block_table", lambda t: t[:1], ValueError),
        ("block_table", lambda t: t.float(), TypeError),
        ("block_table", lambda t: t - 20, ValueError),
        ("block_table", lambda t: t + 20, ValueError),
        ("context_lens", lambda c: c[:1], ValueError),
        ("context_lens", lambda c: c.float(), TypeError),
        ("context_lens", lambda c: c + 20, ValueError),
    ],
)
def test_attention_names_the_bad_argument(name, change, error, generator):
    names = ("query", "key_cache", "value_cache", "batch", "block_table", "context_lens")
    arguments = dict(zip(names, paged([1, 2], [9, 10], generator), strict=True))
    arguments[name] = change(arguments[name])
    if name == "key_cache" and arguments[name].dtype != torch.int32:
        arguments["value_cache"] = change(arguments["value_cache"])
    with pytest.raises(error, match="query: got 6 heads for 0" if arguments["key_cache"].shape[2] == 0 else name):
        ragged_attention(**arguments)


@pytest.mark.gpu
def test_on_a_device_an_overflow_is_marked():
    arguments = [value.cuda() for value in inputs([2, 3, 1])]
    batch = pack(*arguments, capacity=6)
    assert batch.num_tokens.item() == 9
    assert rows_of(batch) == packed_by_hand(*arguments)[:6]

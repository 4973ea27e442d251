"""Laws of packing and of attention over the packed batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import dsspark
from dsspark.reference.verification import unpack
from dsspark.testing import strategies


@st.composite
def packings(draw):
    requests, gamma = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return {
        "anchors": torch.randint(100, (requests,), generator=generator).to(dtype),
        "draft_tokens": torch.randint(100, (requests, gamma), generator=generator).to(dtype),
        "lengths": draw(strategies.ragged_lengths(requests, gamma)),
        "start_positions": torch.randint(50, (requests,), generator=generator),
    }


def pack(parts, backend, **changes):
    return dsspark.pack(*parts.values(), backend=backend, **changes)


@given(parts=packings(), spare=st.integers(0, 6) | st.none())
def test_unpacking_a_packed_batch_gives_back_every_token(backend, parts, spare):
    requests, gamma = parts["draft_tokens"].shape
    total = requests + int(parts["lengths"].sum())
    batch = pack(parts, backend, capacity=None if spare is None else total + spare)
    assert int(batch.num_tokens) == total
    assert len(batch.tokens) == total + (spare or 0)
    whole = torch.cat((parts["anchors"][:, None], parts["draft_tokens"]), dim=1).long()
    sent = torch.arange(gamma + 1) <= parts["lengths"][:, None]
    assert torch.equal(unpack(batch, batch.tokens, gamma), torch.where(sent, whole, 0))
    positions = parts["start_positions"][:, None] + torch.arange(gamma + 1)
    assert torch.equal(unpack(batch, batch.positions, gamma), torch.where(sent, positions, 0))


@given(parts=packings(), spare=st.integers(0, 6))
def test_the_marker_names_the_owner_of_every_row(backend, parts, spare):
    requests = len(parts["anchors"])
    total = requests + int(parts["lengths"].sum())
    batch = pack(parts, backend, capacity=total + spare)
    owners = [r for r, length in enumerate(parts["lengths"].tolist()) for _ in range(1 + length)]
    assert batch.request_ids.tolist() == owners + [-1] * spare
    assert batch.cu_seqlens.diff().tolist() == (1 + parts["lengths"]).tolist()
    assert batch.tokens[total:].tolist() == [0] * spare
    assert batch.positions[total:].tolist() == [0] * spare


@given(parts=packings())
def test_drafts_that_are_not_sent_are_never_read(backend, parts):
    sent = torch.arange(parts["draft_tokens"].shape[1]) < parts["lengths"][:, None]
    garbage = torch.where(sent, parts["draft_tokens"], -1)
    assert torch.equal(pack({**parts, "draft_tokens": garbage}, backend).tokens, pack(parts, backend).tokens)


@st.composite
def attentions(draw):
    """A packed batch with a paged cache: pages scattered, unused ones poisoned, page sizes and groups of heads."""
    parts = draw(packings().filter(lambda p: len(p["anchors"]) > 0))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    parts["start_positions"] = parts["start_positions"] % 9
    batch = dsspark.pack(*parts.values())
    page_size, kv_heads, groups = (draw(st.integers(1, n)) for n in (4, 2, 3))
    requests, head_dim = len(parts["anchors"]), 4
    context = parts["start_positions"] + parts["lengths"] + 1
    max_pages = -(-int(context.max()) // page_size) + 1
    num_pages = requests * max_pages + 2
    table = torch.randperm(num_pages, generator=generator)[: requests * max_pages].view(requests, max_pages)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    cache = torch.full((2, num_pages, page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    for r in range(requests):
        for j in range(int(context[r])):
            row = torch.randn(2, kv_heads, head_dim, generator=generator)
            cache[:, table[r, j // page_size], j % page_size] = row
    query = torch.randn(len(batch.tokens), kv_heads * groups, head_dim, generator=generator).to(dtype)
    return query, cache, batch, table, context


@given(case=attentions())
def test_attention_over_pages_is_attention_over_each_requests_own_past(backend, case):
    query, cache, batch, table, context = case
    out = dsspark.ragged_attention(query, *cache, batch, table, context, backend=backend)
    page_size, groups = cache.shape[2], query.shape[1] // cache.shape[3]
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5}.get(query.dtype, torch.finfo(query.dtype).eps)
    for i, (request, position) in enumerate(zip(batch.request_ids.tolist(), batch.positions.tolist(), strict=True)):
        past = range(position + 1)
        keys, values = (
            torch.stack([part[table[request, j // page_size], j % page_size] for j in past]).double() for part in cache
        )
        for head in range(query.shape[1]):
            scores = keys[:, head // groups] @ query[i, head].double() / query.shape[2] ** 0.5
            expected = torch.softmax(scores, dim=0) @ values[:, head // groups]
            torch.testing.assert_close(out[i, head].double(), expected, atol=rounding, rtol=rounding)

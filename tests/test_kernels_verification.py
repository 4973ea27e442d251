"""The kernels of ragged packing and attention against their references, in the interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from test_verification import CASES, GAMMA, HEAD_DIM, LENGTHS, dense_attention, inputs, paged

from benchmarks.traffic import OTHER, count_traffic
from dsspark.kernels import packing, verification
from dsspark.kernels.launch import interpreted
from dsspark.kernels.verification import Config, choose_config, pack, ragged_attention, unpack
from dsspark.reference import verification as reference
from dsspark.types import PackedBatch

FIELDS = ("tokens", "positions", "request_ids", "cu_seqlens", "num_tokens")
SMALL_PACK = packing.Config(block_n=4, block_r=2, block_u=4, block_d=4)
TILED = Config(block_m=16, block_n=16)
SHARED = Config(block_m=16, block_n=16, num_shares=3, block_c=8)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def on(device, values):
    """Return the arguments on a device, a batch included."""
    moved = []
    for value in values:
        if isinstance(value, PackedBatch):
            value = PackedBatch(**{name: getattr(value, name).to(device) for name in FIELDS})
        moved.append(value.to(device) if isinstance(value, torch.Tensor) else value)
    return moved


def assert_same_batch(got, expected):
    for name in FIELDS:
        ours, theirs = getattr(got, name).cpu(), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("lengths", [*LENGTHS, [3, 1] * 5, [0] * 9 + [3]])
@pytest.mark.parametrize("extra", [None, 0, 11])
@pytest.mark.parametrize("config", [SMALL_PACK, None])
def test_pack_equals_the_reference(lengths, extra, config, device):
    arguments = inputs(lengths)
    capacity = None if extra is None else len(lengths) + sum(lengths) + extra
    expected = reference.pack(*arguments, capacity=capacity)
    assert_same_batch(pack(*on(device, arguments), capacity=capacity, config=config), expected)


def test_pack_takes_any_integers_and_strides(device):
    arguments = inputs([2, 0, 3, 1])
    expected = reference.pack(*arguments)
    for position in range(4):
        mixed = [value.int() if position == i else value for i, value in enumerate(arguments)]
        strided = [torch.stack((value, torch.full_like(value, -9)), dim=-1)[..., 0] for value in mixed]
        strided[1] = strided[1].t().contiguous().t()
        assert_same_batch(pack(*on(device, strided), config=SMALL_PACK), expected)


@pytest.mark.parametrize("lengths", [[2, 3, 1], [1, -1], [1, 4], [2**20, 0], [-(2**31), 3], [0, 0, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize("capacity", [6, 8, 20])
def test_an_overflow_only_the_device_sees_is_marked_as_in_the_reference(lengths, capacity, device):
    arguments = inputs(lengths)
    expected = reference._scatter(*arguments, capacity=capacity)
    assert_same_batch(packing._launch_pack(*on(device, arguments), capacity, SMALL_PACK), expected)


VALUES = {
    "contiguous": lambda rows: torch.randn(rows, 2, 5),
    "aligned": lambda rows: torch.randn(rows, 32).to(torch.bfloat16),
    "padded rows": lambda rows: torch.full((rows, 48), math.inf, dtype=torch.float16)[:, :32].fill_(1.5),
    "swapped": lambda rows: torch.randn(rows, 5, 2).transpose(1, 2),
    "no inner": lambda rows: torch.arange(rows),
    "sliced": lambda rows: torch.randn(rows, 3, 4, 6)[:, :2, 1:3, ::2],
    "expanded": lambda rows: torch.randn(rows, 1, 1).expand(rows, 3, 4),
    "bool": lambda rows: torch.randn(rows, 7) > 0,
    "bytes": lambda rows: torch.randint(-128, 127, (rows, 16), dtype=torch.int8),
    "doubles": lambda rows: torch.randn(rows, 16, dtype=torch.float64),
    "empty inner": lambda rows: torch.randn(rows, 0),
}


@pytest.mark.parametrize("kind", list(VALUES))
@pytest.mark.parametrize("config", [SMALL_PACK, None])
def test_unpack_equals_the_reference(kind, config, device):
    for lengths, extra in (([2, 0, 3, 1], 3), ([0], 0), ([], 2)):
        batch = reference.pack(*inputs(lengths), capacity=len(lengths) + sum(lengths) + extra)
        values = VALUES[kind](len(batch.tokens))
        expected = reference.unpack(batch, values, GAMMA)
        got = unpack(*on(device, (batch, values)), GAMMA, config=config)
        assert got.dtype == expected.dtype
        assert torch.equal(got.cpu(), expected)


def test_unpack_of_fewer_rows_and_of_an_overflow(device):
    batch = reference.pack(*inputs([1, 3]), capacity=8)
    values = torch.randn(6, 3)
    expected = reference.unpack(batch, values, GAMMA)
    assert torch.equal(unpack(*on(device, (batch, values)), GAMMA, config=SMALL_PACK).cpu(), expected)
    short = reference._scatter(*inputs([2, 3, 1]), capacity=6)
    expected = reference.unpack(short, short.tokens, GAMMA)
    assert torch.equal(unpack(*on(device, (short, short.tokens)), GAMMA, config=SMALL_PACK).cpu(), expected)


def test_unpack_says_what_it_cannot_take():
    batch = reference.pack(*inputs([1, 3]), capacity=8)
    with pytest.raises(ValueError, match="at most 3 inner dimensions"):
        unpack(batch, torch.zeros(8, 4, 4, 4, 4)[:, ::2, ::2, ::2, ::2], GAMMA)
    with pytest.raises(TypeError, match=r"values: got torch\.complex128"):
        unpack(batch, torch.zeros(8, dtype=torch.complex128), GAMMA)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("pack", lambda: (*inputs([1, 0])[:2], torch.tensor([1, 9]), torch.zeros(2, dtype=torch.int64)), ValueError),
        ("pack", lambda: (*inputs([1, 0])[:3], torch.zeros(2)), TypeError),
        ("unpack", lambda: (reference.pack(*inputs([1, 3])), torch.zeros(9), GAMMA), ValueError),
        ("unpack", lambda: (reference.pack(*inputs([1, 3])), torch.zeros(6), 2), ValueError),
        ("ragged_attention", lambda: (*paged([1], [2], torch.Generator())[:5], torch.tensor([99])), ValueError),
        ("ragged_attention", lambda: (torch.zeros(2, 6, 4).int(), *paged([1], [2], torch.Generator())[1:]), TypeError),
    ],
)
def test_both_bodies_refuse_with_the_same_words(name, arguments, error):
    with pytest.raises(error) as theirs:
        getattr(reference, name)(*arguments())
    with pytest.raises(error) as ours:
        getattr(verification, name)(*arguments())
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(("lengths", "contexts"), CASES)
@pytest.mark.parametrize("config", [TILED, SHARED, None], ids=["tiled", "shared", "chosen"])
def test_attention_equals_dense_attention_a_request(lengths, contexts, config, device, generator):
    arguments = paged(lengths, contexts, generator, extra=2)
    out = ragged_attention(*on(device, arguments), scale=1.7, config=config).cpu()
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, dense_attention(*arguments, scale=1.7), rtol=1e-12, atol=1e-12)
    num_tokens = arguments[3].num_tokens
    assert not out[num_tokens:].any()
    alone = ragged_attention(*on(device, (arguments[0][:num_tokens], *arguments[1:])), scale=1.7, config=config)
    assert torch.equal(alone.cpu(), out[:num_tokens])


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("query_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("config", [TILED, SHARED], ids=["tiled", "shared"])
def test_attention_rounds_only_its_output(query_dtype, cache_dtype, config, device, generator):
    query, keys, values, *rest = paged([2, 0, 3], [17, 1, 5], generator)
    query, keys, values = query.to(query_dtype), keys.to(cache_dtype), (values + 256).to(cache_dtype)
    # Weights in half precision, or a sum carried in it, would be far off against values of 256.
    out = ragged_attention(*on(device, (query, keys, values, *rest)), config=config).cpu()
    assert out.dtype == query_dtype
    expected = dense_attention(query, keys, values, *rest)
    rounding = 1e-6 if query_dtype == torch.float32 else torch.finfo(query_dtype).eps / 2
    if query_dtype == cache_dtype == torch.bfloat16:
        rounding += 2.0**-16
    assert ((out.double() - expected).abs() <= expected.abs() * rounding * 1.01).all()


@pytest.mark.parametrize("head_dim", [16, 24, 64])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("config", [TILED, SHARED], ids=["tiled", "shared"])
def test_attention_takes_any_head_size_and_group(head_dim, group, config, device, generator):
    *_, batch, _, _ = paged([2, 0], [9, 8], generator)
    query = torch.randn(4, 2 * group, head_dim, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 6, 5, 2, head_dim, generator=generator, dtype=torch.float64)
    arguments = (query, keys, values, batch, torch.tensor([[3, 0], [5, 1]]), torch.tensor([9, 8]))
    expected = reference.ragged_attention(*arguments)
    out = ragged_attention(*on(device, arguments), config=config).cpu()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_attention_takes_any_strides_and_integers(device, generator):
    query, keys, values, batch, table, contexts = paged([2, 0, 3], [17, 1, 5], generator)
    expected = ragged_attention(*on(device, (query, keys, values, batch, table, contexts)), config=TILED).cpu()
    both = torch.stack((keys, values), dim=2)
    strided_query = torch.stack((query, query * math.nan), dim=-1)[..., 0]
    strided = torch.stack((contexts.int(), torch.full_like(contexts.int(), 99)), dim=-1)[:, 0]
    table = table.int().t().contiguous().t()
    for caches in (
        [both[:, :, 0], both[:, :, 1]],
        [cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for cache in (keys, values)],
        [torch.stack((cache, cache * math.nan), dim=-1)[..., 0] for cache in (keys, values)],
    ):
        out = ragged_attention(*on(device, (strided_query, *caches, batch, table, strided)), config=TILED)
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("config", [TILED, SHARED], ids=["tiled", "shared"])
def test_attention_of_nothing_is_zero(config, device, generator):
    query, keys, values, batch, table, contexts = on(device, paged([1, 2], [9, 10], generator))
    assert not ragged_attention(query, keys, values, batch, table, contexts * 0, config=config).any()
    out = ragged_attention(query, keys, values, batch, table, contexts * torch.tensor([0, 1]).to(device), config=config)
    assert not out[:2].any()
    assert out[2:].all()
    empty = pack(*on(device, inputs([])))
    assert ragged_attention(query[:0], keys, values, empty, table[:0], contexts[:0], config=config).numel() == 0
    padding = pack(*on(device, inputs([])), capacity=40)
    out = ragged_attention(torch.cat([query] * 8), keys, values, padding, table[:0], contexts[:0], config=config)
    assert out.shape[0] == 40
    assert not out.any()


@pytest.mark.parametrize("config", [TILED, SHARED], ids=["tiled", "shared"])
def test_attention_of_a_marked_overflow_stays_in_bounds(config, device, generator):
    query, keys, values, batch, table, contexts = paged([2, 3], [9, 10], generator)
    anchors, drafts, lengths, _ = inputs([2, 3])
    short = reference._scatter(anchors, drafts, lengths, torch.tensor([6, 6]), capacity=5)
    out = ragged_attention(*on(device, (query[:5], keys, values, short, table, contexts)), config=config).cpu()
    expected = reference.ragged_attention(query, keys, values, batch, table, contexts)[:5]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_attention_loops_over_more_rows_than_its_programs_expect(device, generator):
    rows, heads = 45, 2
    ids = torch.zeros(rows, dtype=torch.int32)
    batch = PackedBatch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(rows),
        request_ids=ids,
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32),
        num_tokens=torch.tensor(rows, dtype=torch.int32),
    )
    query = torch.randn(rows, heads, 4, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 3, 16, 1, 4, generator=generator, dtype=torch.float64)
    arguments = (query, keys, values, batch, torch.tensor([[2, 0, 1]]), torch.tensor([rows]))
    expected = reference.ragged_attention(*arguments)
    for config in (TILED, SHARED):
        out = ragged_attention(*on(device, arguments), config=config).cpu()
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_page_out_of_range_is_read_within_the_cache(device, generator):
    query, keys, values, batch, table, contexts = paged([1, 2], [9, 10], generator)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    wild = torch.where(torch.arange(table.shape[1]) == 0, torch.tensor([[-5], [99]]), table)
    tame = torch.where(torch.arange(table.shape[1]) == 0, torch.tensor([[0], [keys.shape[0] - 1]]), table)
    expected = reference.ragged_attention(query, keys, values, batch, tame, contexts)
    with mock.patch.object(verification, "check_attention_arguments"):
        moved = on(device, (query, keys, values, batch, wild, contexts))
        out = ragged_attention(*moved, config=TILED).cpu()
        beyond = ragged_attention(*on(device, (query, keys, values, batch, tame, contexts + 1000)), config=TILED)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.isfinite(beyond).all()


@pytest.mark.skipif(not interpreted(packing.pack_kernel), reason="counts what the interpreter touches")
@pytest.mark.parametrize("config", [TILED, SHARED], ids=["tiled", "shared"])
def test_pages_are_read_once_a_request_and_only_those_it_has(config, generator):
    lengths, contexts = [3, 0], [18, 5]
    query, keys, values, batch, table, lens = paged(lengths, contexts, generator, dtype=torch.float32)
    wide_table = torch.nn.functional.pad(table, (0, 500), value=-1)
    with count_traffic(keys=keys, values=values, query=query) as traffic:
        ragged_attention(query, keys, values, batch, wide_table, lens, config=config)
    kv_heads = keys.shape[2]
    assert traffic.read["keys"] == traffic.read["values"] == sum(contexts) * kv_heads * HEAD_DIM * 4
    assert traffic.read["query"] == query.nbytes * config.num_shares
    if config.num_shares == 1:
        assert traffic.total < 1.6 * (query.nbytes * 2 + 2 * traffic.read["keys"])


@pytest.mark.skipif(not interpreted(packing.pack_kernel), reason="counts what the interpreter touches")
@pytest.mark.parametrize("block_m", [16, 64])
def test_a_share_nobody_sees_writes_no_output(block_m, generator):
    """18 positions are two blocks of 16, so that of three shares the last has none; with 64 rows that is a mask, with fewer a branch."""
    query, *rest = paged([3], [18], generator, dtype=torch.float32)
    with count_traffic(query=query) as traffic:
        out = ragged_attention(query, *rest, config=dataclasses.replace(SHARED, block_m=block_m))
    torch.testing.assert_close(out, reference.ragged_attention(query, *rest))
    shares, seen, (rows, heads, head_dim) = SHARED.num_shares, 2, query.shape
    assert traffic.written[OTHER] == 4 * rows * heads * (seen * head_dim + 2 * shares + head_dim)


def test_choose_config_fills_the_device_and_fits_the_heads():
    calm = choose_config(8, 1, 32, 8, 128, 32_768, torch.bfloat16, torch.bfloat16)
    assert (calm.num_shares, calm.block_m) == (32, 32)
    assert choose_config(8, 1, 32, 8, 128, 1024, torch.bfloat16, torch.bfloat16).num_shares == 4
    busy = choose_config(64 * 8, 64, 32, 8, 128, 32_768, torch.bfloat16, torch.bfloat16)
    assert busy.num_shares == 1
    for head_dim in (1, 64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            config = choose_config(1, 1, 1, 1, head_dim, 0, dtype, dtype)
            assert (config.block_m, config.num_shares) == (16, 1)
            assert 16 <= config.block_n <= 64
    assert choose_config(0, 0, 8, 8, 64, 0, torch.float32, torch.float32).num_shares == 1

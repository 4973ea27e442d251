"""The target and its cache: ragged decoding equals the dense pass, whatever comes, goes and is rolled back."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TINY, tiny_target
from torch import Tensor

from dsspark.models.cache import PagedKVCache
from dsspark.models.layers import apply_rotary, causal_attention, rotary_tables
from dsspark.models.target import TargetConfig, TargetLM
from dsspark.reference.verification import pack
from dsspark.types import PackedBatch


@pytest.fixture
def target(generator: torch.Generator) -> TargetLM:
    return tiny_target(generator)


def texts_of(lengths: list[int], generator: torch.Generator) -> list[Tensor]:
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def packed(pieces: list[Tensor], starts: list[int]) -> PackedBatch:
    """Pack one run of tokens a request, of different lengths, through `pack`: first token, then the others as drafts."""
    longest = max(len(piece) for piece in pieces)
    drafts = torch.zeros(len(pieces), max(longest - 1, 1), dtype=torch.int64)
    for row, piece in enumerate(pieces):
        drafts[row, : len(piece) - 1] = piece[1:]
    anchors = torch.stack([piece[0] for piece in pieces])
    return pack(anchors, drafts, torch.tensor([len(piece) - 1 for piece in pieces]), torch.tensor(starts))


def test_ragged_forward_equals_dense_forward(target, generator):
    """Texts of different lengths, fed in uneven pieces, give the dense logits and features of each text."""
    texts = texts_of([9, 14, 5], generator)
    dense = [target(text[None]) for text in texts]
    cache = target.new_cache(3, page_size=4)
    done = [0, 0, 0]
    for piece in ([4, 1, 2], [1, 8, 1], [4, 5, 2]):
        batch = packed([text[d : d + n] for text, d, n in zip(texts, done, piece, strict=True)], done)
        cache.reserve(torch.tensor([d + n for d, n in zip(done, piece, strict=True)]))
        out = target.forward_ragged(batch, cache)
        for row in range(3):
            rows = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
            want = slice(done[row], done[row] + piece[row])
            torch.testing.assert_close(out.logits[rows], dense[row].logits[0, want], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(out.features[rows], dense[row].features[0, want], rtol=1e-9, atol=1e-9)
        done = [d + n for d, n in zip(done, piece, strict=True)]
    assert done == [9, 14, 5]


def test_rolled_back_positions_are_forgotten(target, generator):
    """Wrong drafts written and rolled back change nothing of what follows, page boundaries included."""
    text = texts_of([12], generator)[0]
    want = target(text[None]).logits[0, 7:]
    cache = target.new_cache(1, page_size=4)
    for start, piece, keep in ((0, text[:7], 7), (7, torch.tensor([1, 2, 3, 4, 5]), 7), (7, text[7:], 12)):
        cache.reserve(torch.tensor([start + len(piece)]))
        out = target.forward_ragged(packed([piece], [start]), cache)
        cache.rollback(torch.tensor([keep]))
    torch.testing.assert_close(out.logits, want, rtol=1e-9, atol=1e-9)


def test_a_request_that_leaves_disturbs_no_other(target, generator):
    """Keep rows 2 and 0 in that order, add a new one on the freed pages: all continue as their own dense text."""
    texts = texts_of([10, 11, 12, 6], generator)
    cache = target.new_cache(3, page_size=4)
    cache.reserve(torch.tensor([8, 8, 8]))
    target.forward_ragged(packed([text[:8] for text in texts[:3]], [0, 0, 0]), cache)
    cache.keep([2, 0])
    cache.add_requests(1)
    cache.reserve(torch.tensor([12, 10, 6]))
    batch = packed([texts[2][8:], texts[0][8:], texts[3]], [8, 8, 0])
    logits = target.forward_ragged(batch, cache).logits
    want = torch.cat(
        [target(texts[2][None]).logits[0, 8:], target(texts[0][None]).logits[0, 8:], target(texts[3][None]).logits[0]]
    )
    torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)


def test_padding_of_a_captured_batch_is_not_written(target, generator):
    """A batch with spare capacity gives the same rows; its padding must not overwrite slot 0 of page 0."""
    text = texts_of([6], generator)[0]
    want = target(text[None]).logits[0]
    cache = target.new_cache(1, page_size=4)
    cache.reserve(torch.tensor([3]))
    batch = pack(text[:1], text[None, 1:3], torch.tensor([2]), torch.tensor([0]), capacity=8)
    got = [target.forward_ragged(batch, cache).logits[:3]]
    cache.reserve(torch.tensor([6]))
    got.append(target.forward_ragged(packed([text[3:]], [3]), cache).logits)
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-9, atol=1e-9)


def test_target_is_causal(target, generator):
    text = texts_of([10], generator)[0][None]
    changed = text.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 256
    same = (target(text).logits == target(changed).logits).all(dim=-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 4


def test_features_are_the_outputs_of_the_named_layers(target, generator):
    """The features equal what hooks on those layers see, and the last layer is not among them."""
    text = texts_of([5], generator)[0][None]
    seen = {}
    finish = type(target.layers[0]).finish

    def spy(layer, x, mixed):
        seen[id(layer)] = finish(layer, x, mixed)
        return seen[id(layer)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target.layers[0]), "finish", spy)
        features = target(text).features
    want = torch.cat([seen[id(target.layers[index])] for index in (0, 1)], dim=-1)
    assert features.shape == (1, 5, TINY.feature_size)
    assert torch.equal(features, want)


def test_rotary_scores_depend_on_the_distance_only(generator):
    query, key = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        turned = [
            apply_rotary(x, rotary_tables(torch.tensor([p]), 8, 100.0, x.dtype)) for x, p in ((query, i), (key, j))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(score(3, 1), score(3, 2))


def test_causal_attention_matches_the_fused_one(generator):
    """Grouped heads included: query head h reads key head h // 2."""
    query = torch.randn(2, 6, 4, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 6, 2, 8, generator=generator, dtype=torch.float64)
    repeated = [x.transpose(1, 2).repeat_interleave(2, dim=1) for x in (keys, values)]
    want = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), *repeated, is_causal=True)
    torch.testing.assert_close(causal_attention(query, keys, values), want.transpose(1, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"vocab_size": 258}, "vocab_size"),
        ({"num_heads": 3}, "num_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"feature_layers": (0, 2)}, "feature_layers"),
        ({"feature_layers": ()}, "feature_layers"),
        ({"feature_layers": (1, 0)}, "feature_layers"),
    ],
)
def test_target_config_errors_name_the_argument(change, name):
    sizes = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "feature_layers": (0, 1)} | change
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        TargetConfig(**sizes)


def test_target_refuses_wrong_tokens(target):
    with pytest.raises(ValueError, match=r"^tokens: got shape"):
        target(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^tokens: got dtype"):
        target(torch.zeros(1, 3))


def test_forward_ragged_refuses_another_cache_and_unreserved_positions(target):
    batch = packed([torch.tensor([1, 2])], [0])
    with pytest.raises(ValueError, match=r"^cache: got 2 requests"):
        target.forward_ragged(batch, target.new_cache(2))
    cache = target.new_cache(1)
    cache.reserve(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"^batch: got a position beyond"):
        target.forward_ragged(batch, cache)


def small_cache(num_requests: int) -> PagedKVCache:
    return PagedKVCache(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4, num_requests=num_requests)


def used_pages(cache: PagedKVCache) -> list[int]:
    counts = (-(-cache.lengths // 4)).tolist()
    return [page for row, count in enumerate(counts) for page in cache.block_table[row, :count].tolist()]


def test_pages_belong_to_one_request_and_are_reused(generator):
    """A long random life of a cache: pages stay distinct, as few as the lengths need, and the pool does not leak."""
    cache = small_cache(3)
    for _ in range(60):
        cache.reserve(cache.lengths + torch.randint(0, 9, (cache.num_requests,), generator=generator))
        cache.rollback((cache.lengths - torch.randint(0, 7, (cache.num_requests,), generator=generator)).clamp_min(0))
        if cache.lengths.max() > 40:
            cache.keep([row for row in range(cache.num_requests) if row != int(cache.lengths.argmax())])
            cache.add_requests(1)
        pages = used_pages(cache)
        assert len(set(pages)) == len(pages) == cache.num_pages_in_use
        assert len(pages) + len(cache._free) == cache.keys[0].shape[0]
    assert cache.keys[0].shape[0] <= 64


def test_growing_keeps_what_was_written():
    cache = small_cache(1)
    cache.reserve(torch.tensor([2]))
    cache.write(0, torch.tensor([0, 1]), torch.ones(2, 1, 2), 2 * torch.ones(2, 1, 2))
    first = int(cache.block_table[0, 0])
    cache.write(0, first * 4 + torch.arange(2), torch.full((2, 1, 2), 5.0), torch.full((2, 1, 2), 6.0))
    cache.reserve(torch.tensor([200]))
    assert cache.block_table.shape == (1, 50)
    assert cache.keys[0][first, :2].unique().tolist() == [5.0]
    assert cache.values[0][first, :2].unique().tolist() == [6.0]


def test_cache_errors_name_the_argument():
    cache = small_cache(2)
    cache.reserve(torch.tensor([3, 5]))
    with pytest.raises(ValueError, match=r"^new_lengths: got .*rollback"):
        cache.reserve(torch.tensor([3, 4]))
    with pytest.raises(ValueError, match=r"^lengths: got .*reserve"):
        cache.rollback(torch.tensor([4, 5]))
    with pytest.raises(ValueError, match=r"^lengths: got"):
        cache.rollback(torch.tensor([-1, 5]))
    for rows in ([0, 0], [2], [-1]):
        with pytest.raises(ValueError, match=r"^rows: got"):
            cache.keep(rows)
    with pytest.raises(ValueError, match=r"^new_lengths: got shape"):
        cache.reserve(torch.tensor([9]))
    with pytest.raises(ValueError, match=r"^count: got -1"):
        cache.add_requests(-1)
    with pytest.raises(ValueError, match=r"^page_size: got 0"):
        PagedKVCache(num_layers=1, num_kv_heads=1, head_dim=2, page_size=0)
    assert cache.lengths.tolist() == [3, 5]

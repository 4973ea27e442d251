"""Philox and `Uniforms`."""

from __future__ import annotations

import pytest
import torch

from dsspark import Uniforms
from dsspark.randomness import philox4x32

# Known answers published with Random123: (counter, key) -> words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_matches_the_published_answers(counter, key, words):
    as_tensor = [torch.tensor([word]) for word in (*counter, *key)]
    assert tuple(int(word) for word in philox4x32(as_tensor[:4], as_tensor[4:])) == words


def test_a_request_draws_the_same_numbers_in_any_batch():
    alone = Uniforms.from_seeds([11], [3], 7)
    batch = Uniforms.from_seeds([5, 11, -2], [0, 3, 9], 7)
    for name in ("draft", "accept", "final"):
        assert torch.equal(getattr(batch, name)[1], getattr(alone, name)[0])


def test_a_larger_block_extends_the_draws_and_changes_none():
    short, long = Uniforms.from_seeds([4], [2], 3), Uniforms.from_seeds([4], [2], 32)
    assert torch.equal(long.draft[:, :3], short.draft)
    assert torch.equal(long.accept[:, :3], short.accept)
    assert torch.equal(long.final, short.final)


def test_no_number_is_used_twice():
    """Streams, positions, rounds and seeds never share a counter: 24-bit values would repeat far more often if they did."""
    uniforms = Uniforms.from_seeds([1] * 40 + [2] * 40, [*range(40), *range(40)], 16)
    pairs = torch.cat((uniforms.draft.flatten(0, 1), uniforms.final))  # 48 bits each
    assert len(pairs.unique(dim=0)) == len(pairs)
    values = torch.cat((pairs.flatten(), uniforms.accept.flatten()))
    repeats = len(values) - len(values.unique())
    assert repeats <= 4  # the expected number of chance repeats of 4,000 24-bit words is 0.5


def test_high_words_of_seed_and_round_count():
    base = Uniforms.from_seeds([1], [0], 2).draft
    assert not torch.equal(Uniforms.from_seeds([1 + 2**40], [0], 2).draft, base)
    assert not torch.equal(Uniforms.from_seeds([1], [2**33], 2).draft, base)


def test_uniforms_are_uniform_and_in_range():
    uniforms = Uniforms.from_seeds(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 7)
    for values in (uniforms.draft, uniforms.accept, uniforms.final):
        assert values.dtype == torch.float32
        assert values.min() >= 0
        assert values.max() < 1
        assert values.mean().item() == pytest.approx(0.5, abs=0.02)
        assert values.var().item() == pytest.approx(1 / 12, abs=0.01)


def test_draw_follows_its_generator(generator):
    first = Uniforms.draw(3, 2, generator)
    again = Uniforms.draw(3, 2, torch.Generator().manual_seed(20260707))
    assert torch.equal(first.draft, again.draft)
    assert first.final.shape == (3, 2)
    assert Uniforms.draw(0, 2).draft.shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: Uniforms.draw(2, 0), ValueError, "block_size"),
        (lambda: Uniforms.draw(2, 33), ValueError, "block_size"),
        (lambda: Uniforms.draw(-1, 2), ValueError, "num_requests"),
        (lambda: Uniforms.from_seeds([1, 2], [0], 2), ValueError, "rounds"),
        (lambda: Uniforms.from_seeds([0.5], [0], 2), TypeError, "seeds"),
        (lambda: Uniforms.from_seeds([[1]], [0], 2), ValueError, "seeds"),
        (
            lambda: Uniforms(draft=torch.rand(2, 3, 2), accept=torch.rand(2, 2), final=torch.rand(2, 2)),
            ValueError,
            "accept",
        ),
        (
            lambda: Uniforms(draft=torch.rand(2, 3, 2), accept=torch.rand(2, 3).half(), final=torch.rand(2, 2)),
            TypeError,
            "accept",
        ),
    ],
)
def test_bad_arguments_name_themselves(call, error, names):
    with pytest.raises(error, match=names):
        call()

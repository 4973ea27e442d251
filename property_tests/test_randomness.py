"""Laws of the counter-based uniforms."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dsspark import Uniforms
from dsspark.testing import strategies

NAMES = ("draft", "accept", "final")


@st.composite
def calls(draw):
    requests = draw(st.integers(1, 5))
    return (
        [draw(strategies.seeds()) for _ in range(requests)],
        [draw(st.one_of(st.integers(0, 5), st.integers(0, 2**40))) for _ in range(requests)],
        draw(st.integers(1, 6)),
    )


@given(call=calls(), data=st.data())
def test_a_requests_numbers_depend_on_its_seed_and_round_only(call, data):
    seeds, rounds, gamma = call
    whole = Uniforms.from_seeds(seeds, rounds, gamma)
    kept = data.draw(st.permutations(range(len(seeds))))[: data.draw(st.integers(1, len(seeds)))]
    part = Uniforms.from_seeds([seeds[i] for i in kept], [rounds[i] for i in kept], gamma)
    for name in NAMES:
        assert torch.equal(getattr(part, name), getattr(whole, name)[kept])


@given(call=calls())
def test_a_longer_block_begins_with_the_shorter_one(call):
    seeds, rounds, gamma = call
    shorter, longer = Uniforms.from_seeds(seeds, rounds, gamma), Uniforms.from_seeds(seeds, rounds, gamma + 3)
    assert torch.equal(longer.draft[:, :gamma], shorter.draft)
    assert torch.equal(longer.accept[:, :gamma], shorter.accept)
    assert torch.equal(longer.final, shorter.final)


@given(call=calls())
def test_all_numbers_are_multiples_of_two_to_the_minus_24_below_one(call):
    uniforms = Uniforms.from_seeds(*call)
    for name in NAMES:
        scaled = getattr(uniforms, name) * 2.0**24
        assert torch.equal(scaled, scaled.floor())
        assert ((scaled >= 0) & (scaled < 2**24)).all()


@given(seed=strategies.seeds(), other=strategies.seeds(), first=st.integers(0, 2**20), apart=st.integers(1, 2**20))
def test_no_two_rounds_or_seeds_share_their_noise(seed, other, first, apart):
    """Each draw has 24 bits: two blocks of 23 numbers may agree in one by chance, in three they do not."""
    seeds = [seed, seed] if seed == other else [seed, seed, other]
    rounds = [first, first + apart, first][: len(seeds)]
    uniforms = Uniforms.from_seeds(seeds, rounds, 7)
    numbers = [
        row.flatten().tolist() for row in torch.cat((uniforms.draft.flatten(1), uniforms.accept, uniforms.final), 1)
    ]
    for i in range(len(numbers)):
        for j in range(i):
            assert len(set(numbers[i]) & set(numbers[j])) < 3

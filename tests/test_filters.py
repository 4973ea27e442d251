"""Top-k, top-p and min-p: the rule, its ties, and its place in a round."""

from __future__ import annotations

import pytest
import torch
from helpers import law_counts, logits_of

from dsspark import DraftBlock, Filters, Uniforms, pack, verify
from dsspark.reference.filters import filter_weights, target_weights


def kept(numerators, filters, temperature=1.0, rows=1):
    logits = logits_of(numerators).expand(rows, -1)
    weights, total = target_weights(logits, torch.full((rows,), temperature), filters)
    assert torch.equal(weights.sum(-1), total) or total.isnan().any()
    return [row.nonzero()[:, 0].tolist() for row in weights]


WEIGHTS = torch.tensor([[3.0, 8.0, 1.0, 3.0, 1.0]]) / 8  # the law (3, 8, 1, 3, 1) / 16, exactly


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(top_k=0), [0, 1, 2, 3, 4]),
        (Filters(top_k=1), [1]),
        (Filters(top_k=2), [0, 1]),  # 0 and 3 tie: the lowest id
        (Filters(top_k=4), [0, 1, 2, 3]),
        (Filters(top_k=99), [0, 1, 2, 3, 4]),
        (Filters(top_p=0.3), [1]),
        (Filters(top_p=0.5), [1]),  # reached exactly by the first
        (Filters(top_p=0.5001), [0, 1]),  # the crossing token is kept
        (Filters(top_p=0.75), [0, 1, 3]),  # 11/16 < 0.75 <= 14/16
        (Filters(top_p=1.0), [0, 1, 2, 3, 4]),
        (Filters(min_p=0.375), [0, 1, 3]),  # relative to the largest
        (Filters(min_p=0.38), [1]),
        (Filters(min_p=1.0), [1]),
        (Filters(top_k=3, top_p=0.72), [0, 1]),  # renormalised over three: 8/14 < 0.72 <= 11/14
        (Filters(top_k=3, top_p=0.57), [1]),
        (Filters(top_k=4, top_p=0.99, min_p=0.2), [0, 1, 3]),
    ],
)
def test_the_rule(filters, expected):
    filtered, in_range = filter_weights(WEIGHTS.log(), WEIGHTS, filters)
    assert filtered[0].nonzero()[:, 0].tolist() == expected
    assert torch.equal(filtered[0, expected], WEIGHTS[0, expected])
    assert in_range.all()


def test_temperature_comes_first():
    assert kept([3, 8, 1, 3, 1], Filters(top_p=0.5), temperature=4.0)[0] != [1]
    assert kept([3, 8, 8, 3, 1], Filters(top_k=2, min_p=0.5), temperature=0.0) == [[1]]


def test_one_filter_a_request():
    filters = Filters(
        top_k=torch.tensor([1, 0, 2]), top_p=torch.tensor([1.0, 0.5, 1.0]), min_p=torch.tensor([0.0, 0.0, 0.0])
    )
    assert kept([3, 8, 1, 3, 1], filters, rows=3) == [[1], [1], [0, 1]]


def test_bad_entries_make_their_row_invalid():
    for filters in (
        Filters(top_k=torch.tensor([1, -1])),
        Filters(top_p=torch.tensor([1.0, 0.0])),
        Filters(top_p=torch.tensor([0.5, torch.nan])),
        Filters(min_p=torch.tensor([0.0, 1.5])),
    ):
        _, total = target_weights(torch.zeros(2, 4), torch.ones(2), filters)
        assert total.isnan().tolist() == [False, True]


def test_filters_reach_the_ratio_the_residual_and_the_bonus(generator):
    """top-k 2 of (1/2, 1/4, 1/4): p becomes (2/3, 1/3, 0) everywhere in the round, and its log-probabilities too."""
    count = 20_000
    anchors = torch.zeros(count, dtype=torch.int64)
    uniforms = Uniforms.draw(count, 1, generator)
    tokens = torch.full((count, 1), 2)
    tokens[::2] = 0
    batch = pack(anchors, tokens, torch.ones(count, dtype=torch.int64), anchors)
    rows = logits_of([2, 1, 1]).expand(2 * count, -1)
    result = verify(rows, batch, DraftBlock.point(tokens), uniforms, filters=Filters(top_k=2))
    assert (result.num_accepted[1::2] == 0).all()  # token 2 was filtered out
    for emitted in (result.tokens[1::2, 0], result.tokens[::2, 0], result.tokens[result.num_accepted == 1, 1]):
        counts = law_counts(emitted, 3)
        assert counts[2] == 0
        assert counts[0] / sum(counts) == pytest.approx(2 / 3, abs=0.02)
    assert result.logprobs[0, 0].exp().item() == pytest.approx(2 / 3 if result.tokens[0, 0] == 0 else 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"top_k": -1}, ValueError, "top_k"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"top_p": 1.1}, ValueError, "top_p"),
        ({"top_p": float("nan")}, ValueError, "top_p"),
        ({"min_p": -0.1}, ValueError, "min_p"),
        ({"min_p": "x"}, TypeError, "min_p"),
        ({"top_k": torch.ones(2)}, TypeError, "top_k"),
    ],
)
def test_bad_filters_name_themselves(arguments, error, names):
    with pytest.raises(error, match=names):
        Filters(**arguments)

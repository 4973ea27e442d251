"""The oracles that write a law out, and the G-test."""

from __future__ import annotations

import pytest
import torch

from dsspark import Filters
from dsspark.testing.laws import g_test
from dsspark.testing.oracles import exact_law_of_row, exact_residual, over_target_ids


def test_the_exact_law_of_a_row():
    row = torch.log(torch.tensor([4.0, 2.0, 1.0, 1.0]))
    expected = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    torch.testing.assert_close(exact_law_of_row(row), expected, atol=1e-7, rtol=0)
    assert exact_law_of_row(row, 0.0).tolist() == [1, 0, 0, 0]
    assert (exact_law_of_row(row, 1.0, Filters(top_k=3)) > 0).tolist() == [True, True, True, False]
    assert (exact_law_of_row(row, 1.0, Filters(top_p=0.7)) > 0).tolist() == [True, True, False, False]
    assert (exact_law_of_row(row, 1.0, Filters(min_p=0.3)) > 0).tolist() == [True, True, False, False]
    assert exact_residual(expected, expected.flip(0)).tolist() == [0.75, 0.25, 0.0, 0.0]
    assert torch.equal(exact_residual(expected, expected), expected)
    assert over_target_ids(expected, 3, None).tolist() == [0.5, 0.25, 0.125]
    assert over_target_ids(expected[:2], 4, torch.tensor([1, 3])).tolist() == [0, 0.5, 0, 0.25]


def test_the_g_test_agrees_with_scipy_and_keeps_its_false_alarm_rate(generator):
    scipy_stats = pytest.importorskip("scipy.stats")
    law = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rejected = 0
    for _ in range(400):
        draws = torch.multinomial(law, 2000, replacement=True, generator=generator)
        counts = torch.bincount(draws, minlength=4)
        test = g_test(counts, law, false_alarm=0.05)
        rejected += not test.passed
        expected = scipy_stats.power_divergence(counts.numpy(), 2000 * law.numpy(), lambda_="log-likelihood")
        assert test.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert 5 <= rejected <= 40  # 20 are expected


def test_the_g_test_sees_bias_pools_thin_bins_and_never_rescales():
    assert not g_test([5300, 4700], [0.5, 0.5]).passed
    assert g_test([5000, 5000], [0.5, 0.5]).passed
    assert not g_test([999, 1], [1.0, 0.0]).passed
    pooled = g_test([900, 98, 1, 1], [0.9, 0.098, 0.001, 0.001])
    assert pooled.degrees == 1
    # All mass on outcomes that keep their proportions: rescaled to what occurred it would pass.
    assert not g_test([5000, 5000, 0], [0.4, 0.4, 0.2]).passed


@pytest.mark.parametrize(
    ("counts", "law", "rate", "names"),
    [
        ([1, 2], [1.0], 0.1, "counts"),
        ([0, 0], [0.5, 0.5], 0.1, "counts"),
        ([-1, 2], [0.5, 0.5], 0.1, "counts"),
        ([1, 2], [0.5, 0.4], 0.1, "law"),
        ([1, 2], [0.5, 0.5], 0.0, "false_alarm"),
    ],
)
def test_the_g_test_refuses_bad_arguments(counts, law, rate, names):
    with pytest.raises(ValueError, match=names):
        g_test(counts, law, false_alarm=rate)

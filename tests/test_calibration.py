"""Calibration: STS, ECE, Brier, AUROC and the reliability table, against loops over bins, samples and temperatures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dsspark import expected_calibration_error, fit_sts, survival
from dsspark.reference import calibration
from dsspark.reference.calibration import auroc, brier_score, default_grid, reliability_table

GRID = [0.5, 0.75, 1.0, 1.5, 2.0, 3.0]


def ece_by_bins(probabilities, outcomes, num_bins):
    """Evaluate the textbook form: the share of each bin times |mean confidence - accuracy|, in float64."""
    p, y = np.asarray(probabilities), np.asarray(outcomes, dtype=np.float64)
    bins = [min(math.floor(value * p.dtype.type(num_bins)), num_bins - 1) for value in p]
    total = 0.0
    for b in range(num_bins):
        inside = np.array([i == b for i in bins])
        if inside.any():
            total += inside.mean() * abs(p[inside].astype(np.float64).mean() - y[inside].mean())
    return total


def fit_by_loop(logits, accepted, grid, num_bins):
    """Fit STS one position and one temperature at a time, in the dtype of the logits."""
    prefix, fitted = torch.ones_like(logits[:, 0]), []
    for k in range(logits.shape[1]):
        errors = [
            ece_by_bins((prefix * torch.sigmoid(logits[:, k] / t)).numpy(), accepted[:, k].numpy(), num_bins)
            for t in grid
        ]
        fitted.append(grid[errors.index(min(errors))])
        prefix = prefix * torch.sigmoid(logits[:, k] / fitted[-1])
    return fitted


def overconfident(count, gamma, generator, true_temperature=2.0, dtype=torch.float32):
    """Return logits whose calibrated form is z / true_temperature, and the cumulative outcomes they predict."""
    logits = torch.randn(count, gamma, generator=generator, dtype=torch.float64) * 2 + 2.5
    each = torch.rand(count, gamma, generator=generator) < torch.sigmoid(logits / true_temperature)
    return logits.to(dtype), each.cumprod(dim=1).bool()


@pytest.mark.parametrize("num_bins", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ece_equals_the_textbook(num_bins, dtype, generator):
    p = torch.rand(400, generator=generator, dtype=dtype)
    p[:40] = torch.linspace(0, 1, 40, dtype=dtype)  # bin edges, exact 0 and exact 1
    y = torch.rand(400, generator=generator) < p
    ece = expected_calibration_error(p, y, num_bins=num_bins)
    assert (ece.dtype, ece.shape) == (torch.float32, ())
    assert ece.item() == pytest.approx(ece_by_bins(p.numpy(), y.numpy(), num_bins), rel=1e-6)


def test_ece_counts_probabilities_of_exactly_zero_and_one():
    assert expected_calibration_error(torch.ones(4), torch.tensor([1, 1, 1, 0])).item() == 0.25
    assert expected_calibration_error(torch.zeros(4), torch.tensor([1, 0, 0, 0])).item() == 0.25
    together = expected_calibration_error(torch.tensor([0.96, 1.0]), torch.tensor([1, 1]))
    assert together.item() == pytest.approx(0.02, rel=1e-6)  # 1 shares the last bin
    apart = expected_calibration_error(torch.tensor([0.0, 0.06]), torch.tensor([1, 0]))
    assert apart.item() == pytest.approx(0.53, rel=1e-6)  # two bins: errors do not cancel
    cancels = expected_calibration_error(torch.tensor([0.0, 0.06]), torch.tensor([1, 0]), num_bins=10)
    assert cancels.item() == pytest.approx(0.47, rel=1e-6)


def test_ece_takes_any_shape_and_outcome_dtype(generator):
    p = torch.rand(6, 5, generator=generator)
    y = torch.rand(6, 5, generator=generator) < p
    expected = expected_calibration_error(p.flatten(), y.flatten())
    for form in (y, y.int(), y.long(), y.float(), y.to(torch.uint8), y.t().contiguous().t()):
        assert torch.equal(expected_calibration_error(p, form), expected)
    assert torch.equal(expected_calibration_error(p.bfloat16(), y), expected_calibration_error(p.bfloat16().float(), y))
    assert not expected_calibration_error(p.requires_grad_(), y).requires_grad


def test_reliability_table_recombines_to_the_ece(generator):
    p = torch.rand(300, generator=generator) * 0.8
    p[0], p[1] = 0.0, 1.0
    y = torch.rand(300, generator=generator) < p
    table = reliability_table(p, y, num_bins=10)
    bins = [min(int(value * np.float32(10)), 9) for value in p.numpy()]
    assert table.count.tolist() == [bins.count(b) for b in range(10)]
    for b in range(10):
        inside = torch.tensor([i == b for i in bins])
        if not inside.any():
            assert table.mean_probability[b].isnan()
            assert table.mean_outcome[b].isnan()
            continue
        assert table.mean_probability[b].item() == pytest.approx(p[inside].double().mean().item(), rel=1e-6)
        assert table.mean_outcome[b].item() == pytest.approx(y[inside].double().mean().item(), rel=1e-6)
    assert table.count[8] == 0
    gap = (table.mean_probability - table.mean_outcome).abs().nan_to_num() * table.count / 300
    assert gap.sum().item() == pytest.approx(expected_calibration_error(p, y, num_bins=10).item(), rel=1e-5)


def test_brier_score(generator):
    p = torch.rand(100, generator=generator)
    y = torch.rand(100, generator=generator) < p
    by_hand = sum((a - float(b)) ** 2 for a, b in zip(p.tolist(), y.tolist(), strict=True)) / 100
    assert brier_score(p, y).item() == pytest.approx(by_hand, rel=1e-6)
    assert brier_score(p, y).dtype == torch.float32


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auroc_counts_pairs_and_half_the_ties(levels, generator):
    scores = torch.randint(levels, (60,), generator=generator).float() - levels / 2
    y = torch.randint(2, (60,), generator=generator)
    pairs = list(itertools.product(scores[y == 1].tolist(), scores[y == 0].tolist()))
    expected = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert auroc(scores, y).item() == np.float32(expected)
    assert auroc(-scores, y).item() == pytest.approx(1 - expected, rel=1e-6)
    assert auroc(scores.view(6, 10), y.view(6, 10)).item() == np.float32(expected)


def test_auroc_at_the_ends():
    assert auroc(torch.tensor([-math.inf, 0.0, math.inf]), torch.tensor([0, 1, 1])).item() == 1.0
    assert auroc(torch.ones(5), torch.tensor([0, 1, 1, 0, 0])).item() == 0.5
    assert auroc(torch.rand(5), torch.ones(5)).isnan()
    assert auroc(torch.rand(5), torch.zeros(5)).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_bins", [7, 20])
def test_sts_equals_the_loop_over_temperatures(dtype, num_bins, generator):
    logits, accepted = overconfident(700, 4, generator, dtype=dtype)
    fit = fit_sts(logits, accepted, num_bins=num_bins, grid=GRID)
    assert fit.temperatures.tolist() == fit_by_loop(logits, accepted, GRID, num_bins)
    assert {fit.temperatures.dtype, fit.ece_before.dtype, fit.ece_after.dtype} == {torch.float32}
    for errors, scale in ((fit.ece_before, None), (fit.ece_after, fit.temperatures)):
        a = survival(logits, scale)
        assert errors.tolist() == [
            expected_calibration_error(a[:, k], accepted[:, k], num_bins=num_bins).item() for k in range(4)
        ]


def test_sts_does_not_depend_on_how_samples_are_chunked(generator, monkeypatch):
    logits, accepted = overconfident(1_001, 3, generator)
    arguments = survival(logits)[:, 0], logits[:, 1], accepted[:, 1].float(), torch.tensor(GRID), 20
    whole = calibration._grid_bin_sums(*arguments)
    monkeypatch.setattr(calibration, "_CHUNK_CELLS", 100 * len(GRID))
    parts = calibration._grid_bin_sums(*arguments)
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)  # sigmoid may round the end of a chunk differently
    monkeypatch.setattr(calibration, "_CHUNK_CELLS", 1)
    assert fit_sts(logits[:50], accepted[:50], grid=GRID).temperatures.tolist() == fit_by_loop(
        logits[:50], accepted[:50], GRID, 20
    )


def test_sts_recovers_the_temperature_that_made_the_data(generator):
    logits, accepted = overconfident(40_000, 5, generator, true_temperature=2.0)
    fit = fit_sts(logits, accepted)
    assert ((fit.temperatures / 2).log2().abs() <= 0.25).all()
    assert fit.ece_before.min() > 0.05
    assert fit.ece_after.max() < 0.02


def test_sts_is_cumulative_not_per_position():
    """Position 2 is calibrated on its own, yet the prefix is not: fitting conditionals would leave T_2 = 1."""
    half = torch.tensor([1] * 50 + [0] * 50)
    first = torch.full((100,), math.log(0.8 / 0.2))  # says 0.8 where 0.5 is right, and no grid value mends it
    second = torch.full((100,), math.log(0.9 / 0.1))  # given the first, 45 of 50: exactly 0.9
    both = torch.tensor([1] * 45 + [0] * 55)
    fit = fit_sts(torch.stack((first, second), 1), torch.stack((half, both), 1), grid=[1.0, 2.0, 4.0])
    assert fit.temperatures[0].item() == 4.0
    assert fit.temperatures[1].item() == 2.0  # 0.586 * 0.75 = 0.44, nearest to 0.45


def test_sts_is_no_worse_than_one_with_predecessors_held(generator):
    logits, accepted = overconfident(3_000, 6, generator, true_temperature=0.7)
    fit = fit_sts(logits, accepted)
    for k in range(6):
        held = fit.temperatures.clone()
        held[k] = 1.0
        at_one = expected_calibration_error(survival(logits, held)[:, k], accepted[:, k])
        assert fit.ece_after[k] <= at_one


def test_sts_ties_take_the_first_of_the_grid():
    logits = torch.tensor([[math.inf, 0.0], [-math.inf, 0.0]])  # no temperature changes anything
    accepted = torch.tensor([[1, 1], [0, 0]])
    for grid in (GRID, GRID[::-1]):
        fit = fit_sts(logits, accepted, grid=grid)
        assert fit.temperatures.tolist() == [grid[0], grid[0]]
    assert fit.ece_after[0].item() == 0.0


def test_sts_counts_saturated_confidence():
    """A confidence of exactly 1 that is wrong half the time must count, whichever bin it would fall out of."""
    logits = torch.full((10, 1), 200.0)
    fit = fit_sts(logits, torch.tensor([[1], [0]] * 5), grid=[1.0, 200.0, 4000.0])
    assert fit.temperatures.tolist() == [4000.0]
    assert fit.ece_before.tolist() == [0.5]


def test_sts_takes_any_accepted_dtype_stride_and_grid(generator):
    logits, accepted = overconfident(200, 3, generator)
    expected = fit_sts(logits, accepted, grid=GRID)
    for form in (accepted.int(), accepted.float(), accepted.t().contiguous().t()):
        fit = fit_sts(logits.t().contiguous().t(), form, grid=torch.tensor(GRID, dtype=torch.float64))
        assert torch.equal(fit.temperatures, expected.temperatures)
    half = fit_sts(logits.bfloat16().requires_grad_(), accepted, grid=GRID)
    assert torch.equal(half.temperatures, fit_sts(logits.bfloat16().float(), accepted, grid=GRID).temperatures)
    assert not half.ece_after.requires_grad


def test_the_default_grid_is_log_spaced_and_holds_one():
    grid = default_grid().double()
    assert (grid == 1).sum() == 1
    torch.testing.assert_close(grid.log().diff(), torch.full((96,), math.log(2) / 16).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("function", [expected_calibration_error, reliability_table, brier_score])
@pytest.mark.parametrize("bad", [-0.01, 1.01, math.nan, math.inf])
def test_probabilities_must_be_probabilities(function, bad):
    with pytest.raises(ValueError, match="probabilities: got a value outside"):
        function(torch.tensor([0.5, bad]), torch.tensor([0, 1]))


@pytest.mark.parametrize("function", [expected_calibration_error, reliability_table, brier_score, auroc])
def test_figures_name_the_bad_argument(function):
    name = "scores" if function is auroc else "probabilities"
    p, y = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    for arguments, error, text in (
        ((p[:0], y[:0]), ValueError, f"{name}: got no samples"),
        ((p, y[:1]), ValueError, "outcomes: got shape"),
        ((p, y + 1), ValueError, "outcomes: got values other than 0 and 1"),
        ((p, torch.tensor([0.0, math.nan])), ValueError, "outcomes: got values other than 0 and 1"),
        ((p, y.to("meta")), ValueError, "outcomes: got device meta"),
        ((p.long(), y), TypeError, f"{name}: got dtype int64"),
        ((p, y.to(torch.int8)), TypeError, "outcomes: got dtype int8"),
        (([0.5, 0.25], y), TypeError, f"{name}: got list"),
        ((p, [0, 1]), TypeError, "outcomes: got list"),
    ):
        with pytest.raises(error, match=text):
            function(*arguments)


def test_auroc_refuses_nan():
    with pytest.raises(ValueError, match="scores: got NaN"):
        auroc(torch.tensor([0.5, math.nan]), torch.tensor([0, 1]))


@pytest.mark.parametrize("num_bins", [0, -1, 2.0, True])
def test_num_bins_must_be_a_positive_int(num_bins):
    p, y = torch.tensor([[0.5]]), torch.tensor([[1]])
    for function in (expected_calibration_error, reliability_table, fit_sts):
        with pytest.raises(ValueError, match="num_bins: got"):
            function(p, y, num_bins=num_bins)


Z, A = torch.zeros(4, 2), torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("logits", "accepted", "grid", "error", "text"),
    [
        (Z[:0], A[:0], None, ValueError, "confidence_logits: got no samples"),
        (Z[0], A[0], None, ValueError, "confidence_logits: got shape"),
        (torch.zeros(4, 33), torch.zeros(4, 33), None, ValueError, "confidence_logits: gamma"),
        (Z.long(), A, None, TypeError, "confidence_logits: got dtype"),
        (Z * math.nan, A, None, ValueError, "confidence_logits: got NaN"),
        (Z, A[:3], None, ValueError, "accepted: got shape"),
        (Z, A.flip(1), None, ValueError, "accepted: got a row that rises"),
        (Z, A * 2, None, ValueError, "outcomes: got values other than 0 and 1"),
        (Z, A * 0.5, None, ValueError, "outcomes: got values other than 0 and 1"),
        (Z, A.tolist(), None, TypeError, "accepted: got list"),
        (Z, A, [], ValueError, "grid: got"),
        (Z, A, [1.0, 0.0], ValueError, "grid: got"),
        (Z, A, [1.0, math.inf], ValueError, "grid: got"),
        (Z, A, [math.nan], ValueError, "grid: got"),
        (Z, A, [[1.0]], ValueError, "grid: got"),
    ],
)
def test_sts_names_the_bad_argument(logits, accepted, grid, error, text):
    with pytest.raises(error, match=text):
        fit_sts(logits, accepted, grid=grid)


def test_auroc_takes_strided_scores():
    scores, outcomes = torch.tensor([[0.1, 9.0], [0.4, 9.0], [0.8, 9.0]])[:, 0], torch.tensor([0, 0, 1])
    assert auroc(scores, outcomes) == 1.0  # warnings are errors

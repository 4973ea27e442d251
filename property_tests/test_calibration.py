"""Laws of Sequential Temperature Scaling and of the calibration error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsspark
from dsspark.testing import oracles

GRID = [0.25, 0.5, 1.0, 2.0, 4.0]


@st.composite
def samples(draw):
    """Confidence logits [S, gamma] and what happened, from few values: bins are hit at their edges."""
    count, gamma = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    value = st.sampled_from([0.0, 2.0, -2.0, 0.5, 40.0, -40.0, 1.25])
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    logits = torch.tensor([[draw(value) for _ in range(gamma)] for _ in range(count)], dtype=dtype)
    accepted = [draw(st.integers(0, gamma)) for _ in range(count)]
    return logits, (torch.arange(gamma) < torch.tensor(accepted)[:, None]).to(torch.int64)


@given(data=samples(), num_bins=st.integers(1, 20))
def test_with_its_predecessors_held_no_position_ends_worse_than_at_temperature_one(backend, data, num_bins):
    logits, accepted = data
    fit = dsspark.fit_sts(logits, accepted, num_bins=num_bins, grid=GRID, backend=backend)
    for k in range(logits.shape[1]):
        held = fit.temperatures[: k + 1].clone()
        achieved = error_at(logits, accepted, held, num_bins, backend)
        held[k] = 1.0
        assert achieved <= error_at(logits, accepted, held, num_bins, backend) + 1e-6


def error_at(logits, accepted, temperatures, num_bins, backend):
    k = len(temperatures) - 1
    a = dsspark.survival(logits[:, : k + 1], temperatures, backend=backend)[:, k]
    return float(dsspark.expected_calibration_error(a, accepted[:, k], num_bins=num_bins, backend=backend))


@given(data=samples(), num_bins=st.integers(1, 20))
def test_no_temperature_of_the_grid_is_better_than_the_fitted_one(backend, data, num_bins):
    logits, accepted = data
    fit = dsspark.fit_sts(logits, accepted, num_bins=num_bins, grid=GRID, backend=backend)
    fitted = fit.temperatures.tolist()
    assert set(fitted) <= set(GRID)
    best = oracles.sts_by_brute_force(logits, accepted, num_bins, GRID, fitted)
    for k, (achieved, least) in enumerate(best):
        assert achieved <= least + 1e-6
        assert float(fit.ece_after[k]) == pytest.approx(achieved, abs=1e-6)


@given(data=samples(), order=st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(backend, data, order):
    logits, accepted = data
    shuffled = list(range(len(logits)))
    order.shuffle(shuffled)
    first = dsspark.fit_sts(logits, accepted, grid=GRID, backend=backend)
    second = dsspark.fit_sts(logits[shuffled], accepted[shuffled], grid=GRID, backend=backend)
    torch.testing.assert_close(first.ece_after, second.ece_after, atol=1e-6, rtol=0)


@pytest.fixture
def many_samples_a_program(backend, monkeypatch):
    """Take thousands of samples at once where the kernels are interpreted."""
    if backend == "triton":
        from dsspark.kernels import calibration
        from dsspark.kernels.launch import interpreted

        if interpreted(calibration.grid_kernel):
            monkeypatch.setattr(calibration, "choose_config", lambda: calibration.Config(block_s=1 << 15))


@settings(max_examples=5)
@given(seed=st.integers(0, 1000), planted=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=3))
@pytest.mark.usefixtures("many_samples_a_program")
def test_planted_temperatures_are_recovered(backend, seed, planted):
    """Outcomes drawn from sigmoid(z / T): enough samples name T."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20_000, len(planted), generator=generator) * 3 + 1
    truth = torch.sigmoid(logits / torch.tensor(planted))
    accepted = (torch.rand(truth.shape, generator=generator) < truth).to(torch.int64).cumprod(dim=1)
    fit = dsspark.fit_sts(logits, accepted, grid=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0], backend=backend)
    assert fit.temperatures.tolist() == planted
    assert (fit.ece_after < 0.02).all()


@st.composite
def predictions(draw):
    count = draw(st.integers(1, 30))
    value = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.25]), st.integers(0, 40).map(lambda n: n / 40))
    p = torch.tensor([draw(value) for _ in range(count)])
    return p, torch.tensor([draw(st.integers(0, 1)) for _ in range(count)])


@given(data=predictions(), num_bins=st.integers(1, 20))
def test_the_error_counts_every_probability_once(backend, data, num_bins):
    p, y = data
    bins = [min(int(x * num_bins), num_bins - 1) for x in p.tolist()]
    gaps = [sum(float(p[i] - y[i]) for i in range(len(p)) if bins[i] == b) for b in range(num_bins)]
    got = float(dsspark.expected_calibration_error(p, y, num_bins=num_bins, backend=backend))
    assert got == pytest.approx(sum(map(abs, gaps)) / len(p), abs=1e-6)
    assert 0 <= got <= 1


@given(data=predictions(), num_bins=st.integers(1, 20))
def test_certain_and_right_has_no_error_certain_and_wrong_has_all(backend, data, num_bins):
    _, y = data
    right = dsspark.expected_calibration_error(y.float(), y, num_bins=num_bins, backend=backend)
    assert right == 0
    if num_bins > 1:
        wrong = dsspark.expected_calibration_error(1 - y.float(), y, num_bins=num_bins, backend=backend)
        assert float(wrong) == pytest.approx(1.0, abs=1e-6)

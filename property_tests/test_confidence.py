"""Laws of confidence and survival."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import dsspark


@st.composite
def confidence_rows(draw):
    """z, [R, gamma]: plain, huge, infinite and tied logits."""
    requests, gamma = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    value = st.sampled_from([0.0, 1.0, -1.0, 2.5, -7.0, 30.0, -30.0, 200.0, -200.0, torch.inf, -torch.inf])
    rows = [[draw(value) for _ in range(gamma)] for _ in range(requests)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    return torch.tensor(rows).to(dtype)


@st.composite
def temperatures_for(draw, gamma):
    return torch.tensor([draw(st.sampled_from([1.0, 0.125, 0.5, 2.0, 8.0])) for _ in range(gamma)])


@given(logits=confidence_rows(), data=st.data())
def test_survival_is_a_probability_that_never_rises_along_a_row(backend, logits, data):
    temperatures = data.draw(temperatures_for(logits.shape[1]))
    a = dsspark.survival(logits, temperatures, backend=backend)
    assert a.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert ((a >= 0) & (a <= 1)).all()
    assert (a.diff(dim=1) <= 0).all()


@given(logits=confidence_rows(), data=st.data())
def test_survival_is_the_running_product_of_the_calibrated_confidences(backend, logits, data):
    temperatures = data.draw(temperatures_for(logits.shape[1]))
    exact = torch.sigmoid(logits.double() / temperatures.double()).cumprod(dim=1)
    a = dsspark.survival(logits, temperatures, backend=backend)
    torch.testing.assert_close(a.double(), exact, rtol=3e-5, atol=1e-37)


@given(logits=confidence_rows(), data=st.data())
def test_a_temperature_keeps_the_order_of_the_confidences(backend, logits, data):
    """sigmoid(z / T) is monotone in z, so calibrating the first position ranks requests as before."""
    temperature = data.draw(temperatures_for(1))
    before = dsspark.survival(logits[:, :1], backend=backend)[:, 0]
    after = dsspark.survival(logits[:, :1], temperature, backend=backend)[:, 0]
    order = logits[:, 0].float().argsort()
    assert (before[order].diff() >= 0).all()
    assert (after[order].diff() >= 0).all()


@given(logits=confidence_rows(), data=st.data())
def test_survival_of_a_prefix_does_not_look_ahead(backend, logits, data):
    k = data.draw(st.integers(1, logits.shape[1]))
    whole = dsspark.survival(logits, backend=backend)
    assert torch.equal(dsspark.survival(logits[:, :k], backend=backend), whole[:, :k])


@given(
    seed=st.integers(0, 1000),
    requests=st.integers(1, 4),
    gamma=st.integers(1, 5),
    rank=st.integers(0, 3),
    data=st.data(),
)
def test_a_confidence_reads_the_previous_token_and_nothing_later(backend, seed, requests, gamma, rank, data):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(requests, gamma, 3, generator=generator)
    w1 = torch.randn(8, rank, generator=generator) if rank else None
    weight = torch.randn(1, 3 + rank, generator=generator)
    previous = torch.randint(8, (requests, gamma), generator=generator)
    before = dsspark.confidence_logits(hidden, previous, w1, weight, backend=backend)
    k = data.draw(st.integers(0, gamma - 1))
    changed = previous.clone()
    changed[:, k] = (changed[:, k] + 1) % 8
    after = dsspark.confidence_logits(hidden, changed, w1, weight, backend=backend)
    same = torch.arange(gamma) != k
    assert torch.equal(after[:, same], before[:, same])
    assert torch.equal(after[:, k], before[:, k]) == (rank == 0)
    order = data.draw(st.permutations(range(requests)))
    shuffled = dsspark.confidence_logits(hidden[order], previous[order], w1, weight, backend=backend)
    torch.testing.assert_close(shuffled, before[order])

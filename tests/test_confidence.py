"""The confidence head and the survival of prefixes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dsspark import ConfidenceHead, confidence_logits, survival

R, GAMMA, D, RANK, V = 3, 4, 5, 2, 7


@pytest.fixture
def head_inputs(generator):
    def make(dtype=torch.float64):
        hidden, w1, weight, bias = (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in ((R, GAMMA, D), (V, RANK), (1, D + RANK), (1,))
        )
        tokens = torch.randint(V, (R, GAMMA), generator=generator)
        return hidden, tokens, w1, weight, bias

    return make


def by_hand(hidden, tokens, w1, weight, bias):
    """Evaluate eq. 7 one number at a time, [h ; e]."""
    w, b = weight.flatten().tolist(), 0.0 if bias is None else bias.item()
    out = torch.zeros(hidden.shape[:2], dtype=torch.float64)
    for r in range(hidden.shape[0]):
        for k in range(hidden.shape[1]):
            features = hidden[r, k].tolist() + ([] if w1 is None else w1[tokens[r, k]].tolist())
            out[r, k] = math.fsum(f * c for f, c in zip(features, w, strict=True)) + b
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_equal_eq_7(dtype, head_inputs):
    arguments = head_inputs(dtype)
    out = confidence_logits(*arguments)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = by_hand(*arguments)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6  # half-precision inputs are exact in float32
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_every_form_of_weight_bias_and_stride_gives_the_same(head_inputs):
    hidden, tokens, w1, weight, bias = head_inputs()
    expected = confidence_logits(hidden, tokens, w1, weight, bias)
    for form in (
        (hidden, tokens, w1, weight[0], bias[0]),
        (hidden, tokens.int(), w1, weight, bias),
        (hidden.transpose(0, 1).contiguous().transpose(0, 1), tokens.t().contiguous().t(), w1, weight, bias),
        (hidden, tokens, w1.t().contiguous().t(), torch.stack((weight, weight), dim=-1)[..., 0], bias),
    ):
        torch.testing.assert_close(confidence_logits(*form), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(confidence_logits(hidden, tokens, w1, weight), expected - bias, rtol=1e-13, atol=1e-13)


def test_a_head_without_markov_reads_hidden_alone(head_inputs):
    hidden, tokens, _, weight, bias = head_inputs()
    out = confidence_logits(hidden, tokens, None, weight[:, :D], bias)
    torch.testing.assert_close(out, by_hand(hidden, tokens, None, weight[:, :D], bias), rtol=1e-13, atol=1e-13)
    assert torch.equal(out, confidence_logits(hidden, tokens.flip(1), None, weight[:, :D], bias))


def test_position_k_reads_its_own_entry_of_previous_tokens_only(head_inputs):
    hidden, tokens, w1, weight, bias = head_inputs()
    out = confidence_logits(hidden, tokens, w1, weight, bias)
    for k in range(GAMMA):
        other = tokens.clone()
        other[1, k] = (other[1, k] + 1) % V
        moved = confidence_logits(hidden, other, w1, weight, bias) != out
        assert moved.nonzero().tolist() == [[1, k]]


def test_gradients_reach_every_input(head_inputs):
    hidden, tokens, w1, weight, bias = head_inputs()
    leaves = [tensor.requires_grad_() for tensor in (hidden, w1, weight, bias)]
    assert torch.autograd.gradcheck(lambda h, e, w, b: confidence_logits(h, tokens, e, w, b), leaves)
    assert torch.autograd.gradcheck(lambda h: survival(confidence_logits(h, tokens, w1, weight, bias)), [hidden])


def test_the_module_is_the_function(head_inputs):
    hidden, tokens, w1, _, _ = head_inputs()
    head = ConfidenceHead(D, RANK).double()
    expected = by_hand(hidden, tokens, w1, head.proj.weight.detach(), head.proj.bias.detach())
    torch.testing.assert_close(head(hidden, tokens, w1).detach(), expected, rtol=1e-13, atol=1e-13)


def test_no_requests(head_inputs):
    hidden, tokens, w1, weight, bias = head_inputs()
    assert confidence_logits(hidden[:0], tokens[:0], w1, weight, bias).shape == (0, GAMMA)
    assert survival(torch.zeros(0, GAMMA)).shape == (0, GAMMA)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("hidden", lambda h: h[0], ValueError),
        ("hidden", lambda h: h.long(), TypeError),
        ("hidden", lambda h: h.repeat(1, 9, 1), ValueError),
        ("previous_tokens", lambda t: t[:, :-1], ValueError),
        ("previous_tokens", lambda t: t.float(), TypeError),
        ("previous_tokens", lambda t: t * 0 - 1, ValueError),
        ("previous_tokens", lambda t: t * 0 + V, ValueError),
        ("previous_tokens", lambda t: t.to("meta"), ValueError),
        ("markov_w1", lambda w: w[0], ValueError),
        ("markov_w1", lambda w: w.long(), TypeError),
        ("weight", lambda w: w[:, :-1], ValueError),
        ("weight", lambda w: w.repeat(2, 1), ValueError),
        ("weight", lambda w: None, TypeError),
        ("weight", lambda w: w.long(), TypeError),
        ("bias", lambda b: b.repeat(2), ValueError),
        ("bias", lambda b: b.long(), TypeError),
    ],
)
def test_logits_name_the_bad_argument(name, change, error, head_inputs):
    names = ("hidden", "previous_tokens", "markov_w1", "weight", "bias")
    arguments = dict(zip(names, head_inputs(), strict=True))
    with pytest.raises(error, match=name):
        confidence_logits(**{**arguments, name: change(arguments[name])})
    with pytest.raises(ValueError, match="weight"):
        confidence_logits(**{**arguments, "markov_w1": None})


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 3.0, 0.125]])
def test_survival_is_the_running_product(temperatures, generator):
    logits = torch.randn(50, 4, generator=generator, dtype=torch.float64) * 4
    scale = None if temperatures is None else torch.tensor(temperatures)

    def prefix(row, k):
        pairs = zip(row[:k], (temperatures or [1.0] * 4)[:k], strict=True)
        return math.prod(1 / (1 + math.exp(-z / t)) for z, t in pairs)

    expected = torch.tensor([[prefix(row, k) for k in (1, 2, 3, 4)] for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(survival(logits, scale), expected, rtol=1e-13, atol=0)
    single = survival(logits.float(), scale)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=5e-6, atol=1e-12)


def test_survival_rounds_once_a_position_left_to_right(generator):
    """A scan in double precision, or one that re-associates, differs in the last bit on some of 20,000 rows."""
    logits = torch.randn(20_000, 7, generator=generator) + 2
    factors = torch.sigmoid(logits).numpy()
    product = factors[:, 0]
    for k in range(1, 7):
        product = np.multiply(product, factors[:, k], dtype=np.float32)
        assert np.array_equal(survival(logits)[:, k].numpy(), product)


def test_survival_never_rises_and_stays_in_range(generator):
    logits = torch.randn(5_000, 32, generator=generator) * 20
    logits[0] = math.inf
    logits[1] = -math.inf
    a = survival(logits)
    assert (a.diff(dim=1) <= 0).all()
    assert ((a >= 0) & (a <= 1)).all()
    assert a[0].tolist() == [1.0] * 32
    assert a[1].tolist() == [0.0] * 32


def test_survival_passes_nan_on():
    a = survival(torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, 0.0]]))
    assert a[0, 0] == 0.5
    assert a[0, 1:].isnan().all()
    assert a[1].tolist() == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_survival_of_half_precision_logits_is_float32(dtype, generator):
    logits = torch.randn(9, 4, generator=generator).to(dtype)
    assert torch.equal(survival(logits), survival(logits.float()))


@pytest.mark.parametrize(
    ("logits", "temperatures", "name", "error"),
    [
        (torch.zeros(3), None, "confidence_logits", ValueError),
        (torch.zeros(3, 0), None, "confidence_logits", ValueError),
        (torch.zeros(3, 33), None, "confidence_logits", ValueError),
        (torch.zeros(3, 2).long(), None, "confidence_logits", TypeError),
        ([[0.0]], None, "confidence_logits", TypeError),
        (torch.zeros(3, 2), torch.ones(3), "temperatures", ValueError),
        (torch.zeros(3, 2), torch.ones(2).long(), "temperatures", TypeError),
        (torch.zeros(3, 2), [1.0, 1.0], "temperatures", TypeError),
        (torch.zeros(3, 2), torch.tensor([1.0, 0.0]), "temperatures", ValueError),
        (torch.zeros(3, 2), torch.tensor([1.0, -1.0]), "temperatures", ValueError),
        (torch.zeros(3, 2), torch.tensor([1.0, math.inf]), "temperatures", ValueError),
        (torch.zeros(3, 2), torch.tensor([math.nan, 1.0]), "temperatures", ValueError),
        (torch.zeros(3, 2), torch.ones(2, device="meta"), "temperatures", ValueError),
    ],
)
def test_survival_names_the_bad_argument(logits, temperatures, name, error):
    with pytest.raises(error, match=name):
        survival(logits, temperatures)

"""The confidence kernels against the references and float64, in the interpreter; the same tests run compiled on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from recording import describes, record

from dsspark.kernels import confidence as kernels
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.kernels.elementwise import positions_tile
from dsspark.reference import confidence as reference

SMALL = kernels.Config(block_r=2, block_d=16, block_e=4, block_s=16)
CONFIGS = pytest.mark.parametrize("config", [None, SMALL], ids=["chosen", "small"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


@pytest.fixture
def inputs(generator, device):
    """Return a maker of (hidden, previous_tokens, markov_w1, weight, bias)."""

    def make(num_requests=3, gamma=7, d=37, rank=6, vocab_size=11, dtype=torch.float32):
        shapes = (num_requests, gamma, d), (vocab_size, rank), (1, d + rank), (1,)
        hidden, w1, weight, bias = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes)
        tokens = torch.randint(vocab_size, (num_requests, gamma), generator=generator).to(device)
        tokens.view(-1)[-1] = vocab_size - 1
        return hidden, tokens, w1, weight, bias

    return make


def rounding(hidden, tokens, w1, weight, bias):
    """Return how far float32 sums in any order may be from the exact logits."""
    magnitudes = reference.confidence_logits(
        *(t.abs().double() if t.is_floating_point() else t for t in (hidden, tokens, w1, weight, bias))
    )
    return magnitudes * 2.0**-20


SHAPES = [
    (3, 7, 37, 6, 11),
    (1, 1, 1, 1, 1),
    (2, 8, 64, 16, 37),
    (3, 9, 40, 5, 8193),
    (2, 32, 33, 3, 9),
    (1, 7, 1100, 300, 151_936),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_eq_7(shape, dtype, inputs):
    if shape[-1] == 151_936 and dtype != torch.bfloat16:
        pytest.skip("large")
    arguments = inputs(*shape, dtype=dtype)
    for config in (None, SMALL) if shape[2] < 1000 else (None,):
        logits = kernels.confidence_logits(*arguments, config=config)
        exact = reference.confidence_logits(*(t.double() if t.is_floating_point() else t for t in arguments))
        assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert ((logits - exact).abs() <= rounding(*arguments) * (2.0**-29 if dtype == torch.float64 else 1)).all()


def test_a_head_in_float32_on_a_half_precision_backbone(inputs):
    hidden, tokens, w1, weight, bias = inputs()
    arguments = hidden.bfloat16(), tokens, w1, weight, bias
    exact = reference.confidence_logits(hidden.bfloat16().double(), tokens, w1.double(), weight.double(), bias.double())
    assert ((kernels.confidence_logits(*arguments) - exact).abs() <= rounding(*arguments)).all()


@CONFIGS
def test_every_stride_gives_the_same_bits_and_padding_is_not_read(config, inputs, device):
    hidden, tokens, w1, weight, bias = inputs()
    expected = kernels.confidence_survival(hidden, tokens, w1, weight, bias, keep_logits=True, config=config)

    def padded(tensor):
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), math.inf, dtype=tensor.dtype, device=device)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    for form in (
        (padded(hidden), tokens, padded(w1), padded(weight), bias),
        (
            hidden.transpose(0, 2).contiguous().transpose(0, 2),
            tokens.int(),
            w1.t().contiguous().t(),
            weight[0],
            bias[0],
        ),
        (hidden, tokens.t().contiguous().t(), w1, torch.stack((weight, weight), dim=-1)[..., 0], bias[None]),
        (hidden.requires_grad_(), tokens, w1, weight, bias),
    ):
        found = kernels.confidence_survival(*form, keep_logits=True, config=config)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@CONFIGS
def test_position_k_reads_its_own_previous_token_and_survival_those_before(config, inputs):
    hidden, tokens, w1, weight, bias = inputs(num_requests=3, gamma=4)
    a, z = kernels.confidence_survival(hidden, tokens, w1, weight, bias, keep_logits=True, config=config)
    for k in range(4):
        other = tokens.clone()
        other[1, k] = (other[1, k] + 1) % 11
        changed = kernels.confidence_survival(hidden, other, w1, weight, bias, keep_logits=True, config=config)
        assert (changed[1] != z).nonzero().tolist() == [[1, k]]
        assert (changed[0] != a).nonzero().tolist() == [[1, later] for later in range(k, 4)]


@pytest.mark.parametrize("absent", ["nothing", "w1", "bias", "temperatures", "all"])
@CONFIGS
def test_the_fused_form_is_the_two_functions(absent, config, inputs, device):
    hidden, tokens, w1, weight, bias = inputs()
    if absent in ("w1", "all"):
        w1, weight = None, weight[:, :37]
    bias = None if absent in ("bias", "all") else bias
    temperatures = None if absent in ("temperatures", "all") else torch.linspace(0.5, 2, 7, device=device)
    logits = kernels.confidence_logits(hidden, tokens, w1, weight, bias, config=config)
    a = kernels.survival(logits, temperatures, config=config)
    both = kernels.confidence_survival(hidden, tokens, w1, weight, bias, temperatures, keep_logits=True, config=config)
    assert torch.equal(both[0], a)
    assert torch.equal(both[1], logits)
    alone = kernels.confidence_survival(hidden, tokens, w1, weight, bias, temperatures, config=config)
    assert torch.equal(alone[0], a)
    assert alone[1] is None
    expected = reference.confidence_survival(hidden, tokens, w1, weight, bias, temperatures, keep_logits=True)
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gamma", [1, 7, 9, 32])
def test_survival_is_the_references(dtype, gamma, generator, device):
    logits = (torch.randn(37, gamma, generator=generator) * 3 + 2).to(device, dtype)
    temperatures = torch.rand(gamma, generator=generator).to(device) * 3 + 0.25
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    for scale, config in (
        (None, None),
        (temperatures, SMALL),
        (torch.stack((temperatures, temperatures), dim=1)[:, 0], None),
    ):
        a = kernels.survival(logits, scale, config=config)
        expected = reference.survival(logits, scale)
        assert a.dtype == expected.dtype
        torch.testing.assert_close(a, expected, rtol=6 * gamma * unit, atol=1e-30)
    assert torch.equal(
        kernels.survival(logits.t().contiguous().t(), temperatures), kernels.survival(logits, temperatures)
    )


def test_survival_rounds_once_a_position_left_to_right(generator, device):
    """A product that re-associates, or in higher precision, differs in the last bit on some of 500 rows."""
    logits = (torch.randn(500, 7, generator=generator) + 2).to(device)
    temperatures = torch.linspace(0.5, 2, 7, device=device)
    a = kernels.survival(logits, temperatures).cpu().numpy()
    product = np.ones(500, dtype=np.float32)
    for k in range(7):
        each = kernels.survival(logits[:, k : k + 1], temperatures[k : k + 1]).cpu().numpy()[:, 0]
        product = np.multiply(product, each, dtype=np.float32)
        assert np.array_equal(a[:, k], product)


@CONFIGS
def test_survival_never_rises_stays_in_range_and_passes_nan_on(config, generator, device):
    logits = torch.randn(20, 32, generator=generator) * 20
    logits[0], logits[1], logits[2], logits[3] = math.inf, -math.inf, -100.0, 1e30
    logits[4, 5] = math.nan
    a = kernels.survival(logits.to(device), config=config).cpu()
    assert a[0].tolist() == a[3].tolist() == [1.0] * 32
    assert a[1].tolist() == a[2].tolist() == [0.0] * 32
    assert a[4, 5:].isnan().all()
    a[4] = a[5]
    assert (a.diff(dim=1) <= 0).all()
    assert ((a >= 0) & (a <= 1)).all()


def test_a_token_or_temperature_that_only_the_device_can_see_is_wrong_makes_nan(monkeypatch, inputs, device):
    for name in ("check_confidence_arguments", "check_temperatures", "check_survival_arguments"):
        monkeypatch.setattr(kernels, name, lambda *arguments: None)
    hidden, tokens, w1, weight, bias = inputs(num_requests=3, gamma=4)
    a, z = kernels.confidence_survival(hidden, tokens, w1, weight, bias, keep_logits=True)
    bad = tokens.clone()
    bad[0, 2], bad[1, 0], bad[2, 3] = -1, 11, 2**40
    a_bad, z_bad = kernels.confidence_survival(hidden, bad, w1, weight, bias, keep_logits=True)
    assert z_bad.isnan().nonzero().tolist() == [[0, 2], [1, 0], [2, 3]]
    assert torch.equal(z_bad.nan_to_num(nan=7.0) == 7.0, z_bad.isnan())
    assert torch.equal(a_bad[0, :2], a[0, :2])
    assert a_bad[1].isnan().all()
    for value in (0.0, -1.0, math.inf, math.nan):
        temperatures = torch.tensor([1.0, value, 1.0, 1.0], device=device)
        scaled = kernels.survival(z, temperatures)
        assert torch.equal(scaled[:, 0], a[:, 0])
        assert scaled[:, 1:].isnan().all()


def test_no_requests(inputs):
    hidden, tokens, w1, weight, bias = inputs()
    a, z = kernels.confidence_survival(hidden[:0], tokens[:0], w1, weight, bias, keep_logits=True)
    assert a.shape == z.shape == kernels.survival(z).shape == (0, 7)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hidden", lambda h: h[0]),
        ("hidden", lambda h: h.long()),
        ("previous_tokens", lambda t: t - 12),
        ("previous_tokens", lambda t: t.float()),
        ("markov_w1", lambda w: w[0]),
        ("weight", lambda w: w[:, :-1]),
        ("bias", lambda b: b.repeat(2)),
        ("temperatures", lambda _: torch.zeros(7)),
        ("temperatures", lambda _: torch.ones(6)),
    ],
)
def test_errors_are_the_references(name, change, inputs, device):
    if device != "cpu":
        pytest.skip("on the CPU the host sees the values too")
    names = ("hidden", "previous_tokens", "markov_w1", "weight", "bias", "temperatures")
    arguments = dict(zip(names, (*inputs(), torch.ones(7)), strict=True))
    arguments[name] = change(arguments[name])
    with pytest.raises((ValueError, TypeError), match=name) as expected:
        reference.confidence_survival(**arguments)
    with pytest.raises(expected.type) as found:
        kernels.confidence_survival(**arguments)
    assert str(found.value) == str(expected.value)
    if name == "temperatures":
        with pytest.raises(expected.type, match=name):
            kernels.survival(torch.zeros(3, 7), arguments[name])


def test_one_launch_that_a_listed_variant_describes(monkeypatch, inputs, device):
    launches = record(monkeypatch, kernels)
    variants = kernels.variants()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for gamma in (7, 32):
            hidden, tokens, w1, weight, bias = inputs(1, gamma, 16, 16, 4, dtype)
            temperatures = torch.ones(gamma, device=device)
            kernels.confidence_survival(hidden, tokens, w1, weight, bias, temperatures, keep_logits=True)
            kernels.survival(hidden[..., 0].contiguous(), temperatures)
            kernels.survival(hidden[..., 0].contiguous())
        hidden, tokens, w1, weight, bias = inputs(1, 7, 16, 16, 4, dtype)
        temperatures = torch.ones(7, device=device)
        kernels.confidence_survival(hidden, tokens, w1, weight, bias, temperatures)
        kernels.confidence_survival(hidden, tokens, None, weight[:, :16])
    assert len(launches) == 3 * (2 * 3 + 2)
    for launch in launches:
        assert any(describes(variant, launch) for variant in variants), launch


def test_the_head_tile_is_16_kib():
    for gamma in (1, 7, 8, 9, 32):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            config = kernels.choose_config(gamma, dtype)
            assert config.block_r * positions_tile(gamma) * config.block_d * dtype.itemsize == 16_384
            assert positions_tile(gamma) >= gamma


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_every_kernel_compiles_for_sm_90():
    for report in compile_variants(one_per_kernel(kernels.variants()), "sm_90", jobs=1):
        assert report.problems == (), report

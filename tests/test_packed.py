"""Packed linear layers: the same numbers up to rounding, and never stale ones."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsspark.models.packed import PackedLinear, pack_linears


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return pack_linears(nn.Linear(96, 80).requires_grad_(False))


@pytest.fixture
def packed_products(monkeypatch):
    """Count the products with a packed weight."""
    real, seen = torch.ops.mkldnn._linear_pointwise, []

    def counted(*args):
        seen.append(args[0].shape)
        return real(*args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return seen


@pytest.mark.parametrize("shape", [(1, 96), (4, 96), (2, 3, 96), (300, 96), (0, 96)])
def test_equals_linear_up_to_rounding(layer, packed_products, shape):
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    assert packed_products == [shape]


def test_no_bias_and_strided_input():
    plain = nn.Linear(96, 80, bias=False).requires_grad_(False)
    x = torch.randn(96, 5).T
    want = plain(x)
    torch.testing.assert_close(pack_linears(plain)(x), want, rtol=1e-5, atol=1e-5)


def test_a_weight_that_was_written_to_is_packed_again(layer):
    x = torch.randn(4, 96)
    layer(x)
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    layer.load_state_dict({"weight": torch.ones(80, 96), "bias": torch.zeros(80)})
    torch.testing.assert_close(layer(x), x.sum(dim=1, keepdim=True).expand(4, 80), rtol=1e-4, atol=1e-4)
    layer.weight = nn.Parameter(torch.zeros(80, 96), requires_grad=False)
    assert layer(x).abs().max() == 0


def test_gradients_and_other_types_take_the_plain_path(layer, packed_products):
    x = torch.randn(4, 96, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(dim=0).expand(4, 96))
    layer.bias.requires_grad_(True)
    layer(torch.randn(4, 96)).sum().backward()
    assert layer.bias.grad.tolist() == [4.0] * 80
    layer.bias.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 96)).dtype == torch.bfloat16
    with torch.inference_mode():
        made = pack_linears(nn.Linear(96, 80).requires_grad_(False))
        torch.testing.assert_close(made(x), F.linear(x, made.weight, made.bias))
    assert layer.double()(torch.randn(4, 96, dtype=torch.float64)).dtype == torch.float64
    assert packed_products == []


def test_coarse_products_take_the_plain_path_and_leave_exact_ones_alone(layer, packed_products):
    x = torch.randn(5, 96)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not packed_products
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    assert packed_products == [(5, 96)]


def test_copies_and_state_are_those_of_a_linear_layer(layer):
    x = torch.randn(4, 96)
    want = layer(x)
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert torch.equal(copy.deepcopy(layer)(x), want)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), want)


def test_all_linear_layers_of_a_model_and_no_others():
    class Odd(nn.Linear):
        pass

    model = pack_linears(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), Odd(4, 4)))
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [
        PackedLinear,
        PackedLinear,
        Odd,
    ]


def test_nothing_changes_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert type(pack_linears(nn.Linear(4, 4))) is nn.Linear

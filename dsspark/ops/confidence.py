"""`confidence_logits` and `survival` as operators, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsspark.numerics import compute_dtype
from dsspark.ops.common import eager


@torch.library.custom_op("dsspark::confidence_logits", mutates_args=())
def _confidence_logits_op(
    hidden: Tensor, previous_tokens: Tensor, markov_w1: Tensor | None, weight: Tensor, bias: Tensor | None, backend: str
) -> Tensor:
    logits: Tensor = eager("confidence_logits")(hidden, previous_tokens, markov_w1, weight, bias, backend=backend)
    return logits


@_confidence_logits_op.register_fake
def _(hidden, previous_tokens, markov_w1, weight, bias, backend):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape[:2], dtype=compute_dtype(hidden))


def _keep_head_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, previous_tokens, markov_w1, weight, bias, _ = inputs
    ctx.save_for_backward(hidden, previous_tokens, markov_w1, weight)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)


def _confidence_logits_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """z = w^T [h ; e] + b: the gradients of a linear layer, and W1's rows gathered back."""
    hidden, previous_tokens, markov_w1, weight = ctx.saved_tensors
    w = weight.reshape(-1).to(grad.dtype)
    size = hidden.shape[2]
    grad_hidden = (grad[..., None] * w[:size]).to(hidden.dtype)
    grad_weight = torch.einsum("rk,rkd->d", grad, hidden.to(grad.dtype))
    grad_w1 = None
    if markov_w1 is not None:
        tokens = previous_tokens.reshape(-1).to(torch.int64)
        rows = grad.reshape(-1, 1) * w[size:]
        grad_w1 = rows.new_zeros(markov_w1.shape).index_add(0, tokens, rows).to(markov_w1.dtype)
        embedding = markov_w1[tokens].to(grad.dtype)
        grad_weight = torch.cat((grad_weight, (grad.reshape(-1, 1) * embedding).sum(dim=0)))
    grad_bias = None
    if ctx.bias is not None:
        shape, dtype = ctx.bias
        grad_bias = grad.sum().reshape(shape).to(dtype)
    return grad_hidden, None, grad_w1, grad_weight.reshape(weight.shape).to(weight.dtype), grad_bias, None


_confidence_logits_op.register_autograd(_confidence_logits_backward, setup_context=_keep_head_inputs)


def confidence_logits(
    hidden: Tensor,
    previous_tokens: Tensor,
    markov_w1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str,
) -> Tensor:
    """Traceable form of `dsspark.confidence_logits`."""
    result: Tensor = _confidence_logits_op(hidden, previous_tokens, markov_w1, weight, bias, backend)
    return result


@torch.library.custom_op("dsspark::survival", mutates_args=())
def _survival_op(confidence_logits: Tensor, temperatures: Tensor | None, backend: str) -> Tensor:
    result: Tensor = eager("survival")(confidence_logits, temperatures, backend=backend)
    return result


@_survival_op.register_fake
def _(confidence_logits, temperatures, backend):  # type: ignore[no-untyped-def]
    return confidence_logits.new_empty(confidence_logits.shape, dtype=compute_dtype(confidence_logits))


def _keep_survival(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output)


def _survival_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """da_k / dz_i = a_k (1 - sigmoid(z_i / T_i)) / T_i for i <= k."""
    logits, temperatures, survival = ctx.saved_tensors
    z = logits.to(survival.dtype)
    t = torch.ones_like(z[0]) if temperatures is None else temperatures.to(z.dtype)
    behind = (grad * survival).flip(1).cumsum(dim=1).flip(1)
    scaled = behind * torch.sigmoid(-z / t)
    grad_temperatures = None
    if temperatures is not None:
        grad_temperatures = (-scaled * z / (t * t)).sum(dim=0).to(temperatures.dtype)
    return (scaled / t).to(logits.dtype), grad_temperatures, None


_survival_op.register_autograd(_survival_backward, setup_context=_keep_survival)


def survival(confidence_logits: Tensor, temperatures: Tensor | None = None, *, backend: str) -> Tensor:
    """Traceable form of `dsspark.survival`."""
    result: Tensor = _survival_op(confidence_logits, temperatures, backend)
    return result

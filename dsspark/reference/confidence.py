r"""How likely each drafted token is to survive verification (paper 3.2.1, eq. 7).

$$c_k = \sigma(w^\top [h_k ; W_1[x_{k-1}]] + b), \qquad a_k = \prod_{i \le k} \sigma(z_i / T_i)$$

c_k is the probability that x_k is accepted given that all before it were; a_k the probability that the prefix
x_1..x_k is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark._checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_block_size,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
)
from dsspark.numerics import compute_dtype


def confidence_logits(
    hidden: Tensor,
    previous_tokens: Tensor,
    markov_w1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    r"""Return the confidence head's logits z (paper eq. 7).

    $z_k = w^\top [h_k ; W_1[x_{k-1}]] + b$

    Args:
        hidden: h, [R, gamma, d] float.
        previous_tokens: x_{k-1}, [R, gamma] int64 or int32 target ids: [r, 0] is the anchor, [r, k] the token sampled
            at position k - 1. Never x_k itself: that would leak the draw into the decision whether to verify it.
        markov_w1: W1, [V, r] float, or None for a head that reads h alone (r = 0).
        weight: w, [1, d + r] or [d + r] float, in the order [h ; e].
        bias: b, one float entry (scalar, [1]), or None.

    Returns:
        [R, gamma] float32 (float64 for float64 `hidden`). Differentiable in hidden, markov_w1, weight and bias.

    Raises:
        ValueError: for shapes or devices that do not belong together; on the CPU also for a token outside 0..V - 1.
        TypeError: for dtypes that are not listed.

    Numerics: products and sums in float32, whatever the inputs' dtypes.
    Cost: reads h once and one row of W1 a position.
    Source: paper 3.2.1, eq. 7; input order as in the public checkpoints.

    Example:
        >>> import torch
        >>> hidden, w1 = torch.ones(1, 2, 1), torch.tensor([[0.0], [5.0]])
        >>> confidence_logits(hidden, torch.tensor([[0, 1]]), w1, torch.tensor([2.0, 1.0])).tolist()
        [[2.0, 7.0]]
    """
    _check_head(hidden, previous_tokens, markov_w1, weight, bias)
    dtype = compute_dtype(hidden)
    w_hidden, w_embedding = weight.flatten().to(dtype).tensor_split([hidden.shape[2]])
    logits = hidden.to(dtype) @ w_hidden
    if markov_w1 is not None:
        logits = logits + markov_w1[previous_tokens].to(dtype) @ w_embedding
    return logits if bias is None else logits + bias.to(dtype).reshape(())


def _check_head(
    hidden: Tensor, previous_tokens: Tensor, markov_w1: Tensor | None, weight: Tensor, bias: Tensor | None
) -> None:
    """Raise for shapes, dtypes and devices that do not belong together, and for ids that the host sees out of range."""
    check_shape("hidden", hidden, ("R", "gamma", "d"))
    check_dtype("hidden", hidden, FLOAT_DTYPES)
    check_block_size("hidden: gamma", hidden.shape[1])
    check_shape("previous_tokens", previous_tokens, tuple(hidden.shape[:2]))
    check_dtype("previous_tokens", previous_tokens, INT_DTYPES)
    check_device("previous_tokens", previous_tokens, "hidden", hidden)
    check_tensor("weight", weight)
    for name, tensor in (("markov_w1", markov_w1), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dtype(name, tensor, FLOAT_DTYPES)
            check_device(name, tensor, "hidden", hidden)
    rank = 0
    if markov_w1 is not None:
        check_shape("markov_w1", markov_w1, ("V", "r"))
        vocab_size, rank = markov_w1.shape
        if hidden.device.type == "cpu" and previous_tokens.numel():
            low, high = (int(bound) for bound in previous_tokens.aminmax())
            if low < 0 or high >= vocab_size:  # -1 would silently read the last row
                raise ValueError(
                    f"previous_tokens: got ids in [{low}, {high}], expected target ids in 0..{vocab_size - 1}; "
                    "pass the anchor and the sampled tokens, not placeholders"
                )
    check_shape("weight", weight[None] if weight.dim() == 1 else weight, (1, hidden.shape[2] + rank))
    if bias is not None and bias.numel() != 1:
        raise ValueError(f"bias: got shape {list(bias.shape)}, expected [1]; a confidence head has one output")


def survival(confidence_logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    r"""Return the probability that each prefix survives (paper 3.2.1).

    $a_k = \prod_{i \le k} \sigma(z_i / T_i)$

    Args:
        confidence_logits: z, [R, gamma] float; -inf and +inf are certainty.
        temperatures: T, [gamma] float, positive: `STSFit.temperatures`; 1 everywhere if None.

    Returns:
        a, [R, gamma] float32 (float64 for float64 logits), never increasing along a row. A NaN logit makes its
        position and all after it NaN, which the scheduler counts as 0.

    Raises:
        ValueError: for shapes or devices that do not belong together; on the CPU also for a temperature that is not
            positive and finite.
        TypeError: for dtypes that are not listed.

    Numerics: one rounded float32 product a position, left to right: a scan that re-associates could make a row
        increase, and calibration must see the very numbers that the scheduler sees.
    Cost: R gamma sigmoids.
    Source: paper 3.2.1.

    Example:
        >>> import torch
        >>> survival(torch.zeros(1, 3)).tolist()
        [[0.5, 0.25, 0.125]]
    """
    check_shape("confidence_logits", confidence_logits, ("R", "gamma"))
    check_dtype("confidence_logits", confidence_logits, FLOAT_DTYPES)
    block_size = confidence_logits.shape[1]
    check_block_size("confidence_logits: gamma", block_size)
    logits = confidence_logits.to(compute_dtype(confidence_logits))
    if temperatures is not None:
        _check_temperatures(temperatures, confidence_logits)
        logits = logits / temperatures.to(logits.dtype)
    conditional = torch.sigmoid(logits)
    prefix = [conditional[:, 0]]
    for k in range(1, block_size):
        prefix.append(prefix[-1] * conditional[:, k])
    return torch.stack(prefix, dim=1)


def _check_temperatures(temperatures: Tensor, confidence_logits: Tensor) -> None:
    check_shape("temperatures", temperatures, (confidence_logits.shape[1],))
    check_dtype("temperatures", temperatures, FLOAT_DTYPES)
    check_device("temperatures", temperatures, "confidence_logits", confidence_logits)
    if temperatures.device.type == "cpu" and not bool(((temperatures > 0) & temperatures.isfinite()).all()):
        raise ValueError(
            f"temperatures: got {temperatures.tolist()}, expected positive finite numbers; "
            "fit them with fit_sts or pass None"
        )

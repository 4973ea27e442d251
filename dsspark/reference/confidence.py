r"""How likely each drafted token is to survive verification (paper 3.2.1, eq. 7).

$$c_k = \sigma(w^\top [h_k ; W_1[x_{k-1}]] + b), \qquad a_k = \prod_{i \le k} \sigma(z_i / T_i)$$

c_k is the probability that x_k is accepted given that all before it were; a_k the probability that the prefix
x_1..x_k is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark.contracts import check_confidence_arguments, check_survival_arguments
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
    check_confidence_arguments(hidden, previous_tokens, markov_w1, weight, bias)
    dtype = compute_dtype(hidden)
    w_hidden, w_embedding = weight.flatten().to(dtype).tensor_split([hidden.shape[2]])
    logits = hidden.to(dtype) @ w_hidden
    if markov_w1 is not None:
        logits = logits + markov_w1[previous_tokens].to(dtype) @ w_embedding
    return logits if bias is None else logits + bias.to(dtype).reshape(())


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
    check_survival_arguments(confidence_logits, temperatures)
    logits = confidence_logits.to(compute_dtype(confidence_logits))
    if temperatures is not None:
        logits = logits / temperatures.to(logits.dtype)
    conditional = torch.sigmoid(logits)
    prefix = [conditional[:, 0]]
    for k in range(1, conditional.shape[1]):
        prefix.append(prefix[-1] * conditional[:, k])
    return torch.stack(prefix, dim=1)


def confidence_survival(
    hidden: Tensor,
    previous_tokens: Tensor,
    markov_w1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    *,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""Return the survival of each prefix straight from the confidence head's inputs (paper eq. 7 and 3.2.1).

    $a_k = \prod_{i \le k} \sigma\big((w^\top [h_i ; W_1[x_{i-1}]] + b) / T_i\big)$: `survival` of `confidence_logits`, whose
    fused form is one launch.

    Args:
        hidden, previous_tokens, markov_w1, weight, bias: as `confidence_logits`.
        temperatures: as `survival`.
        keep_logits: whether the logits are wanted too: a calibration set needs them.

    Returns:
        a, [R, gamma] float32 (float64 for float64 `hidden`), and z of the same shape and dtype, or None.

    Raises:
        ValueError, TypeError: as `confidence_logits` and `survival`.

    Numerics: as `confidence_logits` and `survival`.
    Source: paper 3.2.1, eq. 7.

    Example:
        >>> import torch
        >>> hidden, w1 = torch.zeros(1, 2, 1), torch.zeros(2, 1)
        >>> a, logits = confidence_survival(hidden, torch.tensor([[0, 1]]), w1, torch.ones(2))
        >>> a.tolist(), logits
        ([[0.5, 0.25]], None)
    """
    logits = confidence_logits(hidden, previous_tokens, markov_w1, weight, bias)
    return survival(logits, temperatures), logits if keep_logits else None

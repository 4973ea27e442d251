r"""How many drafts of each request to verify: Algorithm 1, and its production form (paper 3.2.2 and 5.2).

Verifying l_r drafts of each request r costs $B = \sum_r (1 + l_r)$ batch tokens and is expected to emit
$\tau = \sum_r (1 + \sum_{j \le l_r} a_{r,j})$, at $\mathrm{SPS}(B)$ steps per second:

$$\Theta = \tau \cdot \mathrm{SPS}(B)$$

Whether x_{r,j} is verified may depend only on what is known before x_{r,j} is drawn, jointly over requests.
Everything here ranks the candidates (r, j) in one order: survival descending, then position, then request. Since
survival never rises along a row, (r, j) always stands before (r, j + 1): what follows the first draft left out of a
request cannot matter.
"""

from __future__ import annotations

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from dsspark.contracts import check_budget_arguments, check_search_arguments
from dsspark.cost_table import CostTable
from dsspark.numerics import compute_dtype


def schedule(survival: Tensor, cost_table: CostTable, *, max_tokens: int | None = None) -> Tensor:
    r"""Choose the draft lengths of a step by greedy admission with early stopping (paper Algorithm 1).

    Candidates are admitted in order for as long as each one strictly raises $\Theta = \tau \cdot \mathrm{SPS}(B)$;
    the first that does not ends the search, even where a later one would pay again. That is what keeps it lossless
    (paper Appendix A).

    Args:
        survival: a, [R, gamma] float: the probability that drafts 1..j of request r are all accepted.
        cost_table: SPS, on the device of `survival`.
        max_tokens: the largest B, anchors included; the table's own limit if None or larger.

    Returns:
        lengths, [R] int32, each in 0..gamma.

    Raises:
        ValueError: for a wrong shape or device, or R above max_tokens or above the table.
        TypeError: for a dtype that is not listed.

    Numerics: tau and Theta in float64. A NaN counts as 0, values are clamped to [0, 1], and a row that rises is
        replaced by its running minimum. Only candidates with a > 0 are admitted. Ties: position, then request.
    Cost: one sort of R gamma values; no host synchronisation.
    Source: paper 3.2.2, Algorithm 1.

    Example:
        >>> import torch
        >>> table = CostTable([1.0, 1.0, 0.5, 0.45])  # Appendix A
        >>> schedule(torch.tensor([[0.8, 0.72]]), table).tolist()
        [0]
    """
    candidates, ranked, theta = _throughput(survival, cost_table, max_tokens)
    rises = (theta[1:] > theta[:-1]) & (ranked[: len(theta) - 1] > 0)
    return _first(rises.to(torch.int32).cumprod(dim=0).sum(), candidates, ranked)


def plan_budget(survival: Tensor, cost_table: CostTable, *, max_tokens: int | None = None) -> Tensor:
    r"""Choose how many drafts a step verifies in total, by global search over *stale* survivals (paper 5.2).

    $K^* = \arg\max_K (R + \sum_{i \le K} a_{(i)}) \cdot \mathrm{SPS}(R + K)$, with $a_{(i)}$ the i-th largest survival.

    Real SPS is a staircase on which `schedule` stops too early; this search does not. It is lossless only if
    `survival` tells nothing of the tokens whose admission it decides: pass survivals of earlier steps (see
    `DelayedScheduler`), never the current.

    Args:
        survival: a, [R, gamma] float, of at least one step ago.
        cost_table: SPS, on the device of `survival`.
        max_tokens: the largest B, anchors included; the table's own limit if None or larger.

    Returns:
        K, an int32 scalar tensor in 0..R gamma. Ties take the smallest.

    Raises:
        ValueError: for a wrong shape or device, or R above max_tokens or above the table.
        TypeError: for a dtype that is not listed.

    Numerics: as `schedule`; K never counts a candidate with a = 0.
    Cost: one sort of R gamma keys; no host synchronisation.
    Source: paper 5.2.

    Example:
        >>> import torch
        >>> stairs = CostTable.from_points([1, 3], [1.0, 1.2])
        >>> stale = torch.tensor([[0.15, 0.1]])
        >>> plan_budget(stale, stairs).item(), schedule(stale, stairs).tolist()
        (2, [0])
    """
    _, ranked, theta = _throughput(survival, cost_table, max_tokens)
    admissible = torch.where(ranked[: len(theta) - 1] > 0, theta[1:], -torch.inf)
    return torch.cat((theta[:1], admissible)).argmax().to(torch.int32)


def admit(survival: Tensor, budget: int | Tensor) -> Tensor:
    """Admit the `budget` candidates of largest current survival (paper 5.2).

    Args:
        survival: a, [R, gamma] float, of the current step.
        budget: K >= 0: an int, or the integer scalar tensor of `plan_budget`, which must know nothing of the current
            tokens.

    Returns:
        lengths, [R] int32, each in 0..gamma; they sum to min(K, candidates with a > 0).

    Raises:
        ValueError: for a wrong shape or device, or a budget below 0 that the host can read.
        TypeError: for dtypes that are not listed.

    Numerics: comparisons only; NaN, range and ties as `schedule`.
    Cost: one sort of R gamma values; no host synchronisation.
    Source: paper 5.2.

    Example:
        >>> import torch
        >>> admit(torch.tensor([[0.9, 0.5], [0.8, 0.6]]), 3).tolist()
        [1, 2]
    """
    check_budget_arguments(survival, budget)
    candidates = _candidates(survival)
    ranked = _ranked(candidates)
    count = (
        (ranked > 0).sum().clamp(max=budget) if isinstance(budget, int) else torch.minimum((ranked > 0).sum(), budget)
    )
    return _first(count, candidates, ranked)


def _candidates(survival: Tensor) -> Tensor:
    """Return survivals in [0, 1] that never rise along a row, whatever they were, [gamma, R]: what is admitted is then prefixes."""
    finite = survival.detach().to(compute_dtype(survival)).nan_to_num(nan=0.0).clamp(0.0, 1.0)
    return rearrange(finite.cummin(dim=1).values, "r k -> k r")


def _ranked(candidates: Tensor) -> Tensor:
    """Return the survivals in order of admission, [gamma * R]. Equal ones need no order yet: only their number counts.

    On a processor numpy sorts them: without indices to carry along it takes a tenth of torch's time.
    """
    flat = rearrange(candidates, "k r -> (k r)")
    if flat.device.type == "cpu":
        return torch.from_numpy(np.sort(flat.numpy())).flip(0)
    return flat.sort(descending=True).values


def _throughput(survival: Tensor, cost_table: CostTable, max_tokens: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidates, their survivals ranked, and Theta_0..Theta_M in float64, with M of them within the limit."""
    fitting = check_search_arguments(survival, cost_table, max_tokens)
    candidates, num_requests = _candidates(survival), survival.shape[0]
    ranked = _ranked(candidates)
    admitted = ranked[:fitting].to(torch.float64)
    tau = num_requests + torch.cat((admitted.new_zeros(1), admitted.cumsum(dim=0)))
    return candidates, ranked, tau * cost_table.sps[num_requests : num_requests + fitting + 1]


def _first(count: Tensor, candidates: Tensor, ranked: Tensor) -> Tensor:
    """Return how many of the first `count` candidates belong to each request, [R] int32.

    They are those above the last one's survival, and of those equal to it the first by (position, request) until `count` is full.
    """
    if ranked.numel() == 0:
        return torch.zeros(candidates.shape[1], dtype=torch.int32, device=candidates.device)
    last = ranked.gather(0, (count - 1).clamp(min=0)[None])
    above, equal = candidates > last, candidates == last
    place = rearrange(rearrange(equal, "k r -> (k r)").cumsum(dim=0), "(k r) -> k r", r=candidates.shape[1])
    admitted = above | (equal & (place <= count - above.sum()))
    return admitted.sum(dim=0, dtype=torch.int32)

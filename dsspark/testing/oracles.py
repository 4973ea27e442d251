"""The laws that rows of logits stand for, in float64, written independently of the library's own float32 path."""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark.models.heads import MarkovHead
from dsspark.types import Filters


def exact_law_of_row(row: Tensor, temperature: float = 1.0, filters: Filters | None = None) -> Tensor:
    """Return the tempered, filtered law of one row of logits, [V] float64.

    Args:
        row: [V] floats.
        temperature: T >= 0; 0 is the one-hot of the argmax, the lowest index on ties.
        filters: scalars; temperature first, then top-k (ties: lowest ids), top-p over the survivors, min-p.

    Raises:
        ValueError: for a row that is no distribution.
    """
    x = row.detach().to(torch.float64)
    top = float(x.max())
    if not -float("inf") < top < float("inf"):
        raise ValueError(f"row: got a largest logit of {top}, expected a distribution (no NaN or +inf, not all -inf)")
    if temperature == 0:
        return (torch.arange(len(x)) == x.argmax()).to(torch.float64)
    law = torch.exp((x - top) / temperature)
    if filters is not None:
        order = torch.sort(x, descending=True, stable=True).indices
        kept = order[: int(filters.top_k)] if filters.top_k else order
        if filters.top_p is not None and filters.top_p != 1:
            before = law[kept].cumsum(0) - law[kept]
            kept = kept[before < float(filters.top_p) * law[kept].sum()]
        survives = torch.zeros(len(x), dtype=torch.bool)
        survives[kept] = True
        if filters.min_p is not None:
            survives &= law >= float(filters.min_p)
        law = torch.where(survives, law, 0.0)
    return law / law.sum()


def exact_residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return max(0, p - q) normalised, [V] float64; p where it is empty (then it is never used)."""
    excess = (target - draft).clamp(min=0)
    mass = excess.sum()
    return excess / mass if mass > 0 else target


def over_target_ids(law: Tensor, vocab_size: int, draft_to_target: Tensor | None) -> Tensor:
    """Return a law over the draft's vocabulary as one over the target's, [V]; mass outside of it is dropped."""
    ids = torch.arange(len(law)) if draft_to_target is None else draft_to_target
    inside = ids < vocab_size
    spread = torch.zeros(vocab_size, dtype=law.dtype)
    spread[ids[inside]] = law[inside]
    return spread


def markov_logits(base: Tensor, anchors: Tensor, tokens: Tensor, head: MarkovHead, hidden: Tensor) -> Tensor:
    """Return U_k + B_k(x_<k, .) for given drafted tokens, [R, gamma, V]: equations 4 to 6, one request and position at a time."""
    w1, w2 = head.markov_w1.weight.detach(), head.markov_w2.weight.detach().T
    rows = []
    for r in range(len(base)):
        state = torch.zeros(head.rank, dtype=base.dtype)
        for k in range(base.shape[1]):
            e = w1[anchors[r] if k == 0 else tokens[r, k - 1]]
            bias = e @ w2
            if head.gate_proj is not None:
                z = head.gate_proj.weight.detach() @ torch.cat((hidden[r, k], e)) + head.gate_proj.bias.detach()
                bias = (e / (1 + torch.exp(-z))) @ w2
            if head.joint_proj is not None:
                z = (
                    head.joint_proj.weight.detach() @ torch.cat((state, e, hidden[r, k]))
                    + head.joint_proj.bias.detach()
                )
                gate, candidate, output = z.chunk(3)
                gate = 1 / (1 + torch.exp(-gate))
                state = gate * state + (1 - gate) * torch.tanh(candidate)
                bias = torch.tanh(output) @ w2
            rows.append(base[r, k] + bias)
    return torch.stack(rows).view_as(base)


def overconfident_samples(seed: int, count: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Return confidence logits [S, gamma] that say twice what is true, unevenly, and whether drafts 1..k were all accepted."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, block_size, generator=generator) * 2 + 1
    # The truth depends on the previous logit too, so that prefix and per-position calibration disagree.
    truth = logits / 2 + 0.8 * torch.nn.functional.pad(logits, (1, 0))[:, :-1]
    accepted = torch.rand(count, block_size, generator=generator) < torch.sigmoid(truth)
    return logits, accepted.to(torch.int64).cumprod(dim=1)


def sts_by_brute_force(
    logits: Tensor, accepted: Tensor, num_bins: int, grid: list[float], fitted: list[float]
) -> list[tuple[float, float]]:
    """Return for each position the ECE at the fitted temperature and the least over the grid, predecessors held (paper 3.2.1)."""

    def error(prefix: Tensor, k: int, temperature: float) -> float:
        a = prefix * torch.sigmoid(logits[:, k] / temperature)
        bins = (a * num_bins).floor().clamp(max=num_bins - 1)
        gaps = [float((a - accepted[:, k])[bins == b].double().sum()) for b in range(num_bins)]
        return sum(map(abs, gaps)) / len(a)

    prefix = torch.ones(len(logits))
    result = []
    for k, temperature in enumerate(fitted):
        result.append((error(prefix, k, temperature), min(error(prefix, k, t) for t in grid)))
        prefix = prefix * torch.sigmoid(logits[:, k] / temperature)
    return result

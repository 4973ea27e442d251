"""What the components are compared with: each one in eager PyTorch, twice, written from the algorithm.

`x_public` is how training repositories and first implementations write it; `x_competent` is how an engineer who watches the clock
would, without a kernel. Where a form is not right the docstring says so under "Wrong"; everything else is checked against the
references in `tests/test_benchmarks_baselines.py`. They take blocks of one length and one temperature T > 0 for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import dsspark

Draw = Callable[[Tensor, Tensor], Tensor]
"""(weights [N, V], uniforms [N, 2]) -> [N] int64: how a baseline draws; tests put the reference's own draw here."""


# ------------------------------------------------------------------------------------------------------------------- draws


def multinomial(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw with `torch.multinomial`, from the global generator: V random words a row, and nobody can repeat a request's draw."""
    return torch.multinomial(probs, 1)[:, 0]


def exponential_race(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw argmax p / e with e exponential, from the global generator: no sort, no sum, V random words a row.

    Wrong in the tail: 24-bit noise gives no token a chance below about 1e-8.
    """
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by one running sum a row and one uniform.

    Wrong in the tail: a float32 running sum over a whole row gives a token below about 6e-8 the mass 0 or an ulp, and where rounding
    leaves the total above u's product nothing stops the last id, probable or not, from being taken.
    """
    running = weights.cumsum(dim=-1)
    point = uniforms[:, :1].to(running.dtype) * running[:, -1:]
    return torch.searchsorted(running, point, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


# ------------------------------------------------------------------------------------------------------------------- drafting


@dataclass(frozen=True, kw_only=True)
class EagerDraft:
    """A drafted block.

    Attributes:
        tokens: [R, gamma] int64.
        logits: [R, gamma, V], corrected.
        probs: [R, gamma, V] float32, the public form's q; None in the competent one.
        token_probs: [R, gamma] float32, q of the drawn tokens.
    """

    tokens: Tensor
    logits: Tensor
    probs: Tensor | None
    token_probs: Tensor


def draft_block_public(
    base_logits: Tensor,
    anchors: Tensor,
    head: dsspark.MarkovHead,
    uniforms: dsspark.Uniforms,
    temperature: float = 1.0,
    draw: Draw = multinomial,
) -> EagerDraft:
    """Draft as the public training code does: linear, add, softmax, multinomial at each position, and a softmax of all of it for q.

    Wrong where the model runs in half precision: the bias is rounded before it is added, so the law differs from eq. 4 by one more
    rounding. It is lossless all the same, since q is taken from the logits that were drawn from.
    """
    previous, logits, tokens = anchors, [], []
    for k in range(base_logits.shape[1]):
        bias = head.markov_w2(head.markov_w1(previous))
        logits.append(base_logits[:, k] + bias)
        previous = draw(torch.softmax(logits[-1].float() / temperature, dim=-1), uniforms.draft[:, k])
        tokens.append(previous)
    drafted, stacked = torch.stack(tokens, dim=1), torch.stack(logits, dim=1)
    probs = torch.softmax(stacked.float() / temperature, dim=-1)
    return EagerDraft(
        tokens=drafted, logits=stacked, probs=probs, token_probs=probs.gather(2, drafted[..., None])[..., 0]
    )


def draft_block_competent(
    base_logits: Tensor,
    anchors: Tensor,
    head: dsspark.MarkovHead,
    uniforms: dsspark.Uniforms,
    temperature: float = 1.0,
    draw: Draw = inverse_cdf,
) -> EagerDraft:
    """Draft with one fused product-and-add and one softmax a position; q of the drawn token is kept instead of all of q.

    Wrong where the model runs in half precision: the sum is formed in that precision.
    """
    previous, logits, steps = anchors, torch.empty_like(base_logits), []
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight.t()
    for k in range(base_logits.shape[1]):
        x = torch.addmm(base_logits[:, k], w1[previous].to(base_logits.dtype), w2.to(base_logits.dtype))
        logits[:, k] = x
        probs = torch.softmax(x if temperature == 1.0 else x / temperature, dim=-1, dtype=torch.float32)
        previous = draw(probs, uniforms.draft[:, k])
        steps.append((previous, probs.gather(1, previous[:, None])[:, 0]))
    tokens, token_probs = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
    return EagerDraft(tokens=tokens, logits=logits, probs=None, token_probs=token_probs)


# ------------------------------------------------------------------------------------------------------------------- verification


@dataclass(frozen=True, kw_only=True)
class EagerVerification:
    """num_accepted [R] int64; final [R] int64: the correction, or the bonus."""

    num_accepted: Tensor
    final: Tensor


def verify_public(
    target_logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    uniforms: dsspark.Uniforms,
    temperature: float = 1.0,
    draw: Draw = multinomial,
) -> EagerVerification:
    """Verify as the public code does: both sides to float32 probabilities, ratio, residual by clamp and renormalise, multinomial.

    Args:
        target_logits: [R, gamma + 1, V].
        draft_logits: [R, gamma, V].
        tokens: [R, gamma].
        uniforms: `accept`, and `final` if `draw` reads it.

    Wrong at the edges: u <= p / q accepts a token of p = 0 when u = 0, and any token when q is NaN or p / q overflows; where rounding
    leaves no residual, the division makes NaN and multinomial raises; a row of NaN raises for the whole batch.
    """
    p = torch.softmax(target_logits.float() / temperature, dim=-1)
    q = torch.softmax(draft_logits.float() / temperature, dim=-1)
    p_x = p[:, :-1].gather(2, tokens[..., None])[..., 0]
    q_x = q.gather(2, tokens[..., None])[..., 0]
    accepted = (uniforms.accept <= p_x / q_x).long().cumprod(dim=1).sum(dim=1)
    block_size, row = tokens.shape[1], torch.arange(len(tokens), device=tokens.device)
    q_row = q[row, accepted.clamp(max=block_size - 1)] * (accepted < block_size)[:, None]
    residual = (p[row, accepted] - q_row).clamp(min=0)
    return EagerVerification(
        num_accepted=accepted, final=draw(residual / residual.sum(dim=-1, keepdim=True), uniforms.final)
    )


def verify_competent(
    target_logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    token_probs: Tensor,
    uniforms: dsspark.Uniforms,
    temperature: float = 1.0,
    draw: Draw = inverse_cdf,
) -> EagerVerification:
    """Verify by logsumexp of the target rows, q(x) as the draft kept it, and probabilities of the deciding rows alone.

    Args: as `verify_public`, and token_probs [R, gamma] float32, q of the drawn tokens.

    Wrong at the edges: NaN rows go unnoticed (the comparison is False, so they reject).
    """
    rows = target_logits.float() if temperature == 1.0 else target_logits.float() / temperature
    norm = torch.logsumexp(rows, dim=-1)
    p_x = torch.exp(rows[:, :-1].gather(2, tokens[..., None])[..., 0] - norm[:, :-1])
    accepted = (uniforms.accept * token_probs < p_x).long().cumprod(dim=1).sum(dim=1)
    block_size, row = tokens.shape[1], torch.arange(len(tokens), device=tokens.device)
    p_row = torch.exp(rows[row, accepted] - norm[row, accepted, None])
    q_row = torch.softmax(draft_logits[row, accepted.clamp(max=block_size - 1)].float() / temperature, dim=-1)
    residual = torch.where((accepted < block_size)[:, None], (p_row - q_row).clamp_(min=0), p_row)
    empty = residual.sum(dim=-1, keepdim=True) == 0
    return EagerVerification(num_accepted=accepted, final=draw(torch.where(empty, p_row, residual), uniforms.final))


# ------------------------------------------------------------------------------------------------------------------- calibration


def fit_sts_public(logits: Tensor, accepted: Tensor, grid: Tensor, num_bins: int = 20) -> Tensor:
    """Fit the temperatures [gamma] by a Python loop over positions and temperatures, in float64: shares, means, distances."""
    prefix, chosen = torch.ones(len(logits), dtype=torch.float64, device=logits.device), []
    for k in range(logits.shape[1]):
        z, outcome = logits[:, k].double(), accepted[:, k].double()
        errors = []
        for temperature in grid.tolist():
            probability = prefix * torch.sigmoid(z / temperature)
            index = (probability * num_bins).long().clamp(max=num_bins - 1)
            count = torch.bincount(index, minlength=num_bins)
            confidence = torch.bincount(index, weights=probability, minlength=num_bins) / count.clamp(min=1)
            frequency = torch.bincount(index, weights=outcome, minlength=num_bins) / count.clamp(min=1)
            errors.append((count / len(z) * (confidence - frequency).abs()).sum())
        chosen.append(grid[torch.stack(errors).argmin()])
        prefix = prefix * torch.sigmoid(z / chosen[-1])
    return torch.stack(chosen)


def fit_sts_competent(logits: Tensor, accepted: Tensor, grid: Tensor, num_bins: int = 20) -> Tensor:
    """Fit the same with one weighted histogram of (probability - outcome) a temperature, probabilities in float32."""
    prefix, chosen = torch.ones(len(logits), device=logits.device), []
    for k in range(logits.shape[1]):
        z, outcome = logits[:, k].float(), accepted[:, k].float()
        errors = []
        for temperature in grid.tolist():
            probability = torch.sigmoid(z / temperature).mul_(prefix)
            index = (probability * num_bins).int().clamp_(max=num_bins - 1)
            errors.append(torch.bincount(index, weights=probability.sub_(outcome), minlength=num_bins).abs().sum())
        chosen.append(grid[torch.stack(errors).argmin()])
        prefix = prefix * torch.sigmoid(z / chosen[-1].float())
    return torch.stack(chosen)


# ------------------------------------------------------------------------------------------------------------------- confidence


def survival_public(
    hidden: Tensor, previous: Tensor, markov_w1: Tensor, weight: Tensor, bias: Tensor, temperatures: Tensor
) -> Tensor:
    """Return survival [R, gamma] as a module would: embedding, concatenation, linear, sigmoid, running product.

    Wrong in half precision: the logits are rounded to it, where the reference accumulates in float32.
    """
    features = torch.cat((hidden, F.embedding(previous, markov_w1)), dim=-1)
    logits = F.linear(features, weight.to(features.dtype), bias.to(features.dtype))[..., 0]
    return torch.sigmoid(logits.float() / temperatures).cumprod(dim=1)


def survival_competent(
    hidden: Tensor, previous: Tensor, markov_w1: Tensor, weight: Tensor, bias: Tensor, temperatures: Tensor
) -> Tensor:
    """Return the same without the concatenation: two products with the halves of the weight.

    Wrong in half precision, as the public form.
    """
    w_hidden, w_embedding = weight[0].to(hidden.dtype).split([hidden.shape[2], markov_w1.shape[1]])
    logits = (hidden @ w_hidden).float() + (markov_w1[previous] @ w_embedding).float() + bias.float()
    return torch.sigmoid(logits / temperatures).cumprod(dim=1)


# ------------------------------------------------------------------------------------------------------------------- scheduling


def schedule_public(survival: Tensor, cost_table: dsspark.CostTable) -> Tensor:
    """Run Algorithm 1 on the host over Python lists: sort all candidates, admit while throughput rises."""
    rows, rates = survival.tolist(), cost_table.sps.tolist()
    num_requests = len(rows)
    candidates = sorted((-a, k, r) for r, row in enumerate(rows) for k, a in enumerate(row) if a > 0)
    lengths, total, best = [0] * num_requests, float(num_requests), num_requests * rates[num_requests]
    for admitted, (negative, _, r) in enumerate(candidates[: len(rates) - 1 - num_requests], start=1):
        total -= negative
        if total * rates[num_requests + admitted] <= best:
            break
        best = total * rates[num_requests + admitted]
        lengths[r] += 1
    return torch.tensor(lengths, dtype=torch.int32)


def schedule_competent(survival: Tensor, cost_table: dsspark.CostTable) -> Tensor:
    """Run the same with a NumPy sort, running sum and comparison on the host."""
    num_requests = survival.shape[0]
    flat = survival.cpu().numpy().T.reshape(-1)
    order = np.argsort(-flat, kind="stable")[: cost_table.max_tokens - num_requests]
    ranked = flat[order]
    tau = num_requests + np.concatenate(([0.0], np.cumsum(ranked, dtype=np.float64)))
    theta = tau * cost_table.sps.cpu().numpy()[num_requests : num_requests + len(order) + 1]
    stops = np.flatnonzero((theta[1:] <= theta[:-1]) | (ranked <= 0))
    count = stops[0] if len(stops) else len(order)
    return torch.from_numpy(np.bincount(order[:count] % num_requests, minlength=num_requests).astype(np.int32))


# ------------------------------------------------------------------------------------------------------------------- packing


def pack_public(anchors: Tensor, tokens: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, positions and request ids of the packed batch by a Python loop over requests."""
    parts, positions, owners = [], [], []
    for r, length in enumerate(lengths.tolist()):
        parts.append(torch.cat((anchors[r : r + 1], tokens[r, :length])))
        positions.append(starts[r] + torch.arange(length + 1, device=tokens.device))
        owners.append(torch.full((length + 1,), r, dtype=torch.int32, device=tokens.device))
    return torch.cat(parts), torch.cat(positions), torch.cat(owners)


def pack_competent(anchors: Tensor, tokens: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by one mask: no loop, but the host waits for the number of tokens."""
    k = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    kept = k <= lengths[:, None]
    owners = torch.arange(len(anchors), dtype=torch.int32, device=tokens.device)[:, None].expand_as(kept)
    return torch.cat((anchors[:, None], tokens), dim=1)[kept], (starts[:, None] + k)[kept], owners[kept]


# ------------------------------------------------------------------------------------------------------------------- attention


def attention_public(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: dsspark.PackedBatch,
    block_table: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Attend request by request: gather its pages, repeat keys for every query head, mask, scaled dot product."""
    groups, page_size, outputs = query.shape[1] // key_cache.shape[2], key_cache.shape[1], []
    bounds, contexts = batch.cu_seqlens.tolist(), context_lens.tolist()
    for r, context in enumerate(contexts):
        rows = slice(bounds[r], bounds[r + 1])
        pages = block_table[r, : -(-context // page_size)].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:context].transpose(0, 1).repeat_interleave(groups, dim=0)
            for cache in (key_cache, value_cache)
        )
        mask = torch.arange(context, device=query.device) <= batch.positions[rows, None]
        out = F.scaled_dot_product_attention(query[rows].transpose(0, 1), keys, values, attn_mask=mask)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def attention_competent(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: dsspark.PackedBatch,
    block_table: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Attend in one padded call, query heads of a key head as rows of one product; blocks of one length only."""
    num_requests, block = len(context_lens), query.shape[0] // len(context_lens)
    kv_heads, head_dim = key_cache.shape[2:]
    grouped = query.view(num_requests, block, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = (cache[block_table.long()].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
    visible = torch.arange(keys.shape[2], device=query.device) <= batch.positions.view(num_requests, block, 1)
    mask = visible.repeat(1, query.shape[1] // kv_heads, 1)[:, None]
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.view(num_requests, kv_heads, -1, block, head_dim).permute(0, 3, 1, 2, 4).reshape(query.shape)

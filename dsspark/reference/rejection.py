r"""Lossless verification: accept, resample from the residual, or draw the bonus (paper 2.1).

Left to right, $x_k \sim q_k$ is accepted with probability $\min(1, p_k(x_k) / q_k(x_k))$. The first rejected token is replaced by a
draw from $\max(0, p_k - q_k) / \sum_v \max(0, p_k(v) - q_k(v))$; if none is rejected, a bonus token comes from the next $p$.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark._checks import as_temperature
from dsspark.contracts import check_verify_arguments
from dsspark.numerics import CELL, rows_at_once
from dsspark.randomness import Uniforms
from dsspark.reference.filters import select_requests, target_weights
from dsspark.reference.markov import corrected_logits
from dsspark.reference.sampling import sample_two_level
from dsspark.types import DraftBlock, Filters, PackedBatch, Verification


def accepts(uniforms: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return whether a drafted token is accepted: u * q(x) < p(x), strictly.

    Args:
        uniforms: u in [0, 1).
        target_probs: p(x).
        draft_probs: q(x) of the law x was drawn from.

    Returns:
        bool, the shape of the arguments. Never True at p = 0 or a NaN; never False at p >= q > 0 (said explicitly, because for
        subnormal q the product u * q can round up to q).

    Source: paper 2.1; Leviathan et al. 2023, Chen et al. 2023.
    """
    ratio_test = uniforms * draft_probs < target_probs
    return ratio_test | ((target_probs >= draft_probs) & (target_probs > 0))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the unnormalised residual max(0, p - q) of each row, [N, V]; p itself where rounding left it empty.

    Args:
        target_probs: p, [N, V].
        draft_probs: q, [N, V], the very numbers of the acceptance test.

    Source: paper 2.1; Leviathan et al. 2023, Chen et al. 2023.
    """
    weights = (target_probs - draft_probs).clamp(min=0)
    empty = weights.sum(dim=-1, keepdim=True) == 0
    return torch.where(empty, target_probs, weights)


def draft_law(draft: DraftBlock, requests: Tensor, position: int, vocab_size: int) -> Tensor:
    """Return rows of q over the target's vocabulary.

    Args:
        draft: the block.
        requests: [N] int64, which requests.
        position: k, counted from 0.
        vocab_size: V of the target. q is 0 on target ids that the draft does not have.

    Returns:
        [N, V] float32 (float64 for float64 logits). One-hot at the drafted token where T = 0.

    Numerics: rows that are not stored are recomputed for all requests at once, the product that drew them, so they are the same
        bit for bit.
    Source: paper 2.1: q is the law that the token was really drawn from.
    """
    temperature = draft.temperature[requests]
    law = torch.zeros(len(requests), vocab_size, dtype=draft.token_probs.dtype, device=requests.device)
    if draft.logits is not None or draft.base_logits is not None:
        if draft.logits is not None:
            logits = draft.logits[:, position][requests]
        else:
            assert draft.base_logits is not None
            latent = None if draft.latent is None else draft.latent[:, position]
            logits = corrected_logits(draft.base_logits[:, position], latent, draft.markov_w2)[requests]
        scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
        x = logits.to(law.dtype)
        q = torch.exp((x - draft.row_max[requests, position, None]) / scale) / draft.row_sum[requests, position, None]
        if draft.draft_to_target is not None:
            inside = draft.draft_to_target < vocab_size
            law[:, draft.draft_to_target[inside]] = q[:, inside]
        else:
            shared = min(vocab_size, q.shape[1])
            law[:, :shared] = q[:, :shared]
    greedy = (temperature == 0).nonzero()[:, 0]
    tokens = draft.tokens[requests[greedy], position]
    law[greedy] = 0
    inside = (tokens >= 0) & (tokens < vocab_size)
    law[greedy[inside], tokens[inside]] = 1
    return law


@torch.no_grad()
def verify(
    target_logits: Tensor,
    batch: PackedBatch,
    draft: DraftBlock,
    uniforms: Uniforms,
    *,
    temperature: float | Tensor = 1.0,
    filters: Filters | None = None,
    cell: int = CELL,
) -> Verification:
    r"""Verify the drafts of all requests so that what is emitted has exactly the target's law (paper 2.1).

    Args:
        target_logits: [N or capacity, V] float32, bfloat16, float16 (float64: an oracle), any row stride. Row i scores what follows
            packed token i: request r owns rows cu_seqlens[r] .. cu_seqlens[r + 1] - 1, the last of which is its bonus row.
        batch: the packed batch these logits belong to.
        draft: the drafted tokens [R, gamma] and their q; of request r, the first l_r were packed.
        uniforms: `accept` [R, gamma] and `final` [R, 2] are read.
        temperature: of the target, a float or [R]; 0 is greedy. The draft has its own.
        filters: top-k, top-p, min-p on p.
        cell: tokens in a cell of the two-level draw.

    Returns:
        A `Verification`. A request whose deciding row is no distribution is invalid and emits nothing; others are unharmed.

    Raises:
        ValueError: for shapes or devices that do not belong together, or a batch that the host can see has overflowed.
        TypeError: for dtypes that are not listed.

    Numerics: p and q in float32 and used as they are in both the ratio and the residual. Deterministic.
    Cost: every target row up to the first rejection is read once; q's row is read at the rejection only.
    Source: paper section 2.1; Leviathan et al. 2023; Chen et al. 2023.

    Example:
        >>> import torch
        >>> from dsspark import DraftBlock, Uniforms, pack
        >>> tokens = torch.tensor([[1, 2]])
        >>> batch = pack(torch.tensor([0]), tokens, torch.tensor([2]), torch.tensor([0]))
        >>> logits = torch.full((3, 4), -torch.inf)
        >>> logits[0, 1] = logits[1, 2] = logits[2, 3] = 0.0
        >>> verify(logits, batch, DraftBlock.point(tokens), Uniforms.draw(1, 2)).tokens
        tensor([[1, 2, 3]])
    """
    check_verify_arguments(target_logits, batch, draft, uniforms, filters, cell)
    num_rows, vocab_size = target_logits.shape
    num_requests, block_size = draft.tokens.shape
    device = target_logits.device
    temperature = as_temperature(temperature, num_requests, target_logits)
    starts = batch.cu_seqlens[:-1].to(torch.int64)
    lengths = batch.cu_seqlens.diff().to(torch.int64) - 1

    valid = (lengths >= 0) & (lengths <= block_size) & (batch.num_tokens <= num_rows)
    tokens = torch.full((num_requests, block_size + 1), -1, dtype=torch.int64, device=device)
    logprobs = torch.zeros(num_requests, block_size + 1, dtype=temperature.dtype, device=device)
    num_accepted = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def emit(requests: Tensor, k: int, chosen: Tensor, probs: Tensor) -> None:
        tokens[requests, k] = chosen
        logprobs[requests, k] = torch.log(probs)

    recomputed = draft.logits is None and draft.base_logits is not None
    count = max(1, num_requests) if recomputed else rows_at_once(target_logits)
    room = target_logits.new_empty(min(count, num_requests), vocab_size)  # for one position's rows, every time the same
    for running in torch.split(valid.nonzero()[:, 0], count):
        for k in range(block_size + 1):
            if running.numel() == 0:
                break
            rows = torch.index_select(target_logits, 0, starts[running] + k, out=room[: len(running)])
            weights, row_sum = target_weights(
                rows, temperature[running], select_requests(filters, running), overwrite=True
            )
            drafted = lengths[running] > k
            if k < block_size:
                x = draft.tokens[running, k]
                q_x = torch.where(drafted, draft.token_probs[running, k], 0.0)
                in_vocab = (x >= 0) & (x < vocab_size)
                p_x = weights.gather(1, torch.where(in_vocab, x, 0)[:, None])[:, 0] / row_sum
                p_x = torch.where(in_vocab | row_sum.isnan(), p_x, 0.0)
                accepted = drafted & accepts(uniforms.accept[running, k], p_x, q_x)
                lawful = ~row_sum.isnan() & ~q_x.isnan()
            else:
                accepted, lawful = drafted, ~row_sum.isnan()
            valid[running[~lawful]] = False

            final = lawful & ~accepted  # rejected here, or every draft was accepted and this is the bonus row
            if bool(final.any()):
                requests = running[final]
                p = weights[final] / row_sum[final, None]
                rejected = drafted[final]
                law = p
                if bool(rejected.any()):
                    law = p.clone()
                    q = draft_law(draft, requests[rejected], k, vocab_size).to(p.dtype)
                    law[rejected] = residual(p[rejected], q)
                chosen = sample_two_level(law, uniforms.final[requests], cell=cell)
                emit(requests, k, chosen, p.gather(1, chosen[:, None])[:, 0])
                num_accepted[requests] = k
            keep = lawful & accepted
            running = running[keep]
            if k < block_size and running.numel():
                emit(running, k, x[keep], p_x[keep])

    return Verification(
        num_accepted=num_accepted,
        tokens=torch.where(valid[:, None], tokens, -1),
        num_emitted=torch.where(valid, num_accepted + 1, 0).to(torch.int32),
        valid=valid,
        logprobs=torch.where(valid[:, None], logprobs, 0.0),
    )

r"""Verification with the target's logits sharded by vocabulary (paper 2.1).

Four exchanges a round, whatever gamma: row maxima; row totals together with the weights of the drafted tokens; the cells of one row a
request, p or max(0, p - q); the tokens drawn. Acceptance is computed on every rank from the same numbers. No logit travels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsspark._checks import as_temperature, check_dtype, check_shape
from dsspark.contracts import check_verify_arguments
from dsspark.distributed.collectives import all_reduce
from dsspark.distributed.drafting import (
    LOGIT_DTYPES,
    ShardedDraft,
    agree_on_maximum,
    gather_cells,
    is_law,
    owns_cell,
)
from dsspark.distributed.exact import (
    cell_masses,
    choose_cell,
    draw_in_cell,
    from_fixed,
    pack_choice,
    to_fixed,
    unpack_choice,
)
from dsspark.distributed.filters import apply_filters
from dsspark.distributed.laws import TargetRows
from dsspark.distributed.partition import VocabularyShard
from dsspark.randomness import Uniforms
from dsspark.reference.filters import select_requests
from dsspark.reference.markov import corrected_logits
from dsspark.reference.rejection import accepts
from dsspark.types import DraftBlock, Filters, PackedBatch, Verification


@torch.no_grad()
def verify_parallel(
    target_logits: Tensor,
    batch: PackedBatch,
    draft: ShardedDraft,
    uniforms: Uniforms,
    shard: VocabularyShard,
    *,
    temperature: float | Tensor = 1.0,
    filters: Filters | None = None,
) -> Verification:
    r"""Verify the drafts of all requests over a sharded vocabulary: `dsspark.verify` on P ranks, the same result on each.

    Args:
        target_logits: this rank's columns, [N or capacity, size] float32, bfloat16 or float16, any row stride; padding of the LM
            head left out.
        batch: the packed batch, the same on every rank.
        draft: of `draft_block_parallel`, or `ShardedDraft.point`. Its shards begin where the target's do, or lie beside them
            (`VocabularyShard.of_draft`).
        uniforms: `accept` and `final` are read; the same on every rank.
        shard: of the target vocabulary.
        temperature: of the target, a float or [R], the same on every rank.
        filters: top-k, top-p, min-p on p; the same on every rank.

    Returns:
        A `Verification`, the same on every rank.

    Raises:
        ValueError, TypeError: as `dsspark.verify`, for float64, and for a draft whose shards do not belong to the target's. Only this
            rank's arguments are looked at: one that raises alone leaves the others waiting for the group's timeout.

    Numerics: `dsspark.verify`, except that row totals and running masses of cells are exact integers: see `draft_block_parallel`.
        No host synchronisation on a GPU.
    Cost: 8 + 16 bytes a packed row and 4 C + 8 a request in four collectives; a filter adds histograms, see
        `dsspark.distributed.filters`. Reads this rank's part of every row twice, once more for each pass of a filter.
    Source: paper section 2.1; Leviathan et al. 2023.

    Example:
        >>> import torch
        >>> from dsspark import Uniforms, pack
        >>> tokens, shard = torch.tensor([[1, 2]]), VocabularyShard.single(4)
        >>> batch = pack(torch.tensor([0]), tokens, torch.tensor([2]), torch.tensor([0]))
        >>> logits = torch.full((3, 4), -torch.inf)
        >>> logits[0, 1] = logits[1, 2] = logits[2, 3] = 0.0
        >>> verify_parallel(logits, batch, ShardedDraft.point(tokens, shard), Uniforms.draw(1, 2), shard).tokens
        tensor([[1, 2, 3]])
    """
    check_dtype("target_logits", target_logits, LOGIT_DTYPES)
    check_verify_arguments(target_logits, batch, draft.block, uniforms, filters, shard.cell)
    check_shape("target_logits", target_logits, ("N", shard.size))
    _check_alignment(draft.shard, shard)
    num_rows = target_logits.shape[0]
    num_requests, block_size = draft.tokens.shape
    temperature = as_temperature(temperature, num_requests, target_logits).to(torch.float32)
    if num_requests == 0 or num_rows == 0:
        return _nothing(num_requests, block_size, target_logits.device)

    starts = batch.cu_seqlens[:-1].to(torch.int64)
    lengths = batch.cu_seqlens.diff().to(torch.int64) - 1
    fits = (lengths >= 0) & (lengths <= block_size) & (batch.num_tokens <= num_rows)
    k = torch.arange(block_size + 1, device=target_logits.device)
    row_of = (starts[:, None] + k).clamp(0, num_rows - 1)  # [R, gamma + 1]
    drafted = k < lengths[:, None]

    owner = torch.searchsorted(
        batch.cu_seqlens[1:], torch.arange(num_rows, device=k.device).to(torch.int32), right=True
    )
    owner = owner.clamp(max=num_requests - 1)
    rows, lawful = _target_rows(target_logits, temperature[owner], select_requests(filters, owner), shard)
    totals, token_probs = _totals(rows, lawful, _drafted_token(batch, draft, owner), shard)

    p_x = token_probs[row_of[:, :-1]]
    q_x = torch.where(drafted[:, :-1], draft.token_probs, 0.0)
    accepted = drafted[:, :-1] & accepts(uniforms.accept, p_x, q_x)
    row_lawful = ~totals[row_of].isnan()
    row_lawful[:, :-1] &= ~q_x.isnan()
    goes_on = (accepted & row_lawful[:, :-1]).to(torch.int64).cumprod(dim=1)
    last = goes_on.sum(dim=1)  # the first position that is not both lawful and accepted decides
    valid = fits & row_lawful.gather(1, last[:, None])[:, 0]

    final_row = row_of.gather(1, last[:, None])[:, 0]
    rejected = drafted.gather(1, last[:, None])[:, 0]
    token, prob = _final_draw(rows, totals, final_row, rejected, last, draft, uniforms.final, shard)
    return _assemble(draft.tokens, p_x, last, token, prob, valid)


def _check_alignment(draft: VocabularyShard, target: VocabularyShard) -> None:
    """Raise unless every rank holds, of q, exactly the target ids that it holds of p. Every rank sees the same partition."""
    beside = target.bounds if draft.draft_to_target is None else draft.target_bounds
    same = draft.bounds[:-1] == target.bounds[:-1] if draft.draft_to_target is None else beside == target.bounds
    if not same or draft.cell != target.cell or draft.rank != target.rank:
        raise ValueError(
            f"draft: got shards {draft.bounds} in cells of {draft.cell} for a target sharded {target.bounds} in cells of "
            f"{target.cell}, expected the same offsets; shard both alike, and a drafter with ids of its own by target.of_draft(...)"
        )


def _target_rows(
    target_logits: Tensor, temperature: Tensor, filters: Filters | None, shard: VocabularyShard
) -> tuple[TargetRows, Tensor]:
    """Agree on the maxima, find the filters' thresholds; return the rows and which of them can be laws."""
    row_max, best = agree_on_maximum(target_logits, shard, "verify: row maxima")
    rows = TargetRows(logits=target_logits, row_max=row_max, best=best, temperature=temperature)
    lawful = is_law(row_max, temperature)
    if filters is None:
        return rows, lawful
    rows, in_range = apply_filters(rows, filters, shard)
    return rows, lawful & in_range


def _drafted_token(batch: PackedBatch, draft: ShardedDraft, owner: Tensor) -> Tensor:
    """Return the token that each packed row judges, [N]; -1 for bonus rows and padding."""
    block_size = draft.tokens.shape[1]
    offset = torch.arange(owner.shape[0], device=owner.device) - batch.cu_seqlens[owner]
    length = batch.cu_seqlens[owner + 1] - batch.cu_seqlens[owner] - 1
    token = draft.tokens[owner, offset.clamp(0, block_size - 1)]
    return torch.where((offset >= 0) & (offset < length), token, -1)


def _totals(rows: TargetRows, lawful: Tensor, token: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the total weight of each row (NaN where it is no law) and p of its drafted token (0 where nobody holds the id)."""
    column = token - shard.offset
    owned = (column >= 0) & (column < shard.size)
    column = column.clamp(0, shard.size - 1)
    message = torch.zeros(token.shape[0], 2, dtype=torch.int64, device=token.device)
    for chunk in rows.chunks():
        weights = rows.weights(chunk)
        message[chunk, 0] = to_fixed(cell_masses(weights, shard.cell)).sum(dim=1)
        weight = weights.gather(1, column[chunk, None])[:, 0]
        message[chunk, 1] = pack_choice(torch.zeros_like(chunk), weight, owned[chunk])
    message = all_reduce(message, shard, "sum", "verify: totals and p(x)")
    greedy = rows.temperature == 0
    total = torch.where(greedy, 1.0, from_fixed(message[:, 0]))
    weight = torch.where(greedy, (token == rows.best).to(torch.float32), unpack_choice(message[:, 1])[1])
    total = torch.where(lawful, total, torch.nan)
    return total, weight / total


def _final_draw(
    rows: TargetRows,
    totals: Tensor,
    final_row: Tensor,
    rejected: Tensor,
    position: Tensor,
    draft: ShardedDraft,
    uniforms: Tensor,
    shard: VocabularyShard,
) -> tuple[Tensor, Tensor]:
    """Draw the correction or the bonus of each request; return the tokens and p of them, [R] each.

    A rank whose part of the residual is empty sends its part of p instead, negated: if every rank did, the residual is empty and p is
    there to draw from, without an exchange to ask first.
    """
    p = rows.weights(final_row) / totals[final_row, None]
    p.nan_to_num_(nan=0.0)
    position = position.clamp(max=draft.tokens.shape[1] - 1)
    residual = (p - _draft_law(draft, position, shard)).clamp_(min=0).nan_to_num_(nan=0.0)
    law = torch.where(rejected[:, None], residual, p)
    masses = cell_masses(law, shard.cell)
    absent = (masses == 0).all(dim=1, keepdim=True)
    masses = gather_cells(torch.where(absent, -cell_masses(p, shard.cell), masses), shard, "verify: cell masses")
    empty = ~(masses > 0).any(dim=1, keepdim=True)
    masses = torch.where(empty, -masses, masses).clamp(min=0)
    law = torch.where(empty, p, law)

    greedy = rows.temperature[final_row] == 0
    best = rows.best[final_row]
    chosen_cell = choose_cell(masses, uniforms[:, 0])
    drawn = draw_in_cell(law, chosen_cell - shard.offset // shard.cell, uniforms[:, 1], shard.cell)
    prob = p.gather(1, drawn[:, None])[:, 0]
    word = pack_choice(drawn + shard.offset, prob, owns_cell(chosen_cell, shard))
    token, prob = unpack_choice(all_reduce(word, shard, "sum", "verify: emitted tokens"))
    return torch.where(greedy, best, token), torch.where(greedy, 1.0, prob)


def _draft_law(draft: ShardedDraft, position: Tensor, shard: VocabularyShard) -> Tensor:
    """Return q at one position of each request over this rank's target ids, [R, size] float32."""
    block = draft.block
    requests = torch.arange(position.shape[0], device=position.device)
    law = torch.zeros(position.shape[0], shard.size, dtype=torch.float32, device=position.device)
    logits = _draft_logits(block, requests, position)
    greedy = block.temperature == 0
    if logits is not None:
        scale = torch.where(greedy, 1.0, block.temperature)[:, None]
        row_max, row_sum = block.row_max[requests, position, None], block.row_sum[requests, position, None]
        q = torch.exp((logits.to(torch.float32) - row_max) / scale) / row_sum
        if draft.shard.draft_to_target is None:
            shared = min(shard.size, q.shape[1])
            law[:, :shared] = q[:, :shared]
        else:
            column = draft.shard.draft_to_target - shard.offset
            inside = column < shard.size  # ids above the target's vocabulary have p = 0
            law.scatter_add_(1, torch.where(inside, column, 0).expand_as(q), q.masked_fill_(~inside, 0.0))
    column = block.tokens[requests, position] - shard.offset
    ids = torch.arange(shard.size, device=law.device)
    return torch.where(greedy[:, None], (ids == column[:, None]).to(law.dtype), law)


def _draft_logits(block: DraftBlock, requests: Tensor, position: Tensor) -> Tensor | None:
    """Return the draft's logits at one position of each request, [R, size]; None for a point."""
    if block.logits is not None:
        return block.logits[requests, position]
    if block.base_logits is None:
        return None
    latent = None if block.latent is None else block.latent[requests, position]
    return corrected_logits(block.base_logits[requests, position], latent, block.markov_w2)


def _assemble(drafts: Tensor, p_x: Tensor, last: Tensor, token: Tensor, prob: Tensor, valid: Tensor) -> Verification:
    """Put the accepted drafts, the final token and the padding together."""
    num_requests, block_size = drafts.shape
    k = torch.arange(block_size + 1, device=drafts.device)
    tokens = torch.cat((drafts, drafts.new_full((num_requests, 1), -1)), dim=1)
    tokens = torch.where(k == last[:, None], token[:, None], torch.where(k < last[:, None], tokens, -1))
    probs = torch.cat((p_x, torch.ones_like(p_x[:, :1])), dim=1)
    probs = torch.where(k == last[:, None], prob[:, None], torch.where(k < last[:, None], probs, 1.0))
    num_accepted = torch.where(valid, last, 0).to(torch.int32)
    return Verification(
        num_accepted=num_accepted,
        tokens=torch.where(valid[:, None], tokens, -1),
        num_emitted=torch.where(valid, num_accepted + 1, 0).to(torch.int32),
        valid=valid,
        logprobs=torch.where(valid[:, None], torch.log(probs), 0.0),
    )


def _nothing(num_requests: int, block_size: int, device: torch.device) -> Verification:
    """Return the result of a round without rows; with requests, they are invalid."""
    count = torch.zeros(num_requests, dtype=torch.int32, device=device)
    shape = num_requests, block_size + 1
    return Verification(
        num_accepted=count,
        tokens=torch.full(shape, -1, dtype=torch.int64, device=device),
        num_emitted=count.clone(),
        valid=count > 0,
        logprobs=torch.zeros(shape, device=device),
    )

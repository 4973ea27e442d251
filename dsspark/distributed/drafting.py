r"""Drafting with W2 and the base logits sharded by vocabulary (paper 3.1, eq. 4-6).

A position costs three exchanges, each of a few numbers a request: the row maximum, the mass of every cell relative to it, and the
token that the owner of the chosen cell drew. No logit travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsspark._checks import as_temperature, check_dtype, check_shape
from dsspark.contracts import check_draft_arguments
from dsspark.distributed.collectives import all_gather, all_reduce
from dsspark.distributed.exact import (
    cell_masses,
    choose_cell,
    draw_in_cell,
    from_fixed,
    pack_choice,
    pack_maximum,
    to_fixed,
    unpack_choice,
    unpack_maximum,
)
from dsspark.distributed.partition import VocabularyShard
from dsspark.randomness import Uniforms
from dsspark.reference.markov import corrected_logits, latent_step
from dsspark.types import DraftBlock

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ShardedDraft:
    """A draft whose rows of q are spread over ranks.

    Deliberately no `DraftBlock`: `dsspark.verify` would take this rank's columns for the whole vocabulary.

    Attributes:
        block: tokens, token_probs, row_max, row_sum and temperature are the same on every rank; logits, base_logits and markov_w2
            hold this rank's part.
        shard: of the draft vocabulary.
    """

    block: DraftBlock
    shard: VocabularyShard

    @property
    def tokens(self) -> Tensor:
        """Target ids, [R, gamma] int64, the same on every rank."""
        return self.block.tokens

    @property
    def token_probs(self) -> Tensor:
        """q of the drawn tokens, [R, gamma] float32, the same on every rank."""
        return self.block.token_probs

    @classmethod
    def point(cls, tokens: Tensor, shard: VocabularyShard) -> ShardedDraft:
        """Describe a deterministic proposal: q is one-hot at each token; see `DraftBlock.point`."""
        return cls(block=DraftBlock.point(tokens), shard=shard)


@torch.no_grad()
def draft_block_parallel(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Uniforms,
    shard: VocabularyShard,
    *,
    temperature: float | Tensor = 1.0,
    hidden: Tensor | None = None,
    keep_logits: bool = True,
) -> ShardedDraft:
    r"""Draft gamma tokens a request over a sharded vocabulary: `dsspark.draft_block` on P ranks, the same tokens on each.

    Args:
        base_logits: U, this rank's columns, [R, gamma, size] float32, bfloat16 or float16, any row stride.
        anchors: x_0, [R] target ids, the same on every rank.
        head: W1 whole, W2 this rank's rows (`VocabularyShard.shard_head`), or None for a parallel-only draft.
        uniforms: `uniforms.draft` [R, gamma, 2], the same on every rank (`Uniforms.from_seeds` is).
        shard: of the draft vocabulary. A drafter with ids of its own passes `target_shard.of_draft(draft_to_target)`.
        temperature: T >= 0, a float or [R], the same on every rank.
        hidden: h, [R, gamma, d], the same on every rank; needed by gated and RNN heads.
        keep_logits: as `dsspark.draft_block`; what is kept is this rank's part.

    Returns:
        A `ShardedDraft`, for `verify_parallel`.

    Raises:
        ValueError, TypeError: as `dsspark.draft_block`, and for float64. Only this rank's arguments are looked at: one that raises
            alone leaves the others waiting for the group's timeout.

    Numerics: `dsspark.draft_block`, except that running masses of cells and row totals are exact integers; so the number of ranks
        changes nothing, and a token differs from the single-rank body only where a uniform is within rounding of a breakpoint. That
        a row of the product with W2 does not depend on how many rows of W2 a rank holds is the matrix library's promise to keep.
    Cost: per position and request 8 + 4 C + 8 bytes in three collectives, C the number of cells, padded to P times the largest
        share; see `dsspark.distributed.traffic`.
    Source: paper section 3.1; vocabulary-parallel heads as in Megatron-LM.

    Example:
        >>> import torch
        >>> from dsspark import MarkovHead, Uniforms
        >>> shard = VocabularyShard.single(32)
        >>> uniforms = Uniforms.from_seeds([7], [0], block_size=5)
        >>> draft_block_parallel(torch.zeros(1, 5, 32), torch.tensor([3]), MarkovHead(32, 4), uniforms, shard).tokens.shape
        torch.Size([1, 5])
    """
    check_dtype("base_logits", base_logits, LOGIT_DTYPES)
    check_draft_arguments(base_logits, anchors, head, uniforms, hidden, shard.draft_to_target, shard.cell)
    check_shape("base_logits", base_logits, ("R", "gamma", shard.size))
    num_requests, block_size, _ = base_logits.shape
    temperature = as_temperature(temperature, num_requests, base_logits).to(torch.float32)
    markov_w2 = None if head is None else head.markov_w2.weight
    state = None if head is None else head.initial_state(num_requests, base_logits.device)

    previous = anchors.to(torch.int64)
    steps, stored, latents = [], [], []
    for k in range(block_size):
        latent = None
        if head is not None:
            latent, state = latent_step(head, previous, None if hidden is None else hidden[:, k], state)
            latents.append(latent)
        logits = corrected_logits(base_logits[:, k], latent, markov_w2)
        if keep_logits:
            stored.append(logits.to(base_logits.dtype))
            logits = stored[-1].to(torch.float32)
        steps.append(_draw(logits, temperature, uniforms.draft[:, k], shard))
        previous = steps[-1][0]

    tokens, probs, row_max, row_sum = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
    recompute = head is not None and not keep_logits
    block = DraftBlock(
        tokens=tokens,
        token_probs=probs,
        row_max=row_max,
        row_sum=row_sum,
        temperature=temperature,
        logits=torch.stack(stored, dim=1) if keep_logits else None,
        latent=torch.stack(latents, dim=1) if recompute else None,
        markov_w2=markov_w2 if recompute else None,
        base_logits=None if keep_logits else base_logits,
    )
    return ShardedDraft(block=block, shard=shard)


def _draw(
    logits: Tensor, temperature: Tensor, uniforms: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a token from each row, [R, size] float32; return target ids, q of them, row maxima and row sums, agreed by all ranks."""
    row_max, best = agree_on_maximum(logits, shard, "draft: row maxima")
    greedy = temperature == 0
    weights = relative_weights(logits, row_max, temperature)
    masses = gather_cells(cell_masses(weights, shard.cell), shard, "draft: cell masses")
    chosen_cell = choose_cell(masses, uniforms[:, 0])
    drawn = draw_in_cell(weights, chosen_cell - shard.offset // shard.cell, uniforms[:, 1], shard.cell)

    local = torch.where(greedy, best - shard.offset, drawn)
    owned = torch.where(greedy, best // shard.cell, chosen_cell)
    owned = owns_cell(owned, shard)
    local = local.clamp(0, shard.size - 1)
    ids = local + shard.offset if shard.draft_to_target is None else shard.draft_to_target[local]
    word = all_reduce(
        pack_choice(ids, weights.gather(1, local[:, None])[:, 0], owned), shard, "sum", "draft: drawn tokens"
    )
    tokens, weight = unpack_choice(word)

    total = torch.where(greedy, 1.0, from_fixed(to_fixed(masses).sum(dim=1)))
    valid = is_law(row_max, temperature)
    row_sum = torch.where(valid, total, torch.nan)
    return torch.where(valid, tokens, 0), weight / row_sum, row_max, row_sum


def agree_on_maximum(logits: Tensor, shard: VocabularyShard, label: str) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row over all ranks, [N] float32, and the lowest id that attains it; a NaN counts as +inf."""
    values, columns = logits.max(dim=-1)
    keys = pack_maximum(values.to(torch.float32), columns + shard.offset)
    return unpack_maximum(all_reduce(keys, shard, "max", label))


def relative_weights(logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((x - m) / T), [N, size] float32, finite whatever the row; T = 0 reads as 1 (greedy rows take the maximum's id)."""
    scale = torch.where(temperature == 0, 1.0, temperature)
    weights = torch.exp((logits.to(torch.float32) - row_max[:, None]) / scale[:, None])
    return weights.nan_to_num_(nan=0.0, posinf=0.0)


def is_law(row_max: Tensor, temperature: Tensor) -> Tensor:
    """Return whether each row is a distribution at its temperature, [N] bool."""
    return row_max.isfinite() & temperature.isfinite() & (temperature >= 0)


def owns_cell(cell: Tensor, shard: VocabularyShard) -> Tensor:
    """Return whether this rank holds each cell, counted over all ranks."""
    first = shard.offset // shard.cell
    return (cell >= first) & (cell < first + shard.cell_counts[shard.rank])


def gather_cells(masses: Tensor, shard: VocabularyShard, label: str) -> Tensor:
    """Return the cells of every rank, in order, [N, cells] -> [N, C]."""
    counts = shard.cell_counts
    padded = masses.new_zeros(masses.shape[0], max(counts))
    padded[:, : masses.shape[1]] = masses
    gathered = all_gather(padded, shard, label)
    return torch.cat([part[:, :count] for part, count in zip(gathered, counts, strict=True)], dim=1)

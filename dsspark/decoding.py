r"""Decoding: one round is draft, survival, schedule, pack, one target pass, verify, roll the caches back (paper 2 and 3).

`generate` loops rounds over a batch of requests of different lengths. A request's uniforms are keyed by its seed and its round
number, so its law is exactly the target's whatever is scheduled, and under policies that look at one request at a time its text
does not depend on its batch either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import dsspark
from dsspark._checks import as_temperature
from dsspark._dispatch import Backend
from dsspark.randomness import Uniforms
from dsspark.reference.filters import select_requests
from dsspark.serving.policies import FixedLength, Policy
from dsspark.statistics import RoundStatistics
from dsspark.types import DraftBlock, Filters, PackedBatch, Proposal, Verification

PREFILL_CHUNK = 512
"""Prompt tokens of a request that one target pass takes."""


class TargetCache(Protocol):
    """The target's key-value cache; row r belongs to request r."""

    def reserve(self, new_lengths: Tensor) -> None:
        """Make room for positions 0 .. new_lengths[r] - 1."""

    def rollback(self, lengths: Tensor) -> None:
        """Forget positions from lengths[r] on."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


class Target(Protocol):
    """What a target model has to offer."""

    def new_cache(self, num_requests: int) -> TargetCache:
        """Return an empty cache."""
        ...

    def forward_ragged(self, batch: PackedBatch, cache: Any) -> tuple[Tensor, Tensor]:
        """Return logits [capacity, V] and features [capacity, F] of the packed tokens, and write their keys to the cache."""
        ...


class DraftContext(Protocol):
    """What a drafter remembers of each request."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


class Drafter(Protocol):
    """What a drafter has to offer."""

    block_size: int
    sts_temperatures: Tensor | None

    def new_context(self, num_requests: int) -> DraftContext:
        """Return the empty context of R requests."""
        ...

    def extend(self, context: Any, features: Tensor, request_ids: Tensor) -> None:
        """Append the target's features [M, F] of verified tokens; row i belongs to request request_ids[i], in order."""
        ...

    def propose(
        self,
        anchors: Tensor,
        context: Any,
        uniforms: Uniforms,
        *,
        temperature: Tensor,
        keep_logits: bool = True,
        backend: Backend = "auto",
    ) -> Proposal:
        """Draft a block from the anchors [R]; the context stops strictly before them."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What happened in one round, for streaming and for measurements.

    Attributes:
        request_ids: which prompts the rows belong to.
        proposal: the drafts and their confidence; None without a drafter.
        survival: [R, gamma], calibrated.
        lengths: [R], drafts verified.
        verification: what was accepted and emitted.
        emitted: the new tokens of each row, cut at a stop token or at the requested number.
    """

    request_ids: list[int]
    proposal: Proposal | None
    survival: Tensor
    lengths: Tensor
    verification: Verification
    emitted: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The decoded batch.

    Attributes:
        tokens: the new tokens of each prompt; a stop token that ended a text is its last.
        logprobs: log p of each of them under the target's filtered, tempered law.
        statistics: acceptance, budget and waste over all rounds.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    statistics: RoundStatistics


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int] | Tensor],
    max_new_tokens: int | Sequence[int],
    temperature: float | Tensor = 1.0,
    policy: Policy | None = None,
    seeds: Sequence[int] | None = None,
    *,
    filters: Filters | None = None,
    draft_temperature: float | Tensor | None = None,
    stop_tokens: Sequence[int] = (),
    keep_logits: bool = True,
    on_round: Callable[[RoundReport], None] | None = None,
    backend: Backend = "auto",
) -> Generation:
    """Decode a batch of prompts; the text has exactly the target's law.

    Args:
        target: the model whose law is kept.
        drafter: proposes blocks; None decodes with the target alone.
        prompts: at least one token id each; lengths may differ.
        max_new_tokens: for all, or one number a prompt.
        temperature: of the target, a float or [R]; 0 is greedy.
        policy: how many drafts are verified each round; None verifies whole blocks.
        seeds: one integer a prompt; 0, 1, 2, ... if None. The same seed gives the same text again.
        filters: top-k, top-p, min-p of the target's law.
        draft_temperature: of the drafter; the target's if None. Any value keeps the law, some accept more.
        stop_tokens: ids that end a text.
        keep_logits: store the draft's logits instead of recomputing the rejected rows.
        on_round: called after every round; for streaming and measurements.
        backend: "auto", "reference" or "triton", for every component.

    Raises:
        ValueError: for an empty prompt, a count that does not match the prompts, or a model whose logits are no distribution.

    Source: paper sections 2.1, 3 and 5.3.
    """
    decoder = _Decoder(target, drafter, prompts, max_new_tokens, temperature, policy, seeds)
    decoder.filters, decoder.keep_logits, decoder.backend = filters, keep_logits, backend
    decoder.stop_tokens = frozenset(stop_tokens)
    if draft_temperature is not None:
        decoder.draft_temperature = as_temperature(draft_temperature, len(prompts), decoder.anchors)
    decoder.prefill()
    decoder.retire()
    while decoder.rows:
        report = decoder.round()
        if on_round is not None:
            on_round(report)
    return Generation(tokens=decoder.tokens, logprobs=decoder.logprobs, statistics=decoder.statistics)


class _Decoder:
    """The state of a batch between rounds. Row i of every tensor belongs to prompt rows[i]; finished prompts leave."""

    filters: Filters | None = None
    keep_logits: bool = True
    backend: Backend = "auto"
    stop_tokens: frozenset[int] = frozenset()

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int] | Tensor],
        max_new_tokens: int | Sequence[int],
        temperature: float | Tensor,
        policy: Policy | None,
        seeds: Sequence[int] | None,
    ) -> None:
        count = len(prompts)
        self.target, self.drafter = target, drafter
        self.prompts = [_as_ids(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        self.limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
        self.seeds = list(range(count)) if seeds is None else [int(seed) for seed in seeds]
        for name, values in (("max_new_tokens", self.limits), ("seeds", self.seeds)):
            if len(values) != count:
                raise ValueError(f"{name}: got {len(values)} values, expected one for each of the {count} prompts")
        if any(limit < 0 for limit in self.limits):
            raise ValueError(f"max_new_tokens: got {min(self.limits)}, expected 0 or more")
        self.block_size = 1 if drafter is None else drafter.block_size
        self.policy: Policy = FixedLength(0) if drafter is None else policy or FixedLength(self.block_size)
        self.rows = list(range(count))
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.statistics = RoundStatistics(self.block_size)
        self.anchors = torch.tensor([prompt[-1] for prompt in self.prompts], dtype=torch.int64)
        self.positions = torch.tensor([len(prompt) - 1 for prompt in self.prompts], dtype=torch.int64)
        self.rounds = torch.zeros(count, dtype=torch.int64)
        self.temperature = as_temperature(temperature, count, self.anchors)
        self.draft_temperature = self.temperature

    def prefill(self) -> None:
        """Run the target over each prompt but its last token, which is the first anchor."""
        self.cache = self.target.new_cache(len(self.rows))
        self.context = None if self.drafter is None else self.drafter.new_context(len(self.rows))
        bodies = [prompt[:-1] for prompt in self.prompts]
        for start in range(0, max((len(body) for body in bodies), default=0), PREFILL_CHUNK):
            batch = pack_prompts([body[start : start + PREFILL_CHUNK] for body in bodies], start)
            ends = [min(len(body), start + PREFILL_CHUNK) for body in bodies]
            self.cache.reserve(torch.tensor(ends))
            _, features = self.target.forward_ragged(batch, self.cache)
            if self.drafter is not None:
                self.drafter.extend(self.context, features, batch.request_ids)

    def round(self) -> RoundReport:
        """Run one round for every request that is not finished."""
        seeds = [self.seeds[row] for row in self.rows]
        uniforms = Uniforms.from_seeds(seeds, self.rounds, self.block_size)
        proposal, survival = self._propose(uniforms)
        draft = (
            DraftBlock.point(torch.zeros_like(uniforms.accept, dtype=torch.int64))
            if proposal is None
            else proposal.draft
        )
        lengths = self.policy.step(survival, self.rows)
        batch = dsspark.pack(self.anchors, draft.tokens, lengths, self.positions, backend=self.backend)
        self.cache.reserve(self.positions + lengths + 1)
        logits, features = self.target.forward_ragged(batch, self.cache)
        verification = dsspark.verify(
            logits,
            batch,
            draft,
            uniforms,
            temperature=self.temperature,
            filters=select_requests(self.filters, torch.tensor(self.rows)),
            backend=self.backend,
        )
        verification.raise_if_invalid()
        report = RoundReport(
            request_ids=list(self.rows),
            proposal=proposal,
            survival=survival,
            lengths=lengths,
            verification=verification,
            emitted=self._emit(verification),
        )
        self.statistics.add(lengths, verification.num_accepted)
        self._advance(batch, features, verification)
        self.retire()
        return report

    def _propose(self, uniforms: Uniforms) -> tuple[Proposal | None, Tensor]:
        ones = torch.ones(uniforms.accept.shape)
        if self.drafter is None:
            return None, ones
        proposal = self.drafter.propose(
            self.anchors,
            self.context,
            uniforms,
            temperature=self.draft_temperature,
            keep_logits=self.keep_logits,
            backend=self.backend,
        )
        if proposal.confidence_logits is None:
            return proposal, ones
        temperatures = self.drafter.sts_temperatures
        return proposal, dsspark.survival(proposal.confidence_logits, temperatures, backend=self.backend)

    def _emit(self, verification: Verification) -> list[list[int]]:
        """Append the round's tokens to each text, cut at a stop token or at the limit."""
        emitted = []
        for i, row in enumerate(self.rows):
            count = min(int(verification.num_emitted[i]), self.limits[row] - len(self.tokens[row]))
            new = verification.tokens[i, :count].tolist()
            stop = next((j for j, token in enumerate(new) if token in self.stop_tokens), None)
            new = new if stop is None else new[: stop + 1]
            self.tokens[row].extend(new)
            self.logprobs[row].extend(verification.logprobs[i, : len(new)].tolist())
            emitted.append(new)
        return emitted

    def _advance(self, batch: PackedBatch, features: Tensor, verification: Verification) -> None:
        """Keep the anchor and the accepted drafts in both caches; the last emitted token is the next anchor."""
        emitted = verification.num_emitted.to(torch.int64)
        if self.drafter is not None:
            requests = batch.request_ids.to(torch.int64)
            offset = batch.positions - self.positions[requests]
            kept = offset < emitted[requests]
            self.drafter.extend(self.context, features[kept], batch.request_ids[kept])
        self.positions = self.positions + emitted
        self.cache.rollback(self.positions)
        self.anchors = verification.tokens.gather(1, emitted[:, None] - 1)[:, 0]
        self.rounds = self.rounds + 1

    def retire(self) -> None:
        """Let finished requests leave the batch."""
        staying = [i for i, row in enumerate(self.rows) if not self._finished(row)]
        if len(staying) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in staying]
        self.cache.keep(staying)
        if self.context is not None:
            self.context.keep(staying)
        for name in ("anchors", "positions", "rounds", "temperature", "draft_temperature"):
            setattr(self, name, getattr(self, name)[staying])

    def _finished(self, row: int) -> bool:
        text = self.tokens[row]
        return len(text) >= self.limits[row] or (bool(text) and text[-1] in self.stop_tokens)


def _as_ids(name: str, prompt: Sequence[int] | Tensor) -> list[int]:
    ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not ids:
        raise ValueError(f"{name}: got no tokens, expected at least one; begin with the model's BOS token")
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise TypeError(
            f"{name}: got something other than token ids, expected non-negative ints; encode the text first"
        )
    return ids


def pack_prompts(pieces: list[list[int]], start: int) -> PackedBatch:
    """Pack a piece of each prompt, all of them beginning at position `start`."""
    counts = torch.tensor([len(piece) for piece in pieces])
    return PackedBatch(
        tokens=torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64),
        positions=torch.tensor([start + i for piece in pieces for i in range(len(piece))], dtype=torch.int64),
        request_ids=torch.arange(len(pieces), dtype=torch.int32).repeat_interleave(counts),
        cu_seqlens=torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32),
        num_tokens=counts.sum().to(torch.int32),
    )

"""The frozen results that components hand to one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsspark._checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    as_temperature,
    check_block_size,
    check_device,
    check_dtype,
    check_shape,
)
from dsspark.numerics import row_weights


@dataclass(frozen=True, kw_only=True)
class DraftBlock:
    r"""Drafted tokens and the exact law q each of them was drawn from (paper eq. 4).

    Row (r, k) has $q(v) = e^{(x_v - m) / T} / s$ with m = `row_max`, s = `row_sum`, T = `temperature`; at T = 0 q is the one-hot of
    `tokens`. The logits x are either stored (`logits`) or recomputed from `latent`, `markov_w2` and `base_logits`; a block that
    has none of them (`point`) has T = 0 everywhere.

    Attributes:
        tokens: [R, gamma] int64, target ids.
        token_probs: [R, gamma] float32, q of the drawn token; 1 at T = 0, NaN for a row that is no distribution.
        row_max: [R, gamma] float32, m.
        row_sum: [R, gamma] float32, s.
        temperature: [R] float32.
        logits: [R, gamma, V_draft] corrected logits before temperature, or None.
        latent: [R, gamma, r], the vector that multiplies W2, or None.
        markov_w2: [V_draft, r], or None.
        base_logits: [R, gamma, V_draft], U, or None.
        draft_to_target: [V_draft] int64 strictly increasing target ids, or None where the ids are the same.
    """

    tokens: Tensor
    token_probs: Tensor
    row_max: Tensor
    row_sum: Tensor
    temperature: Tensor
    logits: Tensor | None = None
    latent: Tensor | None = None
    markov_w2: Tensor | None = None
    base_logits: Tensor | None = None
    draft_to_target: Tensor | None = None

    @property
    def log_norm(self) -> Tensor:
        """Logsumexp of x / T, [R, gamma] float32; 0 at T = 0, where it is never read."""
        greedy = (self.temperature == 0)[:, None]
        scale = torch.where(greedy, 1.0, self.temperature[:, None])
        return torch.where(greedy, 0.0, self.row_max / scale + torch.log(self.row_sum))

    @classmethod
    def from_logits(
        cls,
        tokens: Tensor,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        draft_to_target: Tensor | None = None,
    ) -> DraftBlock:
        """Describe the proposal of any other drafter: tokens that were drawn from softmax(logits / temperature).

        Args:
            tokens: [R, gamma] int64 or int32 target ids.
            logits: [R, gamma, V_draft] floats, before temperature; -inf where the drafter filtered a token out.
            temperature: a float or [R]; rows at 0 equal `point(tokens)`.
            draft_to_target: [V_draft] strictly increasing target ids, or None where draft ids are target ids.

        Raises:
            ValueError: for shapes that do not belong together.
            TypeError: for dtypes that are not listed.

        Numerics: a token outside the draft vocabulary gets token_probs NaN, for no law can have drawn it; `verify` then marks the
        request invalid if that token decides anything.
        """
        tokens = _check_tokens(tokens)
        num_requests, block_size = tokens.shape
        check_shape("logits", logits, (num_requests, block_size, "V_draft"))
        check_dtype("logits", logits, FLOAT_DTYPES)
        check_device("logits", logits, "tokens", tokens)
        check_draft_to_target(draft_to_target, logits)
        temperature = as_temperature(temperature, num_requests, logits)

        draft_ids = tokens
        if draft_to_target is not None:
            draft_ids = torch.searchsorted(draft_to_target, tokens.contiguous())
        inside = (draft_ids >= 0) & (draft_ids < logits.shape[2])
        draft_ids = torch.where(inside, draft_ids, 0)
        if draft_to_target is not None:
            inside = inside & (draft_to_target[draft_ids] == tokens)

        columns = []
        for k in range(block_size):  # one position at a time: no [R, gamma, V] temporary
            weights, row_max, row_sum = row_weights(logits[:, k], temperature)
            columns.append((weights.gather(1, draft_ids[:, k, None])[:, 0] / row_sum, row_max, row_sum))
        probs, row_max, row_sum = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
        probs = torch.where((temperature == 0)[:, None] & ~row_sum.isnan(), 1.0, probs)
        return cls(
            tokens=tokens,
            token_probs=torch.where(inside, probs, torch.nan),
            row_max=row_max,
            row_sum=row_sum,
            temperature=temperature,
            logits=logits,
            draft_to_target=draft_to_target,
        )

    @classmethod
    def point(cls, tokens: Tensor) -> DraftBlock:
        """Describe a deterministic proposal (n-gram, greedy): q is one-hot at each token.

        Args:
            tokens: [R, gamma] int64 or int32 target ids. An id outside the vocabulary (a placeholder such as -1) has p = 0 and is
                always rejected.

        Raises:
            ValueError: for a shape that is not [R, gamma].
            TypeError: for a dtype that is no integer.
        """
        tokens = _check_tokens(tokens)
        ones = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
        return cls(
            tokens=tokens,
            token_probs=ones,
            row_max=torch.zeros_like(ones),
            row_sum=ones,
            temperature=torch.zeros(tokens.shape[0], dtype=torch.float32, device=tokens.device),
        )


def _check_tokens(tokens: Tensor) -> Tensor:
    check_shape("tokens", tokens, ("R", "gamma"))
    check_dtype("tokens", tokens, INT_DTYPES)
    check_block_size("tokens: gamma", tokens.shape[1])
    return tokens.to(torch.int64)


def check_draft_to_target(draft_to_target: Tensor | None, logits: Tensor) -> None:
    """Raise unless the map has one id for each entry of the draft vocabulary; the order is checked where the host can read it."""
    if draft_to_target is None:
        return
    check_shape("draft_to_target", draft_to_target, (logits.shape[-1],))
    check_dtype("draft_to_target", draft_to_target, (torch.int64,))
    check_device("draft_to_target", draft_to_target, "the logits", logits)
    if draft_to_target.device.type == "cpu" and bool((draft_to_target.diff() <= 0).any()):
        raise ValueError(
            "draft_to_target: got ids out of order, expected strictly increasing target ids; sort the draft vocabulary"
        )


class Proposal(NamedTuple):
    """What a drafter proposes in a round.

    Attributes:
        draft: the block.
        confidence_logits: [R, gamma] float32, before Sequential Temperature Scaling; None for a drafter without a confidence head.
    """

    draft: DraftBlock
    confidence_logits: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """The verified tokens of all requests, flattened: each request's anchor, then its drafts (paper 5.3).

    Attributes:
        tokens: [capacity] int64; padding is 0.
        positions: [capacity] int64, the position of each token in its request; padding is 0.
        request_ids: [capacity] int32, the marker tensor: which request a token belongs to; padding is -1.
        cu_seqlens: [R + 1] int32; request r owns rows cu_seqlens[r] .. cu_seqlens[r + 1] - 1.
        num_tokens: int32 scalar on the device, N. Above the capacity, every request is invalid and nothing is truncated silently.
    """

    tokens: Tensor
    positions: Tensor
    request_ids: Tensor
    cu_seqlens: Tensor
    num_tokens: Tensor

    @property
    def num_requests(self) -> int:
        """R, which the host knows from a shape."""
        return int(self.cu_seqlens.shape[0]) - 1


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a round emits.

    Attributes:
        num_accepted: [R] int32, accepted drafts.
        tokens: [R, gamma + 1] int64: the accepted drafts, then the correction or the bonus, then -1.
        num_emitted: [R] int32, num_accepted + 1; 0 for an invalid request.
        valid: [R] bool; False where a row that decides an emitted token is no distribution.
        logprobs: [R, gamma + 1] float32, log p of the emitted tokens under the target's filtered, tempered law; 0 elsewhere.
    """

    num_accepted: Tensor
    tokens: Tensor
    num_emitted: Tensor
    valid: Tensor
    logprobs: Tensor

    def raise_if_invalid(self) -> None:
        """Raise `ValueError` naming the requests without a law. Synchronises with the device; not for the hot path."""
        if not bool(self.valid.all()):
            bad = (~self.valid).nonzero()[:, 0].tolist()
            raise ValueError(
                f"verify: got no distribution (NaN, +inf or all -inf logits, or a bad temperature or filter) for requests {bad}, "
                "expected finite laws; look at their target and draft logits"
            )


@dataclass(frozen=True, kw_only=True)
class STSFit:
    """Fitted Sequential Temperature Scaling (paper 3.2.1).

    Attributes:
        temperatures: [gamma] float32, T_k.
        ece_before: [gamma] float32, ECE of the prefix survival at T = 1.
        ece_after: [gamma] float32, ECE with the fitted temperatures.
    """

    temperatures: Tensor
    ece_before: Tensor
    ece_after: Tensor


@dataclass(frozen=True)
class Filters:
    """Per-request filters of the target's law p, applied after temperature: top-k, then top-p, then min-p.

    Attributes:
        top_k: keep the k most probable tokens (ties: lowest ids); an int, [R] int64/int32, or None. 0 keeps all.
        top_p: of the renormalised survivors, in order (probability descending, id ascending), keep the smallest set that reaches
            top_p, the crossing token included; in (0, 1], a float, [R], or None. 1 keeps all.
        min_p: keep tokens whose probability is at least min_p times the largest; in [0, 1], a float, [R], or None. 0 keeps all.

    Raises:
        ValueError: for Python numbers out of range. Tensor entries are not read: one out of range makes its request invalid.
        TypeError: for anything that is neither a number nor a tensor.
    """

    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.top_k, Tensor):
            check_dtype("top_k", self.top_k, INT_DTYPES)
        elif self.top_k is not None:
            if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
                raise TypeError(f"top_k: got {type(self.top_k).__name__}, expected an int, a tensor [R] or None")
            if self.top_k < 0:
                raise ValueError(f"top_k: got {self.top_k}, expected 0 (keep all) or more")
        for name, low_open in (("top_p", True), ("min_p", False)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                check_dtype(name, value, FLOAT_DTYPES)
            elif value is not None:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError(f"{name}: got {type(value).__name__}, expected a float, a tensor [R] or None")
                if not (0 < value <= 1 if low_open else 0 <= value <= 1):
                    raise ValueError(f"{name}: got {value}, expected a value in {'(0, 1]' if low_open else '[0, 1]'}")

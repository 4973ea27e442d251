r"""Semi-autoregressive drafting: parallel logits, corrected and sampled left to right (paper 3.1, eq. 4-6).

$$q_k(v \mid x_0, x_{<k}) = \mathrm{softmax}\big((U_k(v) + B_k(x_{<k}, v)) / T\big)$$
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dsspark._checks import as_temperature
from dsspark.contracts import check_draft_arguments
from dsspark.numerics import CELL, compute_dtype, row_weights, rows_at_once
from dsspark.randomness import Uniforms
from dsspark.reference.sampling import sample_two_level
from dsspark.types import DraftBlock

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead

_TILE = 1024
"""Tokens in a tile of the product with W2."""


def latent_step(
    head: MarkovHead, previous_tokens: Tensor, hidden: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    r"""Return the vector that multiplies W2 at one position, and the next state of an RNN head.

    With $e = W_1[x_{k-1}]$:

    - vanilla (eq. 5): $e$
    - gated: $\sigma(W_g [h_k ; e] + b_g) \odot e$
    - rnn (eq. 6): $(g, c, o) = W [s_{k-1} ; e ; h_k] + b$, $s_k = \sigma(g) s_{k-1} + (1 - \sigma(g)) \tanh c$, and $\tanh o$

    Args:
        head: the Markov head.
        previous_tokens: x_{k-1}, [R] int64 target ids.
        hidden: h_k, [R, d]; read by "gated" and "rnn".
        state: s_{k-1}, [R, r]; read by "rnn", zeros at the first position.

    Returns:
        The latent [R, r], rounded to W1's dtype (it is what gets stored, so it is what the draw uses), and s_k [R, r] float32
        (None for the other kinds).

    Raises:
        ValueError: if a gated or RNN head gets no hidden states.

    Source: paper section 3.1, equations 5 and 6; the gated head is in the public code only.
    """
    embedding = head.markov_w1.weight[previous_tokens]
    if head.kind == "vanilla":
        return embedding, None
    if hidden is None:
        raise ValueError(
            f"hidden: got None, expected the backbone's hidden states [R, gamma, d] for a {head.kind} head"
        )
    dtype = compute_dtype(embedding)
    e, h = embedding.to(dtype), hidden.to(dtype)
    if head.gate_proj is not None:
        gate = torch.sigmoid(_linear(head.gate_proj, torch.cat((h, e), dim=-1)))
        return (gate * e).to(embedding.dtype), None
    if head.joint_proj is None or state is None:
        raise ValueError("state: got None, expected s_{k-1} [R, r] for an rnn head; start from head.initial_state(...)")
    gate, candidate, output = _linear(head.joint_proj, torch.cat((state, e, h), dim=-1)).chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    state = gate * state + (1 - gate) * torch.tanh(candidate)
    return torch.tanh(output).to(embedding.dtype), state


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


@torch.no_grad()
def corrected_logits(
    base_logits: Tensor,
    latent: Tensor | None,
    markov_w2: Tensor | None,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Return U_k + latent W2^T, [R, V_draft], accumulated in float32 (float64 for float64 logits).

    One product for all requests, in tiles of the vocabulary: on a processor a tile's result stays in the cache until it is added, and
    each thread takes tiles of its own, which a library's product of so few rows by so many columns does not do well.

    Args:
        base_logits: U_k, [R, V_draft].
        latent: [R, r], or None for a parallel-only draft.
        markov_w2: W2, [V_draft, r], or None likewise.
        out: where to write them, [R, V_draft] float32 (float64); a new tensor if None.
        scratch: of `_scratch`, for callers with several positions; a new tensor if None.

    Source: paper section 3.1, equation 4.
    """
    dtype = compute_dtype(base_logits)
    if latent is None or markov_w2 is None:
        return base_logits.to(dtype) if out is None else out.copy_(base_logits)
    logits = torch.empty(base_logits.shape, dtype=dtype, device=base_logits.device) if out is None else out
    base, corrected, latent = base_logits.flatten(0, -2), logits.flatten(0, -2), latent.flatten(0, -2).to(dtype)
    w2, vocab_size = markov_w2.to(dtype), markov_w2.shape[0]
    tiled = vocab_size - vocab_size % _TILE

    def tiles(rows: Tensor) -> Tensor:
        return rearrange(rows[:, :tiled], "n (t w) -> t n w", w=_TILE)

    if tiled:
        w2_tiles = rearrange(w2[:tiled], "(t w) r -> t r w", w=_TILE)
        bias = torch.bmm(latent.expand(tiled // _TILE, -1, -1), w2_tiles, out=scratch)
        torch.add(tiles(base), bias, out=tiles(corrected))
    if tiled < vocab_size:
        torch.add(base[:, tiled:], latent @ w2[tiled:].t(), out=corrected[:, tiled:])
    return logits


def _scratch(base_logits: Tensor) -> Tensor:
    """Return room for the product of one position of [R, gamma, V_draft] logits, by tiles of the vocabulary."""
    num_requests, _, vocab_size = base_logits.shape
    return base_logits.new_empty(vocab_size // _TILE, num_requests, _TILE, dtype=compute_dtype(base_logits))


def _draw(logits: Tensor, temperature: Tensor, uniforms: Tensor, cell: int) -> tuple[Tensor, ...]:
    """Draw from the rows of one position, as many at a time as a processor's cache holds.

    Args:
        logits: corrected, [R, V_draft].
        temperature: [R].
        uniforms: [R, 2].
        cell: tokens in a cell.

    Returns:
        The drawn indices, their q, and the maximum and the total of each row, [R] each.
    """
    count, drawn = rows_at_once(logits), []
    for start in range(0, max(1, logits.shape[0]), count):
        rows = slice(start, start + count)
        weights, row_max, row_sum = row_weights(logits[rows], temperature[rows])
        index = sample_two_level(weights, uniforms[rows], cell=cell)
        drawn.append((index, weights.gather(1, index[:, None])[:, 0] / row_sum, row_max, row_sum))
    return tuple(torch.cat(column) for column in zip(*drawn, strict=True))


@torch.no_grad()
def draft_block(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Uniforms,
    *,
    temperature: float | Tensor = 1.0,
    hidden: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    keep_logits: bool = True,
    cell: int = CELL,
) -> DraftBlock:
    r"""Draft gamma tokens a request, left to right, and keep the exact law q of each (paper eq. 4).

    Args:
        base_logits: U, [R, gamma, V_draft] float32, bfloat16, float16 (float64: an oracle), any row stride.
        anchors: x_0, [R] int64 or int32 target ids: the last emitted token of each request.
        head: the Markov head, or None for a parallel-only draft.
        uniforms: `uniforms.draft` [R, gamma, 2] is read.
        temperature: T >= 0, a float or [R]; 0 is greedy, the lowest id on ties.
        hidden: h, [R, gamma, d]; needed by gated and RNN heads.
        draft_to_target: [V_draft] int64 strictly increasing target ids, where the drafter has a vocabulary of its own.
        keep_logits: store the corrected logits, in the dtype of `base_logits`, and draw from what is stored; otherwise keep what
            recomputes a row.
        cell: tokens in a cell of the two-level draw.

    Returns:
        A `DraftBlock`; its `tokens` are target ids.

    Raises:
        ValueError: for shapes or devices that do not belong together, or a temperature out of range.
        TypeError: for dtypes that are not listed.

    Numerics: biases and laws in float32. A row that is no distribution (NaN, +inf, all -inf), or a bad entry of a temperature
        tensor, yields token 0 with token_probs NaN; other requests are unharmed. Deterministic.
    Cost: per position W2 and R rows of U are read once; R rows are written if logits are kept.
    Source: paper section 3.1, equations 4-6.

    Example:
        >>> import torch
        >>> from dsspark import MarkovHead, Uniforms
        >>> head = MarkovHead(vocab_size=32, rank=4)
        >>> uniforms = Uniforms.from_seeds([7], [0], block_size=5)
        >>> draft_block(torch.zeros(1, 5, 32), torch.tensor([3]), head, uniforms).tokens.shape
        torch.Size([1, 5])
    """
    check_draft_arguments(base_logits, anchors, head, uniforms, hidden, draft_to_target, cell)
    num_requests, block_size, _ = base_logits.shape
    temperature = as_temperature(temperature, num_requests, base_logits)
    dtype = compute_dtype(base_logits)
    markov_w2 = None if head is None else head.markov_w2.weight
    w2 = None if markov_w2 is None else markov_w2.to(dtype)
    state = None if head is None else head.initial_state(num_requests, base_logits.device)

    previous = anchors.to(torch.int64)
    kept = torch.empty_like(base_logits) if keep_logits else None
    in_place = kept is not None and kept.dtype == dtype
    corrected = None if in_place or head is None else torch.empty_like(base_logits[:, 0], dtype=dtype)
    scratch = None if head is None else _scratch(base_logits)
    steps, latents = [], []
    for k in range(block_size):
        latent = None
        if head is not None:
            latent, state = latent_step(head, previous, None if hidden is None else hidden[:, k], state)
            latents.append(latent)
        stored = None if kept is None else kept[:, k]
        out = stored if in_place else corrected
        logits = corrected_logits(base_logits[:, k], latent, w2, out=out, scratch=scratch)
        if stored is not None and not in_place:
            logits = stored.copy_(logits)  # the token is drawn from what is stored
        drawn, probs, row_max, row_sum = _draw(logits, temperature, uniforms.draft[:, k], cell)
        tokens = drawn if draft_to_target is None else draft_to_target[drawn]
        previous = torch.where(row_sum.isnan(), 0, tokens)
        steps.append((previous, probs, row_max, row_sum))

    tokens, probs, row_max, row_sum = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
    recompute = head is not None and not keep_logits
    return DraftBlock(
        tokens=tokens,
        token_probs=probs,
        row_max=row_max,
        row_sum=row_sum,
        temperature=temperature,
        logits=kept,
        latent=torch.stack(latents, dim=1) if recompute else None,
        markov_w2=markov_w2 if recompute else None,
        base_logits=None if keep_logits else base_logits,
        draft_to_target=draft_to_target,
    )

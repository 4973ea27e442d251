"""The two heads DSpark adds to a parallel drafter, as modules with DeepSpec's parameter names (paper 3.1 and 3.2.1)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dsspark._checks import check_shape
from dsspark.numerics import compute_dtype
from dsspark.reference.markov import latent_step

HeadKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """The sequential head: a locally normalised correction B_k(x_<k, .) of the parallel logits (paper eq. 4-6).

    Args:
        vocab_size: V, target ids; the rows of W1, since the previous token is a target id.
        rank: r.
        kind: "vanilla" (eq. 5), "gated" (the public code's variant) or "rnn" (eq. 6).
        hidden_size: d; needed by "gated" and "rnn", which read the backbone's hidden states.
        draft_vocab_size: rows of W2 where the drafter has a vocabulary of its own; V if None.

    Raises:
        ValueError: for a size below 1, an unknown kind, or a missing hidden_size.
    """

    def __init__(
        self,
        vocab_size: int,
        rank: int = 256,
        kind: HeadKind = "vanilla",
        hidden_size: int | None = None,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("vocab_size", vocab_size),
            ("rank", rank),
            ("draft_vocab_size", draft_vocab_size or vocab_size),
        ):
            if size < 1:
                raise ValueError(
                    f"{name}: got {size}, expected 1 or more; leave the head out (head=None) for a parallel drafter"
                )
        if kind not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"kind: got {kind!r}, expected 'vanilla', 'gated' or 'rnn'")
        self.kind: HeadKind = kind
        self.rank = rank
        self.hidden_size = hidden_size
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        self.joint_proj: nn.Linear | None = None
        if kind != "vanilla":
            if hidden_size is None or hidden_size < 1:
                raise ValueError(
                    f"hidden_size: got {hidden_size}, expected the backbone's hidden size for kind={kind!r}"
                )
            if kind == "gated":
                self.gate_proj = nn.Linear(hidden_size + rank, rank)
            else:
                self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, previous_tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the bias B_k of every position, teacher-forced (training, paper 3.3).

        Args:
            previous_tokens: [R, gamma] int64, x_{k-1}: the anchor, then the true tokens.
            hidden: [R, gamma, d], h_k; not read by "vanilla".

        Returns:
            [R, gamma, V_draft] in W2's dtype.
        """
        check_shape("previous_tokens", previous_tokens, ("R", "gamma"))
        state = self.initial_state(previous_tokens.shape[0], previous_tokens.device)
        latents = []
        for k in range(previous_tokens.shape[1]):
            hidden_k = None if hidden is None else hidden[:, k]
            latent, state = latent_step(self, previous_tokens[:, k], hidden_k, state)
            latents.append(latent)
        bias: Tensor = self.markov_w2(torch.stack(latents, dim=1))
        return bias

    def initial_state(self, num_requests: int, device: torch.device) -> Tensor | None:
        """Return s_0 = 0, [R, r] float32, for the RNN head and None for the others."""
        if self.kind != "rnn":
            return None
        return torch.zeros(num_requests, self.rank, dtype=compute_dtype(self.markov_w1.weight), device=device)


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w^T [h_k ; W1[x_{k-1}]] + b), as logits (paper eq. 7).

    Args:
        hidden_size: d of the backbone.
        rank: r of the Markov head's W1; 0 for a head that reads h_k alone.

    Raises:
        ValueError: for a hidden_size below 1 or a negative rank.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        if hidden_size < 1 or rank < 0:
            raise ValueError(f"hidden_size, rank: got {hidden_size}, {rank}, expected at least 1 and 0")
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, previous_tokens: Tensor, markov_w1: Tensor | None = None) -> Tensor:
        """Return confidence logits [R, gamma] float32.

        Args:
            hidden: [R, gamma, d].
            previous_tokens: [R, gamma] int64, x_{k-1}, never x_k.
            markov_w1: [V, r], or None at rank 0.

        Always by the reference, which has gradients; while `torch.compile` traces, through its operator.
        """
        import dsspark  # which imports this module

        weights = self.proj.weight, self.proj.bias
        return dsspark.confidence_logits(hidden, previous_tokens, markov_w1, *weights, backend="reference")

"""A target whose laws and whose drafters' laws lie on a grid: real drafter modules with random weights get exact, countable laws.

The shared LM head looks at one random direction of the hidden state: where it is positive, the upper half of the vocabulary is three
times as likely. A Markov head whose latent is 0 or 1 may make the lower half three times as likely. So every row, p or q, is one of
(1, 1, 1, 1)/4, (1, 1, 3, 3)/8 and (3, 3, 1, 1)/8 (with two tokens: halves and quarters), but *which* depends on everything a drafter
reads.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from dsspark.models.target import MASK_ID
from dsspark.testing.grid import GridLaw
from dsspark.testing.laws import LatticeSizes

D, FEATURES = 16, 24
LOG3 = math.log(3.0)


class HalvesHead(nn.Module):
    """Logits log 3 for the upper half of the tokens where the state lies on one side of a plane, 0 elsewhere."""

    def __init__(self, vocab_size, generator):
        super().__init__()
        self.half = vocab_size // 2
        self.direction = nn.Parameter(torch.randn(D, generator=generator), requires_grad=False)

    def forward(self, hidden):
        up = (hidden @ self.direction > 0).float()
        return torch.stack((torch.zeros_like(up),) * self.half + (LOG3 * up,) * self.half, dim=-1)


class TextCache:
    """The tokens of every request."""

    def __init__(self, count):
        self.tokens = torch.zeros(count, 0, dtype=torch.int64)

    def reserve(self, new_lengths):
        missing = int(new_lengths.max()) - self.tokens.shape[1]
        if missing > 0:
            self.tokens = torch.cat((self.tokens, self.tokens.new_zeros(len(self.tokens), missing)), dim=1)

    def rollback(self, lengths):
        """Forgotten tokens are overwritten before they are read."""

    def keep(self, rows):
        self.tokens = self.tokens[torch.tensor(list(rows), dtype=torch.int64)]


class GridTarget(nn.Module):
    """p depends on the last token through its final state; features depend on the last two tokens."""

    def __init__(self, vocab_size, generator):
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=vocab_size, hidden_size=D, feature_size=FEATURES, num_heads=2, num_kv_heads=1, head_dim=8
        )
        self.embed_tokens = nn.Embedding(MASK_ID + 1, D)
        self.lm_head = HalvesHead(vocab_size, generator)
        self.states = torch.randn(vocab_size, D, generator=generator)
        # After even tokens the upper half is likelier, after odd ones neither.
        side = (1.0 - 2.0 * (torch.arange(vocab_size) % 2)) * torch.sign(self.states @ self.lm_head.direction)
        self.states *= side[:, None]
        self.features = torch.randn(vocab_size, vocab_size, FEATURES, generator=generator)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(torch.randn(MASK_ID + 1, D, generator=generator))
        self.requires_grad_(False)

    def grid_law(self, block_size):
        """Return the target's law; the drafter's rows in it only show the lattice what may occur."""
        half = self.lm_head.half
        even, upper, lower = (1,) * (2 * half), (1,) * half + (3,) * half, (3,) * half + (1,) * half
        return GridLaw(target=(upper, even) * half, draft=(lower, upper) * half, block_size=block_size)

    @property
    def sizes(self):
        """Return midpoints that are exact for every pair of rows: q in quarters (eighths), p / q in {1/3, 1/2, 2/3}."""
        parts = 4 * self.lm_head.half
        return LatticeSizes(draft=(1, parts), accept=6, final=(1, parts))

    def new_cache(self, num_requests=0):
        return TextCache(num_requests)

    def hidden_ragged(self, batch, cache):
        requests = batch.request_ids.to(torch.int64)
        cache.tokens[requests, batch.positions] = batch.tokens
        before = cache.tokens[requests, (batch.positions - 1).clamp(min=0)]
        before = torch.where(batch.positions > 0, before, 0)
        return self.states[batch.tokens], self.features[before, batch.tokens]

    def forward_ragged(self, batch, cache):
        hidden, features = self.hidden_ragged(batch, cache)
        return self.lm_head(hidden), features


def enlarge(drafter, generator):
    """Draw every weight anew, large enough that the side of the plane depends on all a drafter reads."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.6 if parameter.dim() >= 2 else 1.0))
    return drafter.requires_grad_(False)


def put_head_on_the_grid(head):
    """Give a Markov head of rank 2 latents in {0, 1} (RNN: -1, 1), whatever it reads, and W2 that makes of them log 3 or 0."""
    size = head.markov_w2.weight.shape[0]
    lower = (torch.arange(size) < size // 2).float()[:, None]
    with torch.no_grad():
        if head.kind == "rnn":  # tanh saturates: the first output is -1 or 1, the second always 1
            head.joint_proj.weight.mul_(1e4)
            head.joint_proj.weight[-1] = 0.0
            head.joint_proj.bias[-1] = 1e4
            head.markov_w2.weight.copy_(lower * LOG3 / 2 * torch.ones(1, 2))
            return
        head.markov_w1.weight.copy_(torch.eye(2).repeat(len(head.markov_w1.weight) // 2, 1))
        head.markov_w2.weight.copy_(lower * torch.tensor([[LOG3, 0.0 if head.kind == "vanilla" else LOG3]]))
        if head.kind == "gated":  # the sigmoid saturates to 0 or 1
            head.gate_proj.weight.mul_(1e4)

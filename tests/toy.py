"""A target and a drafter small enough to reason about: the law of the next token depends on the last two tokens only."""

from __future__ import annotations

import torch

import dsspark
from dsspark.decoding import Proposal


class ToyCache:
    """Remembers every token of every request, as a real cache remembers keys; refuses to be used out of step."""

    def __init__(self, count):
        self.texts = [[] for _ in range(count)]
        self.lengths = [0] * count

    def reserve(self, new_lengths):
        self.lengths = new_lengths.tolist()

    def rollback(self, lengths):
        self.texts = [text[:length] for text, length in zip(self.texts, lengths.tolist(), strict=True)]
        self.lengths = lengths.tolist()

    def keep(self, rows):
        self.texts, self.lengths = [self.texts[r] for r in rows], [self.lengths[r] for r in rows]


class ToyTarget:
    """Logits after (a, b) are table[a, b]; the features of a position are its token."""

    def __init__(self, vocab_size, seed=0, scale=1.5):
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, vocab_size)
        bigrams = torch.randn(shape, generator=generator) * scale
        self.table = bigrams + 0.4 * scale * torch.randn(vocab_size, *shape, generator=generator)

    def new_cache(self, num_requests):
        return ToyCache(num_requests)

    def forward_ragged(self, batch, cache):
        rows = []
        for token, position, request in zip(
            batch.tokens.tolist(), batch.positions.tolist(), batch.request_ids.tolist(), strict=True
        ):
            text = cache.texts[request]
            assert position == len(text) < cache.lengths[request], "the cache is out of step"
            rows.append(self.table[text[-1] if text else 0, token])
            text.append(token)
        logits = torch.stack(rows) if rows else self.table[0, :0]
        return logits, batch.tokens[:, None].float()

    def greedy(self, prompt, count):
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.table[text[-2] if len(text) > 1 else 0, text[-1]].argmax()))
        return text[len(prompt) :]


class ToyContext:
    def __init__(self, count):
        self.texts = [[] for _ in range(count)]

    def keep(self, rows):
        self.texts = [self.texts[r] for r in rows]


class ToyDrafter:
    """Draws each token from a blurred copy of the target's table, as a block drafted by `draft_block` with a Markov head."""

    def __init__(self, target, block_size=3, blur=0.5, confidence=True):
        vocab_size = target.table.shape[0]
        generator = torch.Generator().manual_seed(99)
        noise = torch.randn(vocab_size, vocab_size, generator=generator)
        self.head = dsspark.MarkovHead(vocab_size, vocab_size)
        with torch.no_grad():
            self.head.markov_w1.weight.copy_(torch.eye(vocab_size))
            self.head.markov_w2.weight.copy_((target.table.mean(0) + blur * noise).T)
        self.block_size, self.confidence, self.sts_temperatures = block_size, confidence, None

    def new_context(self, num_requests):
        return ToyContext(num_requests)

    def extend(self, context, features, request_ids):
        for token, request in zip(features[:, 0].long().tolist(), request_ids.tolist(), strict=True):
            context.texts[request].append(token)

    def propose(self, anchors, context, uniforms, *, temperature, keep_logits=True, backend="auto"):
        base = torch.zeros(len(anchors), self.block_size, self.head.markov_w2.weight.shape[0])
        draft = dsspark.draft_block(
            base, anchors, self.head, uniforms, temperature=temperature, keep_logits=keep_logits, backend=backend
        )
        previous = torch.cat((anchors[:, None], draft.tokens[:, :-1]), dim=1)
        logits = (previous % 5).float() - 1.0  # reads x_{k-1} only
        return Proposal(draft, logits if self.confidence else None)

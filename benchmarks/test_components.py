"""Times of the references on this machine; `make bench` runs them. Parity is checked before anything is timed."""

from __future__ import annotations

import pytest
import torch

import dsspark

GAMMA, RANK = 7, 256
SIZES = [(1, 32_000), (8, 32_000), (32, 32_000)]


def round_inputs(num_requests: int, vocab_size: int):
    generator = torch.Generator().manual_seed(0)
    head = dsspark.MarkovHead(vocab_size, RANK).requires_grad_(False)
    base = torch.randn(num_requests, GAMMA, vocab_size, generator=generator)
    anchors = torch.randint(vocab_size, (num_requests,), generator=generator)
    return head, base, anchors, dsspark.Uniforms.draw(num_requests, GAMMA, generator)


@pytest.mark.parametrize(("num_requests", "vocab_size"), SIZES)
@pytest.mark.benchmark(group="draft_block")
def test_draft_block(benchmark, num_requests, vocab_size):
    head, base, anchors, uniforms = round_inputs(num_requests, vocab_size)
    block = benchmark(dsspark.draft_block, base, anchors, head, uniforms)
    again = dsspark.DraftBlock.from_logits(block.tokens, block.logits)
    assert torch.equal(block.token_probs, again.token_probs)
    floor = GAMMA * (head.markov_w2.weight.numel() + 2 * num_requests * vocab_size) * 4
    benchmark.extra_info.update(num_requests=num_requests, vocab_size=vocab_size, floor_bytes=floor)


@pytest.mark.parametrize(("num_requests", "vocab_size"), SIZES)
@pytest.mark.benchmark(group="verify")
def test_verify(benchmark, num_requests, vocab_size):
    head, base, anchors, uniforms = round_inputs(num_requests, vocab_size)
    block = dsspark.draft_block(base, anchors, head, uniforms)
    lengths = torch.full((num_requests,), GAMMA)
    batch = dsspark.pack(anchors, block.tokens, lengths, torch.zeros_like(anchors))
    noise = torch.randn(len(batch.tokens), vocab_size, generator=torch.Generator().manual_seed(1))
    logits = noise / 4
    rows = (torch.arange(len(batch.tokens)).reshape(num_requests, GAMMA + 1))[:, :GAMMA].flatten()
    logits[rows] += block.logits.flatten(0, 1)
    result = benchmark(dsspark.verify, logits, batch, block, uniforms)
    assert result.valid.all()
    accepted = result.num_accepted.float().mean().item()
    benchmark.extra_info.update(num_requests=num_requests, vocab_size=vocab_size, mean_accepted=accepted)


@pytest.mark.parametrize("num_requests", [8, 128, 1024])
@pytest.mark.benchmark(group="schedule")
def test_schedule(benchmark, num_requests):
    survival = dsspark.survival(torch.randn(num_requests, 16, generator=torch.Generator().manual_seed(0)) + 1)
    table = dsspark.CostTable(1.0 / (1.0 + 0.01 * torch.arange(17 * num_requests + 1)))
    lengths = benchmark(dsspark.schedule, survival, table)
    assert 0 < int(lengths.sum()) < 16 * num_requests
    benchmark.extra_info.update(num_requests=num_requests, admitted=int(lengths.sum()))


@pytest.mark.benchmark(group="fit_sts")
def test_fit_sts(benchmark):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50_000, GAMMA, generator=generator) * 2 + 1
    truth = torch.rand(50_000, GAMMA, generator=generator) < torch.sigmoid(logits / 2)
    accepted = truth.cumprod(dim=1)
    fit = benchmark(dsspark.fit_sts, logits, accepted)
    assert fit.ece_after.mean() < fit.ece_before.mean() / 3
    benchmark.extra_info.update(samples=50_000, temperatures=97)

"""`generate` end to end on the kernels: the same texts as on the references, under every policy."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from toy import ToyDrafter, ToyTarget

import dsspark
from dsspark import CostTable, Filters, _dispatch
from dsspark.decoding import generate
from dsspark.serving.policies import FixedLength

V = 11
PROMPTS = [[1, 2, 3], [4]]


def texts(backend, **options):
    target = ToyTarget(V)
    return generate(target, ToyDrafter(target), PROMPTS, 6, backend=backend, seeds=[5, 6], **options)


@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_bodies_give_the_same_texts(keep_logits, temperature):
    options = {"keep_logits": keep_logits, "temperature": temperature}
    expected, found = texts("reference", **options), texts("triton", **options)
    assert found.tokens == expected.tokens
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert found.statistics.tokens_per_round == expected.statistics.tokens_per_round


def test_both_bodies_give_the_same_texts_under_filters_and_a_partial_block():
    options = {"policy": FixedLength(2), "filters": Filters(top_k=5, top_p=0.9), "draft_temperature": 0.5}
    assert texts("triton", **options).tokens == texts("reference", **options).tokens


def test_every_component_of_a_round_is_a_kernel(monkeypatch):
    """No component falls back: with the references out of reach of the dispatch, the round still runs."""
    used = []
    original = _dispatch._kernel_module

    def recording(component):
        used.append(component)
        return original(component)

    monkeypatch.setattr(_dispatch, "_kernel_module", recording)
    texts("triton")
    assert {"markov", "verification", "rejection"} <= set(used)


def test_a_round_written_out_is_the_same_on_both_bodies():
    """Draft, survival, schedule, pack, verify, as an engine calls them."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(3, 4, 37, generator=generator)
    anchors = torch.tensor([1, 2, 3])
    head = dsspark.MarkovHead(37, 8)
    hidden, target = torch.randn(3, 4, 6, generator=generator), torch.randn(15, 37, generator=generator)
    uniforms = dsspark.Uniforms.from_seeds([1, 2, 3], [0, 0, 0], 4)
    table = CostTable(1 / (1 + 0.02 * torch.arange(40, dtype=torch.float64)))
    weight = torch.randn(1, 6 + 8, generator=generator)
    rounds = []
    for backend in ("reference", "triton"):
        block = dsspark.draft_block(base, anchors, head, uniforms, backend=backend)
        previous = torch.cat((anchors[:, None], block.tokens[:, :-1]), dim=1)
        logits = dsspark.confidence_logits(hidden, previous, head.markov_w1.weight.detach(), weight, backend=backend)
        survival = dsspark.survival(logits, backend=backend)
        lengths = dsspark.schedule(survival, table, backend=backend)
        budget = dsspark.plan_budget(survival, table, backend=backend)
        admitted = dsspark.admit(survival, budget, backend=backend)
        batch = dsspark.pack(anchors, block.tokens, lengths, torch.zeros(3, dtype=torch.int64), backend=backend)
        result = dsspark.verify(target[: len(batch.tokens)], batch, block, uniforms, backend=backend)
        parts = (block.tokens, lengths, budget, admitted, batch.tokens, result.tokens, result.num_accepted)
        rounds.append([part.tolist() for part in parts])
    assert rounds[0] == rounds[1]
    assert sum(rounds[0][1]) > 0

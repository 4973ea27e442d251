"""The eager baselines do what the references do: a comparison with a wrong baseline says nothing."""

from __future__ import annotations

import pytest
import torch

import dsspark
from benchmarks import baselines
from benchmarks.cases import COMPETENT, COMPILED, KERNEL, PUBLIC, REFERENCE
from benchmarks.sizes import Size
from benchmarks.tasks import TASKS
from dsspark.reference.sampling import sample_two_level
from dsspark.testing.laws import g_test

SMALL = Size(
    num_requests=6, block_size=4, vocab_size=700, rank=8, samples=3000, temperatures=9, hidden_size=32, context=24
)


def two_level(weights, uniforms):
    return sample_two_level(weights, uniforms)


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("name", [PUBLIC, COMPETENT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_baseline_agrees_with_the_reference(task, name, dtype):
    case = TASKS[task][1](Size(**{**vars(SMALL), "dtype": dtype}), "cpu")
    case.check(name)


@pytest.mark.parametrize("task", list(TASKS))
def test_every_task_has_two_eager_forms_a_reference_and_a_kernel(task):
    case = TASKS[task][1](SMALL, "cpu")
    assert (
        {REFERENCE, KERNEL, PUBLIC, COMPETENT}
        <= set(case.contenders)
        <= {REFERENCE, KERNEL, PUBLIC, COMPETENT, COMPILED}
    )
    assert case.floor_bytes > 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("draft", [baselines.draft_block_public, baselines.draft_block_competent])
def test_a_drafting_baseline_keeps_the_law_at_every_temperature(draft, temperature, generator):
    head = dsspark.MarkovHead(300, 8).requires_grad_(False)
    base, anchors = torch.randn(5, 3, 300, generator=generator), torch.arange(5)
    uniforms = dsspark.Uniforms.draw(5, 3, generator)
    expected = dsspark.draft_block(base, anchors, head, uniforms, temperature=temperature)
    got = draft(base, anchors, head, uniforms, temperature, two_level)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.allclose(got.token_probs, expected.token_probs, rtol=1e-5)
    assert torch.allclose(got.logits, expected.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["public", "competent"])
def test_a_verifying_baseline_emits_what_the_reference_emits(name, temperature, generator):
    target = torch.randn(64, 5, 40, generator=generator)
    logits, tokens = torch.randn(64, 4, 40, generator=generator), torch.randint(40, (64, 4), generator=generator)
    uniforms = dsspark.Uniforms.draw(64, 4, generator)
    draft = dsspark.DraftBlock.from_logits(tokens, logits, temperature)
    anchors, full = torch.zeros(64, dtype=torch.int64), torch.full((64,), 4)
    batch = dsspark.pack(anchors, tokens, full, anchors)
    expected = dsspark.verify(target.flatten(0, 1), batch, draft, uniforms, temperature=temperature)
    if name == "public":
        got = baselines.verify_public(target, logits, tokens, uniforms, temperature, two_level)
    else:
        got = baselines.verify_competent(target, logits, tokens, draft.token_probs, uniforms, temperature, two_level)
    assert torch.equal(got.num_accepted.int(), expected.num_accepted)
    assert torch.equal(got.final, expected.tokens.gather(1, got.num_accepted[:, None])[:, 0])
    assert 0 < got.num_accepted.float().mean() < 4


@pytest.mark.parametrize("draw", [baselines.multinomial, baselines.exponential_race, baselines.inverse_cdf])
def test_a_draw_has_the_law_of_its_weights(draw, generator):
    torch.manual_seed(20260707)  # two of them read the global generator
    law = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1])
    drawn = draw(law.expand(20_000, -1), torch.rand(20_000, 2, generator=generator))
    assert g_test(torch.bincount(drawn, minlength=5), law).passed
    assert not g_test(torch.bincount(drawn, minlength=5), torch.full((5,), 0.2)).passed


def test_the_single_level_draw_is_exact_on_a_lattice():
    counts = torch.tensor([3.0, 0.0, 1.0, 4.0])
    middle = (torch.arange(8) + 0.5) / 8
    drawn = baselines.inverse_cdf(counts.expand(8, -1), torch.stack((middle, middle), dim=1))
    assert torch.bincount(drawn, minlength=4).tolist() == [3, 0, 1, 4]
    first = baselines.inverse_cdf(torch.tensor([[0.0, 1.0, 1.0]]), torch.zeros(1, 2))
    assert first.tolist() == [1]  # u = 0 draws nothing of weight zero


@pytest.mark.parametrize("fit", [baselines.fit_sts_public, baselines.fit_sts_competent])
def test_the_bins_of_a_fit_are_floors(fit):
    # Two groups whose errors cancel if they share a bin, as they would if p * 2 were rounded; apart, T = 100 halves them.
    probability = torch.tensor([0.4] * 5 + [0.6] * 5)
    outcomes = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0, 0, 0])[:, None]
    logits, grid = torch.logit(probability)[:, None], torch.tensor([1.0, 100.0], dtype=torch.float64)
    assert fit(logits, outcomes, grid, num_bins=2).tolist() == [100.0]
    assert dsspark.fit_sts(logits, outcomes, grid=grid, num_bins=2).temperatures.tolist() == [100.0]


def test_the_public_acceptance_is_wrong_at_zero_as_its_note_says():
    target, tokens = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]]), torch.tensor([[1]])
    uniforms = dsspark.Uniforms(draft=torch.zeros(1, 1, 2), accept=torch.zeros(1, 1), final=torch.zeros(1, 2))
    logits = torch.zeros(1, 1, 2)
    assert baselines.verify_public(target, logits, tokens, uniforms, draw=two_level).num_accepted.tolist() == [1]
    competent = baselines.verify_competent(target, logits, tokens, torch.full((1, 1), 0.5), uniforms, draw=two_level)
    assert competent.num_accepted.tolist() == [0]


def test_a_wrong_baseline_is_seen():
    case = TASKS["scheduler"][1](SMALL, "cpu")
    with pytest.raises(AssertionError, match="lengths"):
        case.agree(case.contenders[REFERENCE].run(case.inputs) + 1, case.contenders[REFERENCE].run(case.inputs))
    case = TASKS["rejection"][1](SMALL, "cpu")
    other = case.contenders[REFERENCE].run(case.inputs)
    wrong = baselines.EagerVerification(num_accepted=(other.num_accepted + 1).long(), final=other.tokens[:, 0])
    with pytest.raises(AssertionError, match="num_accepted"):
        case.agree(wrong, other)

"""Laws of drafting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dsspark
from dsspark import MarkovHead, Uniforms
from dsspark.testing import strategies
from dsspark.testing.oracles import exact_law_of_row, markov_logits

KINDS = ["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class DraftCase:
    base: Tensor
    anchors: Tensor
    head: MarkovHead | None
    hidden: Tensor
    uniforms: Uniforms
    temperature: Tensor
    cell: int


@st.composite
def draft_cases(draw, edges=True, min_block=1):
    requests, gamma = draw(st.integers(1, 4)), draw(st.integers(min_block, 4))
    vocab, hidden_size = draw(st.integers(1, 7) | st.just(37)), 3
    torch.manual_seed(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from([None, *KINDS]))
    rows = draw(strategies.logit_rows(requests * gamma, vocab))
    ids = st.integers(0, vocab - 1)
    return DraftCase(
        base=rearrange(rows, "(r k) v -> r k v", r=requests),
        anchors=torch.tensor([draw(ids) for _ in range(requests)]),
        head=None if kind is None else MarkovHead(vocab, 2, kind, hidden_size=hidden_size),
        hidden=torch.randn(requests, gamma, hidden_size),
        uniforms=draw(strategies.uniforms(requests, gamma, edges)),
        temperature=torch.tensor([draw(st.sampled_from([1.0, 0.0, 0.5, 1.7])) for _ in range(requests)]),
        cell=draw(st.integers(1, 4)) if vocab < 37 else draw(st.sampled_from([1, 5, 8, 12, 64])),
    )


def draft(case, backend, requests=None, positions=None, **changes):
    r = slice(None) if requests is None else requests
    noise = Uniforms(
        draft=case.uniforms.draft[r][:, :positions],
        accept=case.uniforms.accept[r][:, :positions],
        final=case.uniforms.final[r],
    )
    base = changes.pop("base", case.base)
    return dsspark.draft_block(
        base[r][:, :positions],
        case.anchors[r],
        case.head,
        noise,
        temperature=case.temperature[r],
        hidden=case.hidden[r][:, :positions],
        cell=changes.pop("cell", case.cell),
        backend=backend,
        **changes,
    )


@given(case=draft_cases())
def test_a_drawn_token_has_positive_probability_and_it_is_told(backend, case):
    block = draft(case, backend)
    for r in range(len(case.base)):
        for k in range(case.base.shape[1]):
            law = exact_law_of_row(block.logits[r, k], float(case.temperature[r]))
            q = law[block.tokens[r, k]]
            assert q > 0
            torch.testing.assert_close(block.token_probs[r, k].double(), q, rtol=2e-4, atol=1e-30)


@pytest.mark.parametrize("kind", KINDS)
@given(case=draft_cases(), seed=st.integers(0, 1000))
def test_rows_follow_equations_four_to_six(backend, kind, case, seed):
    """What is kept is the base plus the bias of the tokens that were drawn, whatever the head."""
    torch.manual_seed(seed)
    head = MarkovHead(case.base.shape[2], 2, kind, hidden_size=case.hidden.shape[2])
    base = case.base.float().clamp(-100, 100)
    block = draft(replace(case, head=head), backend, base=base)
    expected = markov_logits(base, case.anchors, block.tokens, head, case.hidden)
    torch.testing.assert_close(block.logits, expected, atol=1e-4, rtol=1e-4)


@given(case=draft_cases())
def test_temperature_zero_takes_the_argmax(backend, case):
    block = dsspark.draft_block(
        case.base, case.anchors, case.head, case.uniforms, temperature=0.0, hidden=case.hidden, backend=backend
    )
    assert torch.equal(block.tokens, block.logits.argmax(dim=-1))
    assert (block.token_probs == 1).all()


@given(case=draft_cases(edges=False), data=st.data())
def test_splitting_and_reordering_the_batch_change_nothing(backend, case, data):
    order = data.draw(st.permutations(range(len(case.base))))
    kept = order[: data.draw(st.integers(1, len(order)))]
    assert torch.equal(draft(case, backend, requests=kept).tokens, draft(case, backend).tokens[kept])


@given(case=draft_cases(edges=False, min_block=2))
def test_a_longer_block_begins_with_the_shorter_one(backend, case):
    """x_k depends on what is left of it only."""
    whole = draft(case, backend)
    for positions in range(1, case.base.shape[1]):
        assert torch.equal(draft(case, backend, positions=positions).tokens, whole.tokens[:, :positions])


@given(case=draft_cases(edges=False), shift=st.integers(-64, 64))
def test_shifting_logits_changes_nothing_without_a_head(backend, case, shift):
    base = torch.where(case.base == -torch.inf, -torch.inf, (case.base.float().clamp(-100, 100) * 8).round() / 8)
    blocks = [
        dsspark.draft_block(
            b, case.anchors, None, case.uniforms, temperature=case.temperature, cell=case.cell, backend=backend
        )
        for b in (base, base + shift)
    ]
    assert torch.equal(blocks[0].tokens, blocks[1].tokens)
    assert torch.equal(blocks[0].token_probs, blocks[1].token_probs)


@given(case=draft_cases(edges=False))
def test_not_keeping_the_logits_draws_the_same_from_float32(backend, case):
    base = case.base.float()
    kept = draft(case, backend, base=base)
    lean = draft(case, backend, base=base, keep_logits=False)
    assert lean.logits is None
    assert torch.equal(kept.tokens, lean.tokens)
    assert torch.equal(kept.token_probs, lean.token_probs)


@given(case=draft_cases(edges=False, min_block=2))
def test_the_correction_reads_the_sampled_predecessor(backend, case):
    """With W1 one-hot and W2 the identity, position k gains exactly at the token of position k - 1: the anchor at the first."""
    vocab = case.base.shape[2]
    head = MarkovHead(vocab, vocab)
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.eye(vocab))
        head.markov_w2.weight.copy_(torch.eye(vocab))
    base = torch.zeros(case.base.shape)
    block = dsspark.draft_block(base, case.anchors, head, case.uniforms, cell=case.cell, backend=backend)
    previous = torch.cat((case.anchors[:, None], block.tokens[:, :-1]), dim=1)
    assert torch.equal(block.logits, torch.nn.functional.one_hot(previous, vocab).float())

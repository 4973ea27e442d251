"""Laws of verification that hold for every round, whatever the logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsspark
from dsspark import DraftBlock, Uniforms
from dsspark.testing import strategies
from dsspark.testing.boundary import edge_failures
from dsspark.testing.laws import law_error
from dsspark.testing.oracles import exact_law_of_row
from dsspark.testing.sampler_audit import threshold_rows
from property_tests.conftest import BACKENDS

WIDE = {"max_vocab": 37, "backends": BACKENDS, "recomputed": True}
"""Of rounds drafted by either body, with and without their logits, also on a vocabulary of several blocks and a tail."""


def verify(case, backend, **changes):
    parts = {name: getattr(case, name) for name in ("target_logits", "batch", "draft", "uniforms")}
    parts.update(changes)
    temperature, cell = parts.pop("temperature", case.temperature), parts.pop("cell", case.cell)
    return dsspark.verify(*parts.values(), temperature=temperature, cell=cell, backend=backend)


def rows_of(case, request):
    start, end = case.batch.cu_seqlens[request].item(), case.batch.cu_seqlens[request + 1].item()
    return range(start, end)


def take(draft, requests):
    """Return some requests' drafts."""
    parts = ("tokens", "token_probs", "row_max", "row_sum", "temperature", "logits", "latent", "base_logits")
    return replace(draft, **{n: getattr(draft, n)[requests] for n in parts if getattr(draft, n) is not None})


def pick(case, requests):
    """Return the round of some of the requests, in another order."""
    rows = [row for r in requests for row in rows_of(case, r)]
    index = torch.tensor(requests, dtype=torch.int64)
    draft, zeros = take(case.draft, index), torch.zeros(len(requests), dtype=torch.int64)
    noise = Uniforms(**{n: getattr(case.uniforms, n)[index] for n in ("draft", "accept", "final")})
    return replace(
        case,
        target_logits=case.target_logits[rows],
        batch=dsspark.pack(zeros, draft.tokens, case.lengths[index], zeros),
        draft=draft,
        uniforms=noise,
        temperature=case.temperature[index],
        lengths=case.lengths[index],
    )


@given(case=strategies.verify_rounds(**WIDE))
def test_what_is_emitted_is_possible_and_well_formed(backend, case):
    result = verify(case, backend)
    assert result.valid.all()
    assert torch.equal(result.num_emitted, result.num_accepted + 1)
    assert (result.num_accepted <= case.lengths).all()
    column = torch.arange(result.tokens.shape[1])
    assert torch.equal(result.tokens >= 0, column < result.num_emitted[:, None])
    for r in range(len(case.lengths)):
        n = int(result.num_accepted[r])
        assert result.tokens[r, :n].tolist() == case.draft.tokens[r, :n].tolist()
        for k, row in zip(range(n + 1), rows_of(case, r), strict=False):
            p = exact_law_of_row(case.target_logits[row], float(case.temperature[r]))[result.tokens[r, k]]
            assert p > 0
            torch.testing.assert_close(result.logprobs[r, k].double(), p.log(), atol=2e-4, rtol=1e-5)
    assert (result.logprobs[result.tokens < 0] == 0).all()


@given(data=st.data())
def test_p_equal_to_q_accepts_every_draft(backend, data):
    """To the last bit, if one body computes both."""
    case = data.draw(strategies.verify_rounds(backends=[backend]))
    logits = case.draft.logits
    if logits is None:  # a deterministic proposal: p is one-hot at the token
        logits = torch.full((*case.draft.tokens.shape, case.target_logits.shape[1]), -torch.inf)
        logits.scatter_(2, case.draft.tokens[..., None], 0.0)
    rows = case.target_logits.to(logits.dtype).clone()
    for r, length in enumerate(case.lengths.tolist()):
        rows[list(rows_of(case, r))[:length]] = logits[r, :length]
    result = verify(case, backend, target_logits=rows, temperature=case.draft.temperature)
    assert torch.equal(result.num_accepted.long(), case.lengths)


@given(case=strategies.verify_rounds(max_vocab=5, backends=BACKENDS), split=st.integers(1, 4))
def test_disjoint_supports_reject_every_draft(backend, case, split):
    """The target lives on ids the draft never draws."""
    vocab = case.target_logits.shape[1]
    rows = torch.cat((torch.full((len(case.target_logits), vocab), -torch.inf), case.target_logits.float()), dim=1)
    result = verify(case, backend, target_logits=rows, cell=split)
    assert (result.num_accepted == 0).all()
    assert (result.tokens[:, 0] >= vocab).all()


@given(case=strategies.verify_rounds(edges=False, backends=BACKENDS), shift=st.integers(-64, 64))
def test_shifting_logits_changes_nothing(backend, case, shift):
    rows = (case.target_logits.float().clamp(-100, 100) * 8).round() / 8  # so that the shift is exact
    rows = torch.where(case.target_logits == -torch.inf, -torch.inf, rows)
    first = verify(case, backend, target_logits=rows)
    second = verify(case, backend, target_logits=rows + shift)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.logprobs, second.logprobs)


@given(case=strategies.verify_rounds(edges=False, **WIDE), extra=st.integers(1, 5))
def test_padding_the_vocabulary_with_minus_infinity_changes_nothing(backend, case, extra):
    rows = torch.nn.functional.pad(case.target_logits.float(), (0, extra), value=-torch.inf)
    assert torch.equal(verify(case, backend, target_logits=rows).tokens, verify(case, backend).tokens)


@given(case=strategies.verify_rounds(edges=False, backends=BACKENDS), data=st.data())
def test_permuting_the_vocabulary_permutes_what_is_accepted(backend, case, data):
    """Acceptance looks at p and q of the token only; where u is not within rounding of the ratio, it is the same."""
    vocab = case.target_logits.shape[1]
    order = torch.tensor(data.draw(st.permutations(range(vocab))))
    new_id = order.argsort()
    logits = None if case.draft.logits is None else case.draft.logits[:, :, order]
    tokens = new_id[case.draft.tokens]
    if logits is None or bool((case.draft.temperature == 0).any()):
        draft, original = DraftBlock.point(tokens), DraftBlock.point(case.draft.tokens)
    else:
        draft = DraftBlock.from_logits(tokens, logits, case.draft.temperature)
        original = case.draft
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    batch = dsspark.pack(zeros, tokens, case.lengths, zeros)
    temperature = case.temperature.clamp(min=0.25)  # greedy ties go to the lowest id, which a permutation moves
    first = verify(case, backend, draft=original, temperature=temperature)
    second = verify(
        case, backend, target_logits=case.target_logits[:, order], batch=batch, draft=draft, temperature=temperature
    )
    assert torch.equal(first.num_accepted, second.num_accepted)
    for r, n in enumerate(first.num_accepted.tolist()):
        assert torch.equal(new_id[first.tokens[r, :n]], second.tokens[r, :n])


@given(case=strategies.verify_rounds(edges=False, **WIDE), data=st.data())
def test_splitting_and_reordering_the_batch_change_nothing(backend, case, data):
    whole = verify(case, backend)
    order = data.draw(st.permutations(range(len(case.lengths))))
    kept = order[: data.draw(st.integers(1, len(order)))]
    part = verify(pick(case, kept), backend)
    assert torch.equal(part.tokens, whole.tokens[kept])
    assert torch.equal(part.num_emitted, whole.num_emitted[kept])


@given(case=strategies.verify_rounds(edges=False, **WIDE), position=st.integers(0, 4))
def test_an_empty_request_beside_them_changes_nothing(backend, case, position):
    """A request of no drafts is one more anchor row, wherever it stands."""
    num_requests = len(case.lengths)
    position = min(position, num_requests)
    order = [*range(position), position - 1 if position else 0, *range(position, num_requests)]
    others = [i for i in range(num_requests + 1) if i != position]
    wider = pick(case, order)
    lengths = wider.lengths.clone()
    lengths[position] = 0
    zeros = torch.zeros(num_requests + 1, dtype=torch.int64)
    batch = dsspark.pack(zeros, wider.draft.tokens, lengths, zeros)
    kept = [row for i in range(num_requests + 1) for row in list(rows_of(wider, i))[: int(lengths[i]) + 1]]
    wider = replace(wider, target_logits=wider.target_logits[kept], batch=batch, lengths=lengths)
    assert torch.equal(verify(wider, backend).tokens[others], verify(case, backend).tokens)


@given(case=strategies.verify_rounds(**WIDE))
def test_a_greedy_target_emits_its_argmax(backend, case):
    result = verify(case, backend, temperature=0.0)
    for r in range(len(case.lengths)):
        best = case.target_logits[list(rows_of(case, r))].argmax(dim=-1)
        emitted = result.tokens[r, : int(result.num_emitted[r])]
        assert torch.equal(emitted, best[: len(emitted)])


@given(case=strategies.verify_rounds(edges=False, **WIDE), top_k=st.integers(1, 7))
def test_top_k_is_verification_of_the_masked_rows(backend, case, top_k):
    """A filter on p is a mask on the target's logits: ties at the k-th go to the lowest ids."""
    order = case.target_logits.sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(dim=-1)
    masked = torch.where(rank < top_k, case.target_logits.float(), -torch.inf)
    filtered = dsspark.verify(
        case.target_logits.float(),
        case.batch,
        case.draft,
        case.uniforms,
        temperature=case.temperature,
        filters=dsspark.Filters(top_k=top_k),
        cell=case.cell,
        backend=backend,
    )
    assert torch.equal(filtered.tokens, verify(case, backend, target_logits=masked).tokens)


@pytest.mark.parametrize("cell", [1, 2, 3, 4, 64])
def test_every_edge_comes_out_right(backend, cell):
    """u = 0, u = p / q, the largest u; residuals of 2e-9 and of nothing; placeholder tokens."""
    assert edge_failures(partial(dsspark.verify, backend=backend), cell=cell) == []


@settings(max_examples=4)
@given(seed=st.integers(0, 10_000), cell=st.sampled_from([8, 5, 64]))
def test_every_threshold_is_min_one_p_over_q_to_the_last_bits(backend, seed, cell):
    """Bisected on rows whose probabilities reach down to 1e-9, where an epsilon shows."""
    # A row of the interpreted kernels costs milliseconds, and each token of the vocabulary dozens of them.
    target, draft, bonus = threshold_rows(seed, 6 if backend == "triton" else 37)
    error = law_error(
        target,
        draft,
        bonus,
        cell=cell,
        draft_fn=partial(dsspark.draft_block, backend=backend),
        verify_fn=partial(dsspark.verify, backend=backend),
    )
    assert error.max_threshold_ulps < 64
    assert error.in_eps < 4
    assert not error.final_varies

"""Acceptance, residual, bonus: exact counts on grid laws, an oracle on random ones, and every way a round can be bad."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import TOP, every, law_counts, logits_of, midpoints

from dsspark import DraftBlock, Filters, MarkovHead, PackedBatch, Uniforms, draft_block, pack, verify
from dsspark.reference.rejection import accepts, residual

V = 19


def round_of(lengths, block_size, generator, vocab=V, dtype=torch.float32, temperature=1.0, target_temperature=1.0):
    """Return (target_logits, batch, draft, uniforms) of a random ragged round."""
    requests = len(lengths)
    draft_logits = torch.randn(requests, block_size, vocab, generator=generator).to(dtype) * 2
    uniforms = Uniforms.draw(requests, block_size, generator)
    anchors = torch.zeros(requests, dtype=torch.int64)
    draft = draft_block(draft_logits, anchors, None, uniforms, temperature=temperature, cell=5)
    batch = pack(anchors, draft.tokens, torch.tensor(lengths, dtype=torch.int64), anchors)
    rows = torch.randn(len(batch.tokens), vocab, generator=generator).to(dtype) * 2
    return rows, batch, draft, uniforms


def oracle(target_logits, batch, draft, uniforms, temperature, cell, vocab=V):
    """Speculative sampling for one request at a time, in plain Python, straight from the definition."""

    def law(row, t):
        top = max(row)
        if t == 0:
            return [1.0 if v == row.index(top) else 0.0 for v in range(len(row))]
        weights = [math.exp((x - top) / t) for x in row]
        return [w / math.fsum(weights) for w in weights]

    def pick(weights, u0, u1):
        cells = [weights[i : i + cell] for i in range(0, len(weights), cell)]
        running, c = 0.0, 0
        for c, entries in enumerate(cells):
            running += sum(entries)
            if running > u0 * sum(weights):
                break
        running, i = 0.0, 0
        for i, w in enumerate(cells[c]):
            running += w
            if running > u1 * sum(cells[c]):
                break
        return c * cell + i

    emitted = []
    for r in range(batch.num_requests):
        start, end = int(batch.cu_seqlens[r]), int(batch.cu_seqlens[r + 1])
        tokens = []
        for k in range(end - start):
            p = law(target_logits[start + k].tolist(), float(temperature[r]))
            weights = p
            if k < end - start - 1:
                x = int(draft.tokens[r, k])
                q = law(draft.logits[r, k].tolist(), float(draft.temperature[r]))
                if float(uniforms.accept[r, k]) * q[x] < p[x]:
                    tokens.append(x)
                    continue
                weights = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
            tokens.append(pick(weights, *uniforms.final[r].tolist()))
            break
        emitted.append(tokens)
    return emitted


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_agrees_with_the_definition(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 0, 4, 1, 2, 4, 0, 4]
    temperature = torch.tensor([1.0, 0.0, 0.6, 1.7, 0.0, 1.0, 1.0, 0.3])
    draft_temperature = torch.tensor([1.0, 1.0, 0.0, 1.7, 0.0, 0.8, 1.0, 0.3])
    rows, batch, draft, uniforms = round_of(lengths, 4, generator, dtype=dtype, temperature=draft_temperature)
    result = verify(rows, batch, draft, uniforms, temperature=temperature, cell=5)
    expected = oracle(rows.double(), batch, draft, uniforms, temperature, cell=5)
    assert result.valid.all()
    for r, tokens in enumerate(expected):
        assert result.tokens[r].tolist() == tokens + [-1] * (5 - len(tokens))
        assert result.num_emitted[r] == len(tokens)
        assert result.num_accepted[r] == len(tokens) - 1
        for k, token in enumerate(tokens):
            row = rows[int(batch.cu_seqlens[r]) + k].double()
            t = float(temperature[r])
            logprob = 0.0 if t == 0 else torch.log_softmax(row / t, -1)[token].item()
            assert result.logprobs[r, k].item() == pytest.approx(logprob, abs=2e-5)
        assert (result.logprobs[r, len(tokens) :] == 0).all()


GRID_LAWS = [
    # q, p, p after an accepted first token, uniforms needed: draft, accept, final
    ([1, 1, 2], [2, 1, 1], [1, 2, 1], 4, 2, 4),
    ([2, 1, 1], [1, 1, 2], [0, 1, 3], 4, 2, 4),
    ([4, 0, 0], [1, 2, 1], [1, 1, 2], 4, 4, 12),  # a point where p is spread: residual (0, 2, 1)/3
    ([0, 2, 2], [4, 0, 0], [4, 0, 0], 4, 1, 4),  # disjoint: always rejected
    ([1, 2, 1], [1, 2, 1], [1, 2, 1], 4, 1, 4),  # equal: always accepted
    ([3, 3, 2], [2, 2, 4], [5, 2, 1], 8, 3, 8),
]


@pytest.mark.parametrize(("q", "p", "bonus", "n_draft", "n_accept", "n_final"), GRID_LAWS)
def test_the_emitted_law_is_the_targets_on_integers(q, p, bonus, n_draft, n_accept, n_final):
    grid = every(midpoints(n_draft), midpoints(n_accept), midpoints(n_final))
    count = len(grid)
    half = torch.full((count, 1), 0.5)
    uniforms = Uniforms(
        draft=torch.cat((half, grid[:, :1]), 1)[:, None], accept=grid[:, 1:2], final=torch.cat((half, grid[:, 2:]), 1)
    )
    anchors = torch.zeros(count, dtype=torch.int64)
    draft = draft_block(logits_of(q).expand(count, 1, -1), anchors, None, uniforms, cell=4)
    batch = pack(anchors, draft.tokens, torch.ones(count, dtype=torch.int64), anchors)
    rows = torch.stack((logits_of(p), logits_of(bonus))).repeat(count, 1)
    result = verify(rows, batch, draft, uniforms, cell=4)
    total = sum(p)
    assert law_counts(result.tokens[:, 0], 3) == [count * n // total for n in p]
    accepted = result.num_accepted == 1
    overlap = sum(min(a, b) for a, b in zip(p, q, strict=True))
    assert int(accepted.sum()) * total == count * overlap
    # given acceptance, the bonus has the law of its own row
    assert [n * total for n in law_counts(result.tokens[accepted, 1], 3)] == [int(accepted.sum()) * n for n in bonus]


def test_the_acceptance_test_at_its_boundaries():
    tiny = 2.0**-149
    u = torch.tensor([0.0, 0.0, 0.5, 0.5 - 2.0**-25, TOP, TOP, 0.0, TOP, TOP])
    p = torch.tensor([0.0, 1e-30, 0.25, 0.25, 0.25, 0.5, torch.nan, 7 * tiny, 0.0])
    q = torch.tensor([0.5, 1.0, 0.5, 0.5, 0.25, 0.25, 0.5, 7 * tiny, 0.0])
    assert accepts(u, p, q).tolist() == [False, True, False, True, True, True, False, True, False]


def test_the_residual_falls_back_to_p_only_where_it_is_empty():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    q = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.5 - 2.0**-25, 0.5, 2.0**-25]])
    assert residual(p, q).tolist() == [[0.5, 0.25, 0.25], [0.0, 0.0, 0.25], [2.0**-25, 0.0, 0.0]]


def test_an_accepted_token_never_has_p_zero():
    tokens = torch.tensor([[1], [-1], [V + 3]])
    rows = torch.full((6, V), -torch.inf)
    rows[:, 4] = 0.0
    batch = pack(
        torch.zeros(3, dtype=torch.int64), tokens, torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    )
    uniforms = Uniforms(draft=torch.zeros(3, 1, 2), accept=torch.zeros(3, 1), final=torch.zeros(3, 2))
    result = verify(rows, batch, DraftBlock.point(tokens), uniforms)
    assert result.tokens.tolist() == [[4, -1]] * 3
    assert result.valid.all()


def test_a_point_draft_and_a_greedy_draft_are_the_same(generator):
    rows, batch, draft, uniforms = round_of([3, 2, 0, 3], 3, generator, temperature=0.0)
    as_point = verify(rows, batch, DraftBlock.point(draft.tokens), uniforms)
    as_logits = verify(rows, batch, DraftBlock.from_logits(draft.tokens, draft.logits, 0.0), uniforms)
    assert torch.equal(as_point.tokens, as_logits.tokens)
    assert torch.equal(as_point.tokens, verify(rows, batch, draft, uniforms).tokens)


def test_greedy_emits_the_targets_argmax(generator):
    rows, batch, draft, uniforms = round_of([4, 4, 2, 0], 4, generator)
    result = verify(rows, batch, draft, uniforms, temperature=0.0)
    for r in range(4):
        emitted = int(result.num_emitted[r])
        start = int(batch.cu_seqlens[r])
        assert result.tokens[r, :emitted].tolist() == rows[start : start + emitted].argmax(-1).tolist()
        assert (result.logprobs[r] == 0).all()


def test_p_equal_to_q_accepts_everything_even_at_the_largest_uniform(generator):
    rows, batch, draft, uniforms = round_of([4] * 8, 4, generator)
    for k in range(4):
        rows[batch.cu_seqlens[:-1].long() + k] = draft.logits[:, k]
    top = Uniforms(draft=uniforms.draft, accept=torch.full((8, 4), TOP), final=uniforms.final)
    assert (verify(rows, batch, draft, top).num_accepted == 4).all()


@pytest.mark.parametrize("draft_vocab", [V - 6, V + 6])
def test_vocabularies_of_different_sizes(draft_vocab, generator):
    """q is 0 outside its own vocabulary and p is never truncated: a token only the target has can be emitted."""
    count = 400
    logits = torch.zeros(count, 1, draft_vocab)
    anchors = torch.zeros(count, dtype=torch.int64)
    uniforms = Uniforms.draw(count, 1, generator)
    draft = draft_block(logits, anchors, None, uniforms)
    batch = pack(anchors, draft.tokens, torch.ones(count, dtype=torch.int64), anchors)
    result = verify(torch.zeros(2 * count, V), batch, draft, uniforms)
    assert result.valid.all()
    assert result.tokens.max() < V
    first = law_counts(result.tokens[:, 0], V)
    assert min(first[-6:]) > 0
    outside = draft.tokens[:, 0] >= V
    assert (result.num_accepted[outside] == 0).all()


def test_recomputed_q_gives_the_same_round(generator):
    torch.manual_seed(0)
    head = MarkovHead(V, 4)
    base = torch.randn(16, 5, V, generator=generator)
    anchors = torch.randint(V, (16,), generator=generator)
    uniforms = Uniforms.draw(16, 5, generator)
    lengths = torch.arange(16) % 6
    results = []
    for keep in (True, False):
        draft = draft_block(base, anchors, head, uniforms, keep_logits=keep, temperature=0.8)
        batch = pack(anchors, draft.tokens, lengths, anchors)
        rows = torch.randn(len(batch.tokens), V, generator=torch.Generator().manual_seed(1)) * 2
        results.append(verify(rows, batch, draft, uniforms))
    assert torch.equal(results[0].tokens, results[1].tokens)
    assert torch.equal(results[0].logprobs, results[1].logprobs)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_only_rows_that_decide_an_emitted_token_count(poison, generator):
    rows, batch, draft, uniforms = round_of([3] * 6, 3, generator)
    clean = verify(rows, batch, draft, uniforms)
    for r in range(6):
        for k in range(4):
            broken = rows.clone()
            broken[int(batch.cu_seqlens[r]) + k, 7] = poison
            result = verify(broken, batch, draft, uniforms)
            decides = k <= int(clean.num_accepted[r])
            assert bool(result.valid[r]) is not decides
            others = torch.arange(6) != r
            assert torch.equal(result.tokens[others], clean.tokens[others])
            if decides:
                assert result.tokens[r].tolist() == [-1] * 4
                assert result.num_emitted[r] == 0
                assert result.num_accepted[r] == 0
                with pytest.raises(ValueError, match=rf"\[{r}\]"):
                    result.raise_if_invalid()
            else:
                assert torch.equal(result.tokens[r], clean.tokens[r])
                result.raise_if_invalid()


def test_rows_of_minus_infinity_and_bad_temperatures_are_invalid(generator):
    rows, batch, draft, uniforms = round_of([0] * 5, 2, generator)
    rows[1] = -torch.inf
    temperature = torch.tensor([1.0, 1.0, -1.0, torch.nan, 0.0])
    assert verify(rows, batch, draft, uniforms, temperature=temperature).valid.tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_an_invalid_draft_row_makes_its_request_invalid_only_if_it_is_reached(generator):
    rows, batch, draft, uniforms = round_of([2, 2, 0], 2, generator)
    logits = draft.logits.clone()
    logits[:, 0, 3] = torch.nan
    broken = DraftBlock.from_logits(draft.tokens, logits)
    assert verify(rows, batch, broken, uniforms).valid.tolist() == [False, False, True]


def test_a_token_that_its_own_law_cannot_have_drawn_is_invalid(generator):
    rows, batch, draft, uniforms = round_of([1, 1], 1, generator)
    tokens = torch.tensor([[-1], [V]])
    broken = DraftBlock.from_logits(tokens, draft.logits)
    assert verify(rows, batch, broken, uniforms).valid.tolist() == [False, False]


def test_padding_rows_strides_and_empty_batches(generator):
    rows, batch, draft, uniforms = round_of([2, 0, 3], 3, generator)
    clean = verify(rows, batch, draft, uniforms)
    padded = torch.full((len(rows) + 4, V + 5), torch.inf)
    padded[: len(rows), :V] = rows
    roomy = pack(
        torch.zeros(3, dtype=torch.int64),
        draft.tokens,
        torch.tensor([2, 0, 3]),
        torch.zeros(3, dtype=torch.int64),
        capacity=len(rows) + 4,
    )
    assert torch.equal(verify(padded[:, :V], roomy, draft, uniforms).tokens, clean.tokens)
    rows, batch, draft, uniforms = round_of([], 3, generator)
    assert verify(rows, batch, draft, uniforms).tokens.shape == (0, 4)


def test_a_request_does_not_depend_on_its_neighbours(generator):
    rows, batch, draft, uniforms = round_of([3, 0, 2, 3, 1], 3, generator)
    together = verify(rows, batch, draft, uniforms)
    for r, length in enumerate([3, 0, 2, 3, 1]):
        alone = pack(
            torch.zeros(1, dtype=torch.int64),
            draft.tokens[r : r + 1],
            torch.tensor([length]),
            torch.zeros(1, dtype=torch.int64),
        )
        mine = Uniforms(
            draft=uniforms.draft[r : r + 1], accept=uniforms.accept[r : r + 1], final=uniforms.final[r : r + 1]
        )
        block = DraftBlock.from_logits(draft.tokens[r : r + 1], draft.logits[r : r + 1])
        start, end = int(batch.cu_seqlens[r]), int(batch.cu_seqlens[r + 1])
        assert torch.equal(verify(rows[start:end], alone, block, mine).tokens[0], together.tokens[r])


def test_an_overflow_marks_every_request_invalid(generator):
    rows, batch, draft, uniforms = round_of([1, 1], 1, generator)
    marked = PackedBatch(
        tokens=batch.tokens,
        positions=batch.positions,
        request_ids=batch.request_ids,
        cu_seqlens=torch.tensor([0, 2, 9], dtype=torch.int32),
        num_tokens=torch.tensor(4, dtype=torch.int32),
    )
    assert verify(rows, marked, draft, uniforms).valid.tolist() == [True, False]  # a length above gamma
    with pytest.raises(ValueError, match="capacity"):
        verify(rows[:3], batch, draft, uniforms)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"target_logits": torch.zeros(4)}, ValueError, "target_logits"),
        ({"target_logits": torch.zeros(4, V, dtype=torch.int64)}, TypeError, "target_logits"),
        ({"target_logits": torch.zeros(4, 0)}, ValueError, "V = 0"),
        ({"draft": DraftBlock.point(torch.zeros(3, 1, dtype=torch.int64))}, ValueError, "draft.tokens"),
        ({"uniforms": Uniforms.draw(2, 2)}, ValueError, "uniforms.accept"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"cell": -2}, ValueError, "cell"),
        ({"filters": Filters(top_k=torch.ones(3, dtype=torch.int64))}, ValueError, "top_k"),
    ],
)
def test_bad_arguments_name_themselves(change, error, names, generator):
    rows, batch, draft, uniforms = round_of([1, 1], 1, generator)
    arguments = {"target_logits": rows, "batch": batch, "draft": draft, "uniforms": uniforms, **change}
    with pytest.raises(error, match=names):
        verify(**arguments)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: DraftBlock.point(torch.zeros(3, dtype=torch.int64)), ValueError, "tokens"),
        (lambda: DraftBlock.point(torch.zeros(3, 1)), TypeError, "tokens"),
        (
            lambda: DraftBlock.from_logits(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 2, 4)),
            ValueError,
            "logits",
        ),
        (
            lambda: DraftBlock.from_logits(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, 4), -1),
            ValueError,
            "temp",
        ),
    ],
)
def test_a_bad_proposal_is_refused(call, error, names):
    with pytest.raises(error, match=names):
        call()

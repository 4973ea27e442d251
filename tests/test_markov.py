"""Drafting: the heads, the law q of every token, and what a block keeps."""

from __future__ import annotations

import pytest
import torch
from helpers import TOP, every, law_counts, logits_of, midpoints

from dsspark import DraftBlock, MarkovHead, Uniforms, draft_block
from dsspark.reference import markov
from dsspark.reference.markov import latent_step
from dsspark.reference.rejection import draft_law

KINDS = ["vanilla", "gated", "rnn"]
R, GAMMA, V, D, RANK = 5, 4, 23, 6, 3


def make(kind, generator, dtype=torch.float32, draft_vocab=None):
    torch.manual_seed(0)
    head = MarkovHead(V, RANK, kind, hidden_size=D, draft_vocab_size=draft_vocab).to(dtype)
    base = torch.randn(R, GAMMA, draft_vocab or V, generator=generator).to(dtype)
    hidden = torch.randn(R, GAMMA, D, generator=generator).to(dtype)
    anchors = torch.randint(V, (R,), generator=generator)
    return head, base, hidden, anchors, Uniforms.draw(R, GAMMA, generator)


def bias_by_hand(head, previous, hidden, state):
    """Equations 5 and 6 and the gated form, for one request, written out with W1[x] W2."""
    e = head.markov_w1.weight[previous]
    w2 = head.markov_w2.weight.T
    if head.kind == "vanilla":
        return e @ w2, None
    if head.kind == "gated":
        w, b = head.gate_proj.weight, head.gate_proj.bias
        gate = 1 / (1 + torch.exp(-(w[:, :D] @ hidden + w[:, D:] @ e + b)))
        return (gate * e) @ w2, None
    w, b = head.joint_proj.weight, head.joint_proj.bias
    z = w[:, :RANK] @ state + w[:, RANK : 2 * RANK] @ e + w[:, 2 * RANK :] @ hidden + b
    g = 1 / (1 + torch.exp(-z[:RANK]))
    state = g * state + (1 - g) * torch.tanh(z[RANK : 2 * RANK])
    return torch.tanh(z[2 * RANK :]) @ w2, state


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_follows_the_equations(kind, generator):
    head, base, hidden, anchors, uniforms = make(kind, generator, torch.float64)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.3], dtype=torch.float64)
    block = draft_block(base, anchors, head, uniforms, temperature=temperature, hidden=hidden, cell=6)
    for r in range(R):
        previous, state = anchors[r], torch.zeros(RANK, dtype=torch.float64)
        for k in range(GAMMA):
            bias, state = bias_by_hand(head, previous, hidden[r, k], state)
            logits = base[r, k] + bias
            torch.testing.assert_close(block.logits[r, k], logits.detach(), rtol=1e-12, atol=1e-12)
            token = int(block.tokens[r, k])
            if temperature[r] == 0:
                assert token == int(logits.argmax())
                assert block.token_probs[r, k] == 1
                assert block.log_norm[r, k] == 0
            else:
                q = torch.softmax(logits / temperature[r], -1)
                assert block.token_probs[r, k].item() == pytest.approx(q[token].item(), rel=1e-12)
                norm = torch.logsumexp(logits / temperature[r], -1).item()
                assert block.log_norm[r, k].item() == pytest.approx(norm, rel=1e-12)
            previous = token


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_drafting_compute_the_same_bias(kind, generator):
    head, base, hidden, anchors, uniforms = make(kind, generator)
    block = draft_block(base, anchors, head, uniforms, hidden=hidden, cell=6)
    previous = torch.cat((anchors[:, None], block.tokens[:, :-1]), dim=1)
    torch.testing.assert_close(base + head(previous, hidden), block.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_differentiable(kind, generator):
    head, _, hidden, _, _ = make(kind, generator)
    head(torch.randint(V, (R, GAMMA), generator=generator), hidden).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())


def test_the_joint_law_of_a_block_is_exact():
    """gamma 2, V 3: the counts over all lattice uniforms are q_1(a) q_2(b | a), integers."""
    head = MarkovHead(3, 3)
    first = [1, 1, 2]
    second = {0: [1, 2, 1], 1: [2, 0, 2], 2: [1, 1, 2]}
    base = torch.stack((logits_of(first), torch.zeros(3)))
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.eye(3))
        rows = [logits_of(second[a]) for a in range(3)]
        # position 0 must see no bias: its anchor is token 0, so subtract that row from its base logits
        head.markov_w2.weight.copy_(torch.stack(rows, dim=1).clamp(min=-200))
        base[0] -= rows[0]
    n = every(midpoints(4), midpoints(4))
    uniforms = torch.cat((n.repeat_interleave(len(n), 0), n.repeat(len(n), 1)), dim=1).reshape(-1, 2, 2)
    count = len(uniforms)
    block = draft_block(
        base.expand(count, -1, -1),
        torch.zeros(count, dtype=torch.int64),
        head,
        Uniforms(draft=uniforms, accept=torch.zeros(count, 2), final=torch.zeros(count, 2)),
        cell=4,
    )
    counts = law_counts(block.tokens[:, 0] * 3 + block.tokens[:, 1], 9)
    assert counts == [count * first[a] * second[a][b] // 16 for a in range(3) for b in range(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_recomputed_rows_equal_the_rows_that_were_sampled(kind, dtype, generator):
    """Without kept logits the law of every row comes back bit for bit: it sums to one and gives token_probs exactly."""
    head, base, hidden, anchors, uniforms = make(kind, generator, dtype)
    block = draft_block(base, anchors, head, uniforms, temperature=0.7, hidden=hidden, keep_logits=False, cell=6)
    assert block.logits is None
    for k in range(GAMMA):
        law = draft_law(block, torch.tensor([4, 0, 2]), k, V)
        assert torch.equal(law.gather(1, block.tokens[[4, 0, 2], k, None])[:, 0], block.token_probs[[4, 0, 2], k])
        torch.testing.assert_close(law.sum(-1), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_is_drawn_from_the_logits_that_are_stored(dtype, generator):
    head, base, _, anchors, uniforms = make("vanilla", generator)
    block = draft_block(base.to(dtype), anchors, head, uniforms, cell=6)
    assert block.logits.dtype == dtype
    again = DraftBlock.from_logits(block.tokens, block.logits)
    assert torch.equal(again.token_probs, block.token_probs)
    assert torch.equal(again.log_norm, block.log_norm)


@pytest.mark.parametrize("tile", [4, V, 1024])  # tiles and a tail, one tile, a tail alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_product_in_tiles_is_the_product(tile, dtype, generator, monkeypatch):
    monkeypatch.setattr(markov, "_TILE", tile)
    head, base, _, anchors, uniforms = make("vanilla", generator, dtype)
    latent, w2 = head.markov_w1.weight[anchors], head.markov_w2.weight
    expected = base.double() + (latent.double() @ w2.double().t())[:, None]
    wide = torch.full((R, GAMMA, V + 3), torch.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    out = wide[:, 1, :V]
    assert markov.corrected_logits(base[:, 1], latent, w2, out=out, scratch=markov._scratch(base)) is out
    torch.testing.assert_close(out.double(), expected[:, 1], rtol=1e-6, atol=1e-6)
    assert wide[:, 1, V:].isnan().all()  # nothing beside it was written
    assert torch.equal(markov.corrected_logits(base[:, 1], latent, w2), out)
    everything = markov.corrected_logits(base, latent[:, None].expand(-1, GAMMA, -1), w2)
    torch.testing.assert_close(everything.double(), expected, rtol=1e-6, atol=1e-6)
    block = draft_block(base, anchors, head, uniforms, keep_logits=False, cell=6)
    for k in range(GAMMA):
        law = draft_law(block, torch.arange(R), k, V)
        assert torch.equal(law.gather(1, block.tokens[:, k, None])[:, 0], block.token_probs[:, k])


def test_parallel_only_is_the_base_logits(generator):
    _, base, _, anchors, uniforms = make("vanilla", generator)
    block = draft_block(base, anchors, None, uniforms)
    assert torch.equal(block.logits, base)
    lean = draft_block(base, anchors, None, uniforms, keep_logits=False)
    assert lean.latent is None
    assert torch.equal(lean.tokens, block.tokens)
    assert torch.equal(draft_law(lean, torch.arange(R), 1, V), draft_law(block, torch.arange(R), 1, V))


def test_a_draft_vocabulary_of_its_own(generator):
    head, base, _, anchors, uniforms = make("vanilla", generator, draft_vocab=9)
    ids = torch.tensor([0, 2, 3, 7, 11, 12, 13, 20, 22])
    block = draft_block(base, anchors, head, uniforms, draft_to_target=ids, cell=4)
    assert torch.isin(block.tokens, ids).all()
    previous = torch.cat((anchors[:, None], block.tokens[:, :-1]), dim=1)  # W1 rows are target ids
    torch.testing.assert_close(base + head(previous), block.logits)
    law = draft_law(block, torch.arange(R), 2, V)
    assert torch.equal(law.gather(1, block.tokens[:, 2, None])[:, 0], block.token_probs[:, 2])
    outside = torch.ones(V, dtype=torch.bool)
    outside[ids] = False
    assert (law[:, outside] == 0).all()
    again = DraftBlock.from_logits(block.tokens, block.logits, draft_to_target=ids)
    assert torch.equal(again.token_probs, block.token_probs)


def test_ties_at_temperature_zero_go_to_the_lowest_id():
    base = torch.tensor([[[1.0, 3.0, 3.0, 3.0]]]).expand(2, -1, -1)
    uniforms = Uniforms(draft=torch.full((2, 1, 2), TOP), accept=torch.zeros(2, 1), final=torch.zeros(2, 2))
    block = draft_block(base, torch.zeros(2, dtype=torch.int64), None, uniforms, temperature=torch.tensor([0.0, 1.0]))
    assert block.tokens[:, 0].tolist() == [1, 3]


def test_large_offsets_and_small_temperatures_cost_no_precision(generator):
    """q of logits + 1e4 is q of the logits: the maximum is subtracted before the division by T."""
    base = torch.randint(-40, 40, (R, GAMMA, V), generator=generator) / 8.0
    uniforms, anchors = Uniforms.draw(R, GAMMA, generator), torch.zeros(R, dtype=torch.int64)
    plain = draft_block(base, anchors, None, uniforms, temperature=0.1)
    shifted = draft_block(base + 8192.0, anchors, None, uniforms, temperature=0.1)
    assert torch.equal(plain.tokens, shifted.tokens)
    assert torch.equal(plain.token_probs, shifted.token_probs)
    huge = draft_block(base * 1e37, anchors, None, uniforms, temperature=1e-3)
    assert torch.equal(base.gather(2, huge.tokens[:, :, None])[:, :, 0], base.amax(-1))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_invalid_row_yields_token_zero_and_harms_nobody_else(poison, temperature, generator):
    head, base, _, anchors, uniforms = make("vanilla", generator)
    clean = draft_block(base, anchors, head, uniforms, temperature=temperature)
    broken = base.clone()
    broken[1, 2, 5] = poison
    broken[3, 0] = -torch.inf
    block = draft_block(broken, anchors, head, uniforms, temperature=temperature)
    assert block.tokens[1, 2] == 0
    assert block.tokens[3, 0] == 0
    assert block.token_probs[1, 2].isnan()
    assert block.token_probs[3, 0].isnan()
    others = torch.tensor([0, 2, 4])
    assert torch.equal(block.tokens[others], clean.tokens[others])
    assert torch.equal(block.token_probs[others], clean.token_probs[others])


def test_bad_entries_of_a_temperature_tensor_are_invalid(generator):
    head, base, _, anchors, uniforms = make("vanilla", generator)
    temperature = torch.tensor([1.0, -1.0, torch.nan, torch.inf, 0.0])
    block = draft_block(base, anchors, head, uniforms, temperature=temperature)
    assert block.token_probs.isnan().all(dim=1).tolist() == [False, True, True, True, False]


def test_strides_and_empty_batches(generator):
    head, base, _, anchors, uniforms = make("vanilla", generator)
    wide = torch.full((R, GAMMA, V + 9), torch.inf)
    wide[:, :, :V] = base
    assert torch.equal(
        draft_block(wide[:, :, :V], anchors, head, uniforms).tokens, draft_block(base, anchors, head, uniforms).tokens
    )
    empty = draft_block(base[:0], anchors[:0], head, Uniforms.draw(0, GAMMA))
    assert empty.tokens.shape == (0, GAMMA)


def test_the_rnn_state_moves_every_step(generator):
    head, _, hidden, _, _ = make("rnn", generator)
    state = head.initial_state(R, torch.device("cpu"))
    previous = torch.zeros(R, dtype=torch.int64)
    latent_0, state_1 = latent_step(head, previous, hidden[:, 0], state)
    latent_1, _ = latent_step(head, previous, hidden[:, 0], state_1)
    assert not torch.equal(latent_0, latent_1)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"base_logits": torch.zeros(R, V)}, ValueError, "base_logits"),
        ({"base_logits": torch.zeros(R, GAMMA, V, dtype=torch.int64)}, TypeError, "base_logits"),
        ({"base_logits": torch.zeros(R, 33, V)}, ValueError, "gamma"),
        ({"base_logits": torch.zeros(R, GAMMA, V + 1)}, ValueError, "markov_w2"),
        ({"base_logits": [1.0]}, TypeError, "base_logits"),
        ({"anchors": torch.zeros(R + 1, dtype=torch.int64)}, ValueError, "anchors"),
        ({"anchors": torch.zeros(R)}, TypeError, "anchors"),
        ({"anchors": torch.full((R,), V)}, ValueError, "anchors"),
        ({"anchors": torch.full((R,), -1)}, ValueError, "anchors"),
        ({"uniforms": Uniforms.draw(R, GAMMA + 1)}, ValueError, "uniforms.draft"),
        ({"temperature": -0.5}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"temperature": torch.ones(R + 1)}, ValueError, "temperature"),
        ({"hidden": None}, ValueError, "hidden"),
        ({"hidden": torch.zeros(R, GAMMA, D + 1)}, ValueError, "hidden"),
        ({"cell": 0}, ValueError, "cell"),
        ({"draft_to_target": torch.arange(V - 1)}, ValueError, "draft_to_target"),
        ({"draft_to_target": torch.arange(V).flip(0)}, ValueError, "draft_to_target"),
        ({"draft_to_target": torch.arange(V) + 1}, ValueError, "head"),
    ],
)
def test_bad_arguments_name_themselves(change, error, names, generator):
    head, base, hidden, anchors, uniforms = make("gated", generator)
    arguments = {
        "base_logits": base,
        "anchors": anchors,
        "head": head,
        "uniforms": uniforms,
        "hidden": hidden,
        **change,
    }
    with pytest.raises(error, match=names):
        draft_block(**arguments)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 4, "rank": 0}, "rank"),
        ({"vocab_size": 4, "kind": "lstm"}, "kind"),
        ({"vocab_size": 4, "kind": "rnn"}, "hidden_size"),
    ],
)
def test_a_bad_head_is_refused(arguments, names):
    with pytest.raises(ValueError, match=names):
        MarkovHead(**arguments)


def test_parameter_names_are_deepspecs():
    names = {kind: set(MarkovHead(8, 2, kind, hidden_size=3).state_dict()) for kind in KINDS}
    common = {"markov_w1.weight", "markov_w2.weight"}
    assert names["vanilla"] == common
    assert names["gated"] == common | {"gate_proj.weight", "gate_proj.bias"}
    assert names["rnn"] == common | {"joint_proj.weight", "joint_proj.bias"}

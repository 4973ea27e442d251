"""Every drafter inside `generate`: over a lattice of uniforms the counts of emitted texts are exactly the target's law."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from grid_target import FEATURES, GridTarget, HalvesHead, enlarge, put_head_on_the_grid
from torch import nn

import dsspark
from dsspark.decoding import generate
from dsspark.models.drafters import DRAFTERS, build_drafter, drafter_config, view_for
from dsspark.smollm2.drafter import SmolLM2Drafter
from dsspark.smollm2.drafter import drafter_config as smollm2_config
from dsspark.testing.laws import Counts, is_exact, lattice

PROMPT = [1, 0, 0, 1]


class LatticeNoise:
    """Stands for `Uniforms` in `generate`: the request with seed i gets the lattice's point i, round by round."""

    def __init__(self, points):
        parts = list(points)
        self.rounds = [
            dsspark.Uniforms(
                **{name: torch.cat([getattr(part[t], name) for part in parts]) for name in ("draft", "accept", "final")}
            )
            for t in range(points.rounds)
        ]

    def from_seeds(self, seeds, rounds, block_size):
        (t,) = set(rounds.tolist())
        rows, noise = torch.tensor(list(seeds)), self.rounds[t]
        return dsspark.Uniforms(draft=noise.draft[rows], accept=noise.accept[rows], final=noise.final[rows])


class EnoughError(Exception):
    """Leaves `generate` after the last enumerated round."""


def make(name, block_size, seed, vocab_size=2):
    generator = torch.Generator().manual_seed(seed)
    target = GridTarget(vocab_size, generator)
    config = drafter_config(name, target, block_size=block_size, num_layers=2, intermediate_size=24, markov_rank=2)
    drafter = enlarge(build_drafter(target, config, generator), generator)
    if getattr(drafter, "markov_head", None) is not None:
        put_head_on_the_grid(drafter.markov_head)
    return target, drafter


def emitted_counts(monkeypatch, target, drafter, rounds=1, prompt=PROMPT, draft_rows=None):
    """Return the counts of the texts that `rounds` rounds of `generate` emit over the whole lattice.

    Without `draft_rows`, which rows of q may occur, it is the target's own lattice.
    """
    law, sizes = target.grid_law(drafter.block_size), target.sizes
    if draft_rows is not None:
        law, sizes = dataclasses.replace(law, draft=draft_rows), None
    points = lattice(law, cell=256, sizes=sizes, rounds=rounds)
    monkeypatch.setattr("dsspark.decoding.Uniforms", LatticeNoise(points))
    texts = [()] * len(points)

    def on_round(report):
        for row, tokens in zip(report.request_ids, report.verification.tokens.tolist(), strict=True):
            texts[row] += tuple(token for token in tokens if token >= 0)
        on_round.seen += 1
        if on_round.seen == rounds:
            raise EnoughError

    on_round.seen = 0
    with pytest.raises(EnoughError):
        generate(
            view_for(target, drafter), drafter, [prompt] * len(points), 100, seeds=range(len(points)), on_round=on_round
        )
    counts = {}
    for text in texts:
        counts[(text,)] = counts.get((text,), 0) + 1
    return Counts(counts, len(points)), law


def exact(monkeypatch, target, drafter, rounds=1, draft_rows=None):
    counts, law = emitted_counts(monkeypatch, target, drafter, rounds, draft_rows=draft_rows)
    return is_exact(counts, law, (PROMPT[-1],))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_block_of_two_has_the_targets_law(monkeypatch, name, seed):
    target, drafter = make(name, 2, seed)
    assert exact(monkeypatch, target, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_two_rounds_have_the_targets_law(monkeypatch, name):
    """The second round's drafts come from a context that grew by what the first round accepted."""
    target, drafter = make(name, 1, 2)
    assert exact(monkeypatch, target, drafter, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dspark-rnn"])
def test_four_tokens_have_the_targets_law(monkeypatch, name):
    """Residuals of more than one token."""
    target, drafter = make(name, 2, 3, vocab_size=4)
    assert exact(monkeypatch, target, drafter)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_drafters_laws_really_vary(name):
    """Else the tests above would say little: rows of q lie on both sides of the plane, and Markov heads correct some and not others."""
    target, drafter = make(name, 2, 0)
    rows = {tuple(round(x) for x in row) for row in (2 * propose(target, drafter).draft.logits).flatten(0, 1).tolist()}
    assert {(0, 0), (0, 2)} <= rows  # 2 log 3 = 2.2
    assert any(lower for lower, _ in rows) is name.startswith("dspark")


def propose(target, drafter, count=64, seed=5):
    """Return a proposal for random contexts of three tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (count, 4), generator=generator)
    captured = []
    original = drafter.propose

    def keep(*args, **kwargs):
        captured.append(original(*args, **kwargs))
        return captured[-1]

    drafter.propose = keep
    generate(view_for(target, drafter), drafter, tokens.tolist(), 1, seeds=range(count))
    del drafter.propose
    return captured[0]


def liar(change):
    """Return a patch of a drafter's `propose` that changes the proposal or the noise."""

    def patched(drafter):
        original = drafter.propose

        def propose(anchors, context, uniforms, **kwargs):
            return change(original, anchors, context, uniforms, kwargs)

        drafter.propose = propose
        return drafter

    return patched


def _claims_points(original, anchors, context, uniforms, kwargs):
    proposal = original(anchors, context, uniforms, **kwargs)
    return proposal._replace(draft=dsspark.DraftBlock.point(proposal.draft.tokens))


def _claims_uniform(original, anchors, context, uniforms, kwargs):
    draft = original(anchors, context, uniforms, **kwargs).draft
    return dsspark.types.Proposal(dsspark.DraftBlock.from_logits(draft.tokens, torch.zeros_like(draft.logits)), None)


def _repeats_noise(original, anchors, context, uniforms, kwargs):
    repeated = uniforms.draft[:, :1].expand_as(uniforms.draft).contiguous()
    return original(anchors, context, dataclasses.replace(uniforms, draft=repeated), **kwargs)


def _reads_the_acceptance_noise(original, anchors, context, uniforms, kwargs):
    shared = torch.stack((uniforms.draft[..., 0], uniforms.accept), dim=-1)
    return original(anchors, context, dataclasses.replace(uniforms, draft=shared), **kwargs)


@pytest.mark.parametrize("name", ["mtp-1", "eagle3", "dflash", "dspark-rnn"])
@pytest.mark.parametrize("lie", [_claims_points, _claims_uniform, _repeats_noise, _reads_the_acceptance_noise])
def test_a_drafter_that_lies_is_caught(monkeypatch, name, lie):
    """q that was not the law of the draw, and noise used twice, on some of a few weights: a lie can be the truth on others.

    Four tokens, because with two of them a point in place of q leaves the law as it is. MTP-1 has no second draft to repeat noise in.
    """
    if name == "mtp-1" and lie is _repeats_noise:
        name = "dflash-masks"
    sizes = (2, 2) if lie is _repeats_noise else (1, 4)
    made = [make(name, sizes[0], seed, vocab_size=sizes[1]) for seed in range(6)]
    assert all(exact(monkeypatch, target, drafter) for target, drafter in made)
    assert not all(exact(monkeypatch, target, liar(lie)(drafter)) for target, drafter in made)


class GridModel:
    """The parts of a transformers model that `SmolLM2Drafter` borrows, taken from a `GridTarget`."""

    def __init__(self, target, vocab_size, generator):
        sizes = target.config
        config = SimpleNamespace(
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=24,
        )
        self.config = SimpleNamespace(get_text_config=lambda decoder: config)
        self.embedding = nn.Embedding(vocab_size, sizes.hidden_size)
        self.head = nn.Linear(sizes.hidden_size, vocab_size, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.randn(vocab_size, sizes.hidden_size, generator=generator))

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def named_modules(self):
        return [("model.norm", nn.RMSNorm(self.head.in_features))]


def make_smollm2(draft_size, vocab_size, block_size, seed):
    """Return a grid target and SmolLM2's drafter over the first of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    target = GridTarget(vocab_size, generator)
    model = GridModel(target, vocab_size, generator)
    config = smollm2_config(model, draft_size, block_size=block_size, markov_rank=2, layers=(0,))
    backbone = dataclasses.replace(config.backbone, feature_size=FEATURES)
    drafter = SmolLM2Drafter(dataclasses.replace(config, backbone=backbone), model, torch.arange(draft_size), generator)
    enlarge(drafter, generator)
    put_head_on_the_grid(drafter.markov_head)
    drafter._borrowed = (model.embedding, HalvesHead(draft_size, generator))
    return target, drafter


HALF = ((1, 1, 0, 0), (1, 3, 0, 0), (3, 1, 0, 0), (1, 1, 0, 0))
"""Rows of a drafter that knows two of four tokens."""


@pytest.mark.parametrize("seed", [0, 1])
def test_smollm2s_drafter_has_the_targets_law_although_it_drafts_half_of_the_vocabulary(monkeypatch, seed):
    target, drafter = make_smollm2(2, 4, block_size=2, seed=seed)
    assert exact(monkeypatch, target, drafter, draft_rows=HALF)


def test_smollm2s_drafter_has_the_targets_law_in_the_second_round(monkeypatch):
    """Which starts from the context vector of the last token that the first round kept."""
    target, drafter = make_smollm2(2, 2, block_size=1, seed=2)
    assert exact(monkeypatch, target, drafter, rounds=2)


@pytest.mark.parametrize("lie", [_claims_points, _claims_uniform, _repeats_noise, _reads_the_acceptance_noise])
def test_smollm2s_drafter_is_caught_when_it_lies(monkeypatch, lie):
    block_size = 2 if lie is _repeats_noise else 1
    made = [make_smollm2(2, 4, block_size=block_size, seed=seed) for seed in range(4)]
    assert all(exact(monkeypatch, target, drafter, draft_rows=HALF) for target, drafter in made)
    assert not all(exact(monkeypatch, target, liar(lie)(drafter), draft_rows=HALF) for target, drafter in made)

"""All drafters over a real tiny target: decoding equals the training pass, contexts grow and reorder, views read what they say."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from tiny_models import TINY, tiny_target

from dsspark.decoding import generate, pack_prompts
from dsspark.evaluation.traces import traces_of
from dsspark.models.autoregressive import AutoregressiveConfig, AutoregressiveDrafter
from dsspark.models.backbone import BackboneConfig
from dsspark.models.drafter import TeacherTexts
from dsspark.models.drafters import DRAFTERS, build_drafter, drafter_config, view_for
from dsspark.models.target import TargetView
from dsspark.randomness import Uniforms
from dsspark.serving.acceptance import load_traces
from dsspark.training.corpus import Document
from dsspark.training.evaluate import run_rounds

GAMMA = 4


@pytest.fixture
def target(generator):
    return tiny_target(generator)


def make(name, target, generator, **sizes):
    config = drafter_config(name, target, block_size=GAMMA, intermediate_size=48, markov_rank=8, **sizes)
    drafter = build_drafter(target, config, generator).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
    read = drafter.config.backbone.feature_size
    drafter.backbone.fit_standardisation(torch.randn(50, read, generator=generator, dtype=torch.float64) + 0.3)
    return drafter.requires_grad_(False)


def context_of(target, drafter, texts, pieces=(3,)):
    """Return the drafter's context of texts of different lengths, grown in pieces."""
    view, count = view_for(target, drafter), len(texts)
    cache, context = view.new_cache(count), drafter.new_context(count)
    starts = [0, *pieces, max(map(len, texts))]
    for start, stop in itertools.pairwise(starts):
        parts = [text[start:stop] for text in texts]
        cache.reserve(torch.tensor([min(len(text), stop) for text in texts]))
        batch = pack_prompts(parts, start)
        _, features = view.forward_ragged(batch, cache)
        drafter.extend(context, features, batch.request_ids)
    return context


@pytest.mark.parametrize("name", DRAFTERS)
def test_decoding_equals_the_training_pass(target, generator, name):
    """Greedy drafts, fed back as the true text: the teacher-forced laws are those the drafts were drawn from."""
    drafter = make(name, target, generator)
    texts = torch.randint(0, 256, (3, 9), generator=generator).tolist()
    anchors = torch.tensor([5, 77, 130])
    context = context_of(target, drafter, texts)
    draft = drafter.propose(anchors, context, Uniforms.draw(3, drafter.block_size), temperature=0.0).draft
    whole = torch.cat((torch.tensor(texts), anchors[:, None], draft.tokens), dim=1)
    hidden, features = target.hidden_states(whole[:, :-1])
    said = drafter.teacher_forced(TeacherTexts(whole, features, hidden), torch.full((3, 1), 9))
    torch.testing.assert_close(said.logits.double(), draft.logits, rtol=1e-5, atol=1e-5)
    assert draft.logits.std() > 0.05
    assert (said.confidence_logits is None) is not name.startswith("dspark")


@pytest.mark.parametrize("name", DRAFTERS)
def test_requests_of_a_batch_do_not_mix(target, generator, name):
    """Requests of lengths 1, 6 and 11, grown together, reordered and cut, draft what they draft alone."""
    drafter = make(name, target, generator)
    texts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 6, 11)]
    anchors, uniforms = torch.tensor([3, 4, 5]), Uniforms.from_seeds([1, 2, 3], [0, 0, 0], drafter.block_size)
    context = context_of(target, drafter, texts, pieces=(4, 8))
    context.keep([2, 0])

    def rows(index):
        return Uniforms(**{n: getattr(uniforms, n)[index] for n in ("draft", "accept", "final")})

    together = drafter.propose(anchors[[2, 0]], context, rows([2, 0])).draft
    for row, request in enumerate((2, 0)):
        alone = drafter.propose(
            anchors[request : request + 1], context_of(target, drafter, [texts[request]], ()), rows([request])
        ).draft
        assert torch.equal(together.tokens[row], alone.tokens[0])
        torch.testing.assert_close(together.logits[row], alone.logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_targets_own(target, generator, name):
    drafter, prompts = make(name, target, generator), [[7, 8, 9], [1], [4, 4, 4, 4, 4]]
    alone = generate(target, None, prompts, 12, 0.0).tokens
    for keep_logits in (True, False):
        drafted = generate(view_for(target, drafter), drafter, prompts, 12, 0.0, keep_logits=keep_logits)
        assert drafted.tokens == alone


@pytest.mark.parametrize("name", ["mtp-1", "eagle3"])
def test_dropping_the_logits_changes_no_text(target, generator, name):
    drafter, view = make(name, target, generator), None
    view = view_for(target, drafter)
    kept, dropped = (generate(view, drafter, [[1, 2], [3]], 10, keep_logits=keep).tokens for keep in (True, False))
    assert kept == dropped


def test_every_slot_of_eagle3_reads_its_own_draft(target, generator):
    """Another token drafted at slot k changes the law of slot k + 1 and of none before."""
    drafter = make("eagle3", target, generator)
    text = torch.randint(0, 256, (1, 9 + GAMMA + 1), generator=generator)
    hidden, features = target.hidden_states(text[:, :-1])

    def laws(tokens):
        return drafter.teacher_forced(TeacherTexts(tokens, features, hidden), torch.tensor([[9]])).logits[0]

    base = laws(text)
    for k in range(1, GAMMA):
        changed = text.clone()
        changed[0, 9 + k] = (changed[0, 9 + k] + 1) % 256
        moved = (laws(changed) != base).any(dim=1).tolist()
        assert moved == [slot >= k for slot in range(GAMMA)]


def test_masks_only_leaves_the_anchors_slot_unread(target, generator):
    """One slot more than drafts; the first draft is read from the first mask."""
    anchored, masked = (make(name, target, generator) for name in ("dflash", "dflash-masks"))
    assert (anchored.config.num_slots, masked.config.num_slots) == (GAMMA, GAMMA + 1)
    anchors, context = torch.tensor([65]), context_of(target, masked, [[1, 2, 3, 4]])
    slots = masked.backbone(masked.embed_blocks(anchors)[:, None], context.lengths[:, None], context.visible())[:, 0]
    torch.testing.assert_close(masked.backbone_pass(anchors, context)[1], slots[:, 1:])


@pytest.mark.parametrize("last_hidden", [True, False])
def test_a_view_shows_the_token_and_what_it_is_asked_for(target, generator, last_hidden):
    tokens = torch.randint(0, 256, (1, 7), generator=generator)
    view, batch = TargetView(target, last_hidden=last_hidden), pack_prompts(tokens.tolist(), 0)
    cache = view.new_cache(1)
    cache.reserve(torch.tensor([7]))
    logits, features = view.forward_ragged(batch, cache)
    hidden, layers = target.hidden_states(tokens)
    wanted = torch.cat((target.embed_tokens(tokens), hidden if last_hidden else layers), dim=-1)[0]
    torch.testing.assert_close(features, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits, target(tokens).logits[0], rtol=1e-9, atol=1e-9)


def test_depth_and_gamma_are_the_callers(target, generator):
    assert len(make("dflash", target, generator, num_layers=3).backbone.layers) == 3
    assert make("mtp-1", target, generator).block_size == 1
    assert make("dspark-rnn", target, generator).markov_head.kind == "rnn"
    assert make("dspark-gated", target, generator).markov_head.kind == "gated"


def test_autoregressive_drafters_own_nothing_of_the_target(target, generator):
    for name in ("mtp-1", "eagle3"):
        drafter = make(name, target, generator)
        assert not {id(p) for p in drafter.parameters()} & {id(p) for p in target.parameters()}


def test_errors_name_the_argument(target, generator):
    with pytest.raises(ValueError, match=r"^name: got 'medusa'"):
        drafter_config("medusa", target)
    with pytest.raises(ValueError, match=r"^kind: got 'eagle4'"):
        AutoregressiveConfig(kind="eagle4")
    with pytest.raises(ValueError, match=r"^num_layers: got 2"):
        AutoregressiveConfig(BackboneConfig(num_layers=2))
    with pytest.raises(ValueError, match=r"^config: got feature_size, hidden_size 768, 256, expected 32, 32"):
        AutoregressiveDrafter(target, AutoregressiveConfig(kind="mtp"))
    drafter = make("eagle3", target, generator)
    context, wide = drafter.new_context(2), TINY.hidden_size + TINY.feature_size
    features = torch.zeros(1, wide, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^request_ids: got 2"):
        drafter.extend(context, features, torch.tensor([2]))
    with pytest.raises(ValueError, match=r"^features: got shape"):
        drafter.extend(context, features[:, :-1], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"^anchors: got shape"):
        drafter.propose(torch.tensor([1]), context, Uniforms.draw(1, GAMMA))


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_of_any_drafter_can_be_simulated(target, generator, name, tmp_path):
    """Recorded rounds are traces that the serving simulator loads."""
    target, drafter = target.float(), make(name, target, generator).float()
    prompts = [Document("a", b"ab", b""), Document("b", b"c", b"")]
    record = run_rounds(view_for(target, drafter), drafter, prompts, max_new_tokens=6)
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({"rounds": traces_of({"math": record})}))
    pool = load_traces(path)
    assert pool.block_size == drafter.block_size
    assert pool.accepted[0].tolist() == record.accepted.sum(dim=1).tolist()
    assert (pool.survival == 1).all() == (not name.startswith("dspark"))

"""The parallel backbone, its context, and the drafter around it (paper 2.2 and 3.1)."""

from __future__ import annotations

import pytest
import torch
from tiny_models import BACKBONE, tiny_drafter, tiny_target
from torch import Tensor

from dsspark.models.backbone import BackboneConfig, DraftContext, KeyValue, ParallelBackbone, block_attention
from dsspark.models.drafter import DrafterConfig, DSparkDrafter
from dsspark.models.target import MASK_ID, TargetLM
from dsspark.randomness import Uniforms


@pytest.fixture
def target(generator: torch.Generator) -> TargetLM:
    return tiny_target(generator)


@pytest.fixture
def drafter(target: TargetLM, generator: torch.Generator) -> DSparkDrafter:
    return tiny_drafter(target, generator)


def texts_of(lengths: list[int], generator: torch.Generator) -> list[Tensor]:
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def test_block_attention_matches_one_softmax_over_context_and_block(generator):
    """Against a loop over blocks that concatenates [context before the anchor ; block] and calls the fused attention."""

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, context, block = (
        draw(2, 3, 4, 4, 8),
        KeyValue(draw(2, 9, 2, 8), draw(2, 9, 2, 8)),
        KeyValue(draw(2, 3, 4, 2, 8), draw(2, 3, 4, 2, 8)),
    )
    visible = torch.tensor([[0, 5, 9], [1, 2, 3]])
    got = block_attention(query, context, block, visible)
    for b in range(2):
        for a in range(3):
            keys, values = (torch.cat((c[b, : visible[b, a]], x[b, a])) for c, x in zip(context, block, strict=True))
            parts = [query[b, a], keys.repeat_interleave(2, dim=1), values.repeat_interleave(2, dim=1)]
            want = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts))
            torch.testing.assert_close(got[b, a], want.transpose(0, 1), rtol=1e-10, atol=1e-10)


def incremental(drafter: DSparkDrafter, features: Tensor, pieces: list[int]) -> DraftContext:
    context = drafter.new_context(1)
    for part in features.split(pieces):
        drafter.extend(context, part, torch.zeros(len(part), dtype=torch.int32))
    return context


def test_decoding_context_equals_the_training_pass(target, drafter, generator):
    """Blocks from a cache that grew piece by piece equal those of the vectorised pass over all anchors of a row."""
    text = texts_of([20], generator)[0][None]
    features = target(text).features
    drafter.backbone.fit_standardisation(features[0])
    anchors = torch.tensor([[3, 11, 17]])
    keys = drafter.backbone.context_keys(features, torch.arange(20))
    blocks = drafter.backbone(drafter.embed_blocks(text.gather(1, anchors)), anchors, keys)[0]
    for index, anchor in enumerate(anchors[0].tolist()):
        context = incremental(drafter, features[0, :anchor], [1, anchor - 1])
        logits, hidden = drafter.backbone_pass(text[0, anchor : anchor + 1], context)
        torch.testing.assert_close(hidden[0], blocks[index], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logits, target.lm_head(hidden), rtol=1e-9, atol=1e-9)


def test_block_sees_its_context_its_anchor_and_itself_both_ways(target, drafter, generator):
    """Changing the feature just before the anchor, or the anchor, moves every slot; a later feature moves none."""
    features = torch.randn(8, 64, generator=generator, dtype=torch.float64)
    anchor = torch.tensor([65])
    base = drafter.backbone_pass(anchor, incremental(drafter, features, [8]))[1]
    assert (
        not torch.isclose(base, drafter.backbone_pass(anchor + 1, incremental(drafter, features, [8]))[1]).all(-1).any()
    )
    changed = features.clone()
    changed[7] += 1
    assert not torch.isclose(base, drafter.backbone_pass(anchor, incremental(drafter, changed, [8]))[1]).all(-1).any()
    # Bidirectional: slot 0 depends on the last mask's embedding row, which every mask shares, through attention only.
    with torch.no_grad():
        target.embed_tokens.weight[MASK_ID] += 1
    assert not torch.isclose(
        base[:, 0], drafter.backbone_pass(anchor, incremental(drafter, features, [8]))[1][:, 0]
    ).all()


def test_contexts_of_different_lengths_do_not_mix(drafter, generator):
    """Requests of lengths 0, 3 and 7 fed interleaved, then reordered and cut: each equals itself alone."""
    features = torch.randn(10, 64, generator=generator, dtype=torch.float64)
    ids = torch.tensor([2, 1, 2, 2, 1, 2, 2, 1, 2, 2], dtype=torch.int32)
    context = drafter.new_context(3)
    drafter.extend(context, features[:5], ids[:5])
    padded = torch.cat((features[5:], torch.full((2, 64), float("nan"), dtype=torch.float64)))
    drafter.extend(context, padded, torch.cat((ids[5:], torch.tensor([-1, -1], dtype=torch.int32))))
    assert context.lengths.tolist() == [0, 3, 7]
    anchors = torch.tensor([7, 8, 9])
    together = drafter.backbone_pass(anchors, context)[0]
    for row in range(3):
        alone = drafter.new_context(1)
        drafter.extend(alone, features[ids == row], torch.zeros(int((ids == row).sum()), dtype=torch.int64))
        torch.testing.assert_close(
            together[row], drafter.backbone_pass(anchors[row : row + 1], alone)[0][0], rtol=1e-9, atol=1e-9
        )
    context.keep([2, 0])
    torch.testing.assert_close(
        drafter.backbone_pass(anchors[[2, 0]], context)[0], together[[2, 0]], rtol=1e-9, atol=1e-9
    )


def test_features_are_standardised_per_dimension(drafter, generator):
    """A dimension a million times larger, and shifted, must not change the context once it is standardised."""
    features = torch.randn(50, 64, generator=generator, dtype=torch.float64)
    drafter.backbone.fit_standardisation(features)
    small = drafter.backbone.context_keys(features, torch.arange(50))
    scaled = features * torch.logspace(-2, 6, 64, dtype=torch.float64) + 1e4
    drafter.backbone.fit_standardisation(scaled)
    for a, b in zip(small, drafter.backbone.context_keys(scaled, torch.arange(50)), strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-4)


def test_confidence_reads_the_previous_token_only(drafter, generator):
    """x_k moves z_{k+1} and nothing else; the anchor moves z_1; the last token moves nothing."""
    hidden = torch.randn(1, 4, 32, generator=generator, dtype=torch.float64)
    tokens, anchor = torch.tensor([[1, 2, 3, 4]]), torch.tensor([9])
    base = drafter.confidence(hidden, anchor, tokens)
    for k in range(4):
        changed = tokens.clone()
        changed[0, k] = 77
        moved = (drafter.confidence(hidden, anchor, changed) != base)[0].tolist()
        assert moved == [index == k + 1 for index in range(4)]
    assert (drafter.confidence(hidden, anchor + 1, tokens) != base)[0].tolist() == [True, False, False, False]


def test_propose_drafts_through_the_head_and_reports_its_confidence(drafter, generator):
    """The block is `draft_block` on the backbone's logits; without heads the logits are the backbone's own."""
    from dsspark.reference.markov import draft_block

    context = incremental(drafter, torch.randn(5, 64, generator=generator, dtype=torch.float64), [5])
    anchors, uniforms = torch.tensor([40]), Uniforms.from_seeds([3], [0], 4)
    proposal = drafter.propose(anchors, context, uniforms, temperature=0.7)
    base, hidden = drafter.backbone_pass(anchors, context)
    want = draft_block(base, anchors, drafter.markov_head, uniforms, temperature=0.7)
    assert torch.equal(proposal.draft.tokens, want.tokens)
    assert torch.equal(proposal.draft.logits, want.logits)
    assert not torch.allclose(proposal.draft.logits, base)
    assert torch.equal(proposal.confidence_logits, drafter.confidence(hidden, anchors, want.tokens))


def test_parallel_only_drafter_has_no_head(target, generator):
    config = DrafterConfig(BACKBONE, markov_rank=0, has_confidence=False)
    drafter = DSparkDrafter(target, config, generator).double()
    context = drafter.new_context(2)
    proposal = drafter.propose(torch.tensor([1, 2]), context, Uniforms.from_seeds([1, 2], [0, 0], 4))
    assert proposal.confidence_logits is None
    assert torch.equal(proposal.draft.logits, drafter.backbone_pass(torch.tensor([1, 2]), context)[0])
    with pytest.raises(ValueError, match=r"^confidence: got a drafter without"):
        drafter.confidence(torch.zeros(2, 4, 32), torch.tensor([1, 2]), proposal.draft.tokens)


def test_drafter_owns_nothing_of_the_target(target, drafter):
    names = set(drafter.state_dict())
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"} <= names
    assert not {id(p) for p in drafter.parameters()} & {id(p) for p in target.parameters()}


def test_drafter_errors_name_the_argument(target, drafter):
    with pytest.raises(ValueError, match=r"^config: got feature_size"):
        DSparkDrafter(target, DrafterConfig(BackboneConfig(feature_size=32, hidden_size=32)))
    with pytest.raises(ValueError, match=r"^markov_rank: got -1"):
        DrafterConfig(markov_rank=-1)
    for change, name in (
        ({"block_size": 33}, "block_size"),
        ({"num_heads": 3}, "num_heads"),
        ({"head_dim": 5}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            BackboneConfig(**change)
    context = drafter.new_context(2)
    features = torch.zeros(1, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^request_ids: got 2"):
        drafter.extend(context, features, torch.tensor([2]))
    with pytest.raises(TypeError, match=r"^request_ids: got dtype"):
        drafter.extend(context, features, torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"^features: got shape"):
        drafter.extend(context, features[:, :5], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"^anchors: got shape"):
        drafter.backbone_pass(torch.tensor([1]), context)
    with pytest.raises(ValueError, match=r"^num_requests: got -1"):
        drafter.new_context(-1)
    with pytest.raises(ValueError, match=r"^features: got 1 rows"):
        ParallelBackbone(BACKBONE).fit_standardisation(torch.zeros(1, 64))

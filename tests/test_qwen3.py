"""The released drafters' backbone against transformers' own Qwen3 layers, and inside whole decoding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hf_models import prompts_of, tiny_model
from torch import Tensor
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dsspark.decoding import generate
from dsspark.models.backbone import BackboneConfig
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.models.qwen3 import Qwen3Drafter, Qwen3DrafterConfig
from dsspark.randomness import Uniforms
from dsspark.serving.policies import FixedLength

V = 83
BACKBONE = BackboneConfig(
    feature_size=64,
    hidden_size=32,
    block_size=4,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    rope_base=1000.0,
    norm_eps=1e-5,
)


def drafter_of(**changes) -> Qwen3Drafter:
    """Return a float64 drafter every parameter of which is drawn large, norms included."""
    config = {
        "backbone": BACKBONE,
        "vocab_size": V,
        "mask_token_id": 82,
        "target_layer_ids": (-1, 1),
        "markov_rank": 8,
        **changes,
    }
    drafter = Qwen3Drafter(Qwen3DrafterConfig(**config)).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in drafter.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return drafter


def norm(module) -> Qwen3RMSNorm:
    """Return transformers' norm with the weight of one of ours."""
    theirs = Qwen3RMSNorm(module.weight.shape[0], eps=BACKBONE.norm_eps).double()
    theirs.weight.data = module.weight
    return theirs


def oracle(drafter: Qwen3Drafter, features: Tensor, anchor: int) -> Tensor:
    """Return the normed states [slots, d]: transformers' layers with the context's keys and values put into their cache."""
    config = Qwen3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attn_implementation="eager",
    )
    backbone, length, slots = drafter.backbone, features.shape[0], drafter.config.num_slots
    rotary, cache = Qwen3RotaryEmbedding(config), DynamicCache()
    context = norm(backbone.hidden_norm)(features @ backbone.fc.weight.T)[None]
    x = drafter.embed_tokens(torch.tensor([[anchor] + [drafter.config.mask_token_id] * (slots - 1)]))
    places = torch.arange(length + slots)[None]
    for index, ours in enumerate(backbone.draft_layers):
        layer = Qwen3DecoderLayer(config, index).double().eval()
        layer.load_state_dict(ours.state_dict())
        attention = layer.self_attn
        keys = attention.k_norm(attention.k_proj(context).view(1, length, 2, 16)).transpose(1, 2)
        values = attention.v_proj(context).view(1, length, 2, 16).transpose(1, 2)
        keys, _ = apply_rotary_pos_emb(keys, keys, *rotary(x, places[:, :length]))
        cache.update(keys, values, index)
        out = layer(x, attention_mask=None, position_embeddings=rotary(x, places[:, length:]), cache=cache)
        x = out[0] if isinstance(out, tuple) else out
    return norm(backbone.norm)(x)[0]


def context_of(drafter: Qwen3Drafter, features: Tensor, pieces: list[int]):
    context = drafter.new_context(1)
    for part in features.split(pieces):
        drafter.extend(context, part, torch.zeros(len(part), dtype=torch.int32))
    return context


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_backbone_equals_transformers_layers(anchored, length):
    """KV injection, positions, norms and the slots that are read, with and without a context."""
    drafter = drafter_of(sample_from_anchor=anchored)
    features = torch.randn(length, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits, hidden = drafter.backbone_pass(torch.tensor([5]), context_of(drafter, features, [length]))
    with torch.no_grad():
        want = oracle(drafter, features, 5)
    assert len(want) == (4 if anchored else 5)
    torch.testing.assert_close(hidden[0], want[-4:], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(logits[0], want[-4:] @ drafter.lm_head.weight.T, rtol=1e-4, atol=1e-4)


def test_context_grows_in_pieces():
    drafter = drafter_of()
    features = torch.randn(9, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole, pieces = (
        drafter.backbone_pass(torch.tensor([5]), context_of(drafter, features, p)) for p in ([9], [4, 1, 4])
    )
    torch.testing.assert_close(pieces[0], whole[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_greedy_block_written_out(kind):
    """The sequential heads on U and h, left to right, and the confidence of each token, in plain products."""
    drafter = drafter_of(markov_kind=kind)
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    anchor = torch.tensor([5])
    logits, hidden = drafter.backbone_pass(anchor, context_of(drafter, features, [5]))
    proposal = drafter.propose(
        anchor, context_of(drafter, features, [5]), Uniforms.from_seeds([1], [0], 4), temperature=0.0
    )
    head, proj = drafter.markov_head, drafter.confidence_head.proj
    previous, state, tokens, confidence = anchor[0], torch.zeros(8, dtype=torch.float64), [], []
    for k in range(4):
        e, h = head.markov_w1.weight[previous], hidden[0, k]
        latent = e
        if kind == "gated":
            latent = torch.sigmoid(head.gate_proj(torch.cat((h, e)))) * e
        if kind == "rnn":
            gate, candidate, output = head.joint_proj(torch.cat((state, e, h))).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            latent = output.tanh()
        confidence.append(proj(torch.cat((h, e))))
        previous = (logits[0, k] + head.markov_w2.weight @ latent).argmax()
        tokens.append(int(previous))
    assert proposal.draft.tokens[0].tolist() == tokens
    torch.testing.assert_close(proposal.confidence_logits[0], torch.cat(confidence), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [0, 2, 4])
def test_every_round_drafts_from_the_text_so_far(length):
    """Whole decoding of a batch: each round's block is the oracle's on a fresh pass of the target over all tokens before the anchor."""
    model, drafter = tiny_model("qwen3"), drafter_of(markov_rank=0, confidence_with_markov=False)
    prompts = prompts_of([4, 1, 7])
    texts = [list(prompt) for prompt in prompts]
    rounds = []

    def check(report) -> None:
        for row, request in enumerate(report.request_ids):
            text = texts[request]
            with torch.no_grad():
                states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
                features = torch.cat((states[0], states[2]), dim=-1)[0, :-1]
                want = oracle(drafter, features, text[-1]) @ drafter.lm_head.weight.T
            torch.testing.assert_close(report.proposal.draft.logits[row], want, rtol=2e-4, atol=2e-4)
            text.extend(report.emitted[row])
        rounds.append(report)

    target = HuggingFaceTarget(model, drafter.target_layer_ids)
    generate(target, drafter, prompts, [6, 3, 5], 1.5, FixedLength(length), [1, 2, 3], on_round=check)
    assert len(rounds) >= 3


def test_configuration_errors_name_the_argument():
    good = {"backbone": BACKBONE, "vocab_size": V, "mask_token_id": 3, "target_layer_ids": (0, 1)}
    for change, message in (
        ({"target_layer_ids": (1, 0)}, r"^target_layer_ids: got \[1, 0\]"),
        ({"target_layer_ids": (-2, 0)}, r"^target_layer_ids: got \[-2, 0\]"),
        ({"target_layer_ids": ()}, r"^target_layer_ids: got \[\]"),
        ({"target_layer_ids": (0, 1, 2)}, r"^target_layer_ids: got 3 layers, expected a divisor"),
        ({"mask_token_id": V}, r"^mask_token_id: got 83"),
        ({"markov_rank": 0}, r"^confidence_with_markov: got True with markov_rank 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Qwen3DrafterConfig(**{**good, **change})
    drafter = drafter_of()
    with pytest.raises(RuntimeError, match=r"^fit_standardisation: got a Qwen3 backbone"):
        drafter.backbone.fit_standardisation(torch.zeros(3, 64))
    with pytest.raises(ValueError, match=r"^anchors: got shape"):
        drafter.backbone_pass(torch.tensor([1]), drafter.new_context(2))
    with pytest.raises(ValueError, match=r"^confidence: got a drafter without"):
        drafter_of(has_confidence=False).confidence(torch.zeros(1, 4, 32), torch.tensor([1]), torch.zeros(1, 4).long())
    assert dataclasses.is_dataclass(drafter.config)


def test_a_fresh_drafter_borrows_and_does_not_depend_on_the_global_generator():
    model = tiny_model("llama")
    torch.manual_seed(0)
    first = Qwen3Drafter.fresh(model, (0,), markov_rank=4)
    torch.manual_seed(1)
    second = Qwen3Drafter.fresh(model, (0,), markov_rank=4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float64}
    assert first._borrowed == (model.get_input_embeddings(), model.get_output_embeddings())

"""transformers models as targets: batches of different lengths, hidden states, rollback, greedy equality with `model.generate`."""

from __future__ import annotations

import pytest
import torch
from hf_models import MODELS, VOCAB, prompts_of, tiny_model
from toy_drafters import OracleDrafter
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM, Qwen3Model

import dsspark
from dsspark.decoding import PREFILL_CHUNK, generate, pack_prompts
from dsspark.models.huggingface import MAX_SCORED, HuggingFaceTarget
from dsspark.models.qwen3 import Qwen3Drafter
from dsspark.serving.policies import FixedLength

LENGTHS = [3, 1, 12, 20]
ALL = [*MODELS, "gpt2"]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def drafter_for(model, **changes) -> Qwen3Drafter:
    return Qwen3Drafter.fresh(model, (-1, 1), **{"block_size": 4, "markov_rank": 8, **changes})


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """What transformers itself decodes, each prompt alone."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def run(target, texts: list[list[int]], pieces: list[list[int]]):
    """Feed each text in pieces, all texts in one batch; return logits and features of every token of each text."""
    cache = target.new_cache(len(texts))
    rows = [[] for _ in texts]
    done = [0] * len(texts)
    for counts in pieces:
        batch = pack_prompts(
            [text[start : start + count] for text, start, count in zip(texts, done, counts, strict=True)], 0
        )
        starts = torch.tensor(done)[batch.request_ids.long()]
        batch = type(batch)(**{**vars(batch), "positions": batch.positions + starts})
        done = [start + count for start, count in zip(done, counts, strict=True)]
        cache.reserve(torch.tensor(done))
        output = target.forward_ragged(batch, cache)
        for row, request in enumerate(batch.request_ids.tolist()):
            rows[request].append(torch.cat((output.logits[row], output.features[row])))
    return [torch.stack(text) for text in rows], cache


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_ragged_pieces_equal_each_text_alone(name, implementation):
    """Texts longer than the sliding windows, fed in uneven and empty pieces: logits and features are the model's own."""
    model = tiny_model(name)
    if implementation == "sdpa" and not model._supports_sdpa:
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            model.set_attn_implementation(implementation)
        return
    model.set_attn_implementation(implementation)
    layers = (-1, 1) if name != "gpt2" else (0, 1)
    texts = prompts_of([14, 5, 9])
    got, _ = run(HuggingFaceTarget(model, layers), texts, [[4, 1, 0], [7, 0, 2], [3, 4, 7]])
    for text, rows in zip(texts, got, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([text]), output_hidden_states=True)
        expected = torch.cat((want.logits[0], *(want.hidden_states[layer + 1][0] for layer in layers)), dim=-1)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_rejected_tokens_leave_no_trace(model):
    """After a rollback, other tokens at the same positions, and requests kept in another order, decode as if alone."""
    target = HuggingFaceTarget(model, (0,))
    texts = prompts_of([9, 7, 8])
    wrong = [[*text[:5], *prompts_of([len(text) - 5], seed=9)[0]] for text in texts]
    _, cache = run(target, wrong, [[len(text) for text in wrong]])
    cache.rollback(torch.tensor([5, 5, 5]))
    cache.keep([2, 0])
    kept = [texts[2], texts[0]]
    batch = pack_prompts([text[5:] for text in kept], 5)
    cache.reserve(torch.tensor([len(text) for text in kept]))
    output = target.forward_ragged(batch, cache)
    for request, text in enumerate(kept):
        with torch.no_grad():
            want = model(torch.tensor([text]), output_hidden_states=True)
        mine = batch.request_ids == request
        torch.testing.assert_close(output.logits[mine], want.logits[0, 5:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.features[mine], want.hidden_states[1][0, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_the_models_own(name):
    """With a drafter that is mostly wrong, every round rolls back; the text must not notice."""
    model = tiny_model(name)
    drafter = None if name == "gpt2" else drafter_for(model)
    prompts = prompts_of(LENGTHS)
    target = HuggingFaceTarget(model, () if drafter is None else drafter.target_layer_ids)
    result = generate(target, drafter, prompts, [16, 12, 9, 14], temperature=0.0)
    assert result.tokens == [greedy(model, prompt, n) for prompt, n in zip(prompts, [16, 12, 9, 14], strict=True)]
    assert len({token for text in result.tokens for token in text}) > 8, "a model that repeats itself tests nothing"


def test_a_drafter_that_is_right_is_accepted(model):
    """An oracle drafter proposes the model's own text: whole blocks are accepted, so drafts meet the rows that score them."""
    prompts = prompts_of(LENGTHS)
    texts = [greedy(model, prompt, 20) for prompt in prompts]
    oracle = OracleDrafter([[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], block_size=4)
    result = generate(HuggingFaceTarget(model, (0,)), oracle, prompts, 20, temperature=0.0)
    assert result.tokens == texts
    assert result.statistics.tokens_per_round == 5


def test_sampled_text_does_not_depend_on_the_batch(model):
    """float64, one seed a prompt: together and alone give the same text under fixed lengths."""
    prompts, drafter = prompts_of(LENGTHS), drafter_for(model)
    target = HuggingFaceTarget(model, drafter.target_layer_ids)
    together = generate(target, drafter, prompts, 12, seeds=[5, 6, 7, 8], policy=FixedLength(2))
    for i in (3, 0):
        alone = generate(target, drafter, [prompts[i]], 12, seeds=[5 + i], policy=FixedLength(2))
        assert alone.tokens[0] == together.tokens[i]


def test_long_prompts_are_prefilled_in_pieces_without_logits():
    """Beyond one chunk; rows of a prompt hold NaN, cost no memory, and its features and cache are those of a scored pass."""
    model = tiny_model("qwen3", max_position_embeddings=1024)
    prompts = prompts_of([PREFILL_CHUNK + 30, 40])
    target, drafter = HuggingFaceTarget(model, (-1, 1)), drafter_for(model)
    result = generate(target, drafter, prompts, 6, temperature=0.0)
    assert result.tokens == [greedy(model, prompt, 6) for prompt in prompts]

    batch = pack_prompts([prompts[1][: MAX_SCORED + 1]], 0)
    cache = target.new_cache(1)
    cache.reserve(torch.tensor([MAX_SCORED + 1]))
    output = target.forward_ragged(batch, cache)
    assert output.logits.shape == (MAX_SCORED + 1, VOCAB)
    assert output.logits.isnan().all()
    assert output.logits.untyped_storage().nbytes() <= 8
    assert output.features.isfinite().all()


def test_bfloat16_models_decode(model):
    """No equality is promised between differently rounded passes: the text is valid and its log probabilities are finite."""
    rounded = tiny_model("qwen3", dtype=torch.bfloat16)
    drafter = drafter_for(rounded)
    result = generate(HuggingFaceTarget(rounded, (-1, 1)), drafter, prompts_of(LENGTHS), 8, keep_logits=False)
    assert all(len(text) == 8 and 0 <= min(text) <= max(text) < VOCAB for text in result.tokens)
    assert torch.tensor(result.logprobs).isfinite().all()


def test_padding_and_empty_batches_are_inert(model):
    """A packed batch with spare capacity scores the same rows; one without requests scores none."""
    target = HuggingFaceTarget(model, (0,))
    outputs = []
    for capacity in (None, 11):
        cache = target.new_cache(2)
        cache.reserve(torch.tensor([4, 2]))
        drafts = torch.tensor([[5, 6, 7], [8, 9, 10]])
        zeros = torch.zeros(2, dtype=torch.int64)
        batch = dsspark.pack(torch.tensor([3, 4]), drafts, torch.tensor([3, 1]), zeros, capacity=capacity)
        outputs.append(target.forward_ragged(batch, cache))
    exact, spare = outputs
    assert torch.equal(spare.logits[:6], exact.logits)
    assert torch.equal(spare.features[:6], exact.features)
    assert spare.logits.shape == (11, VOCAB)

    none = torch.zeros(0, dtype=torch.int64)
    output = target.forward_ragged(dsspark.pack(none, torch.zeros(0, 3).long(), none, none), target.new_cache(0))
    assert output.logits.shape == (0, VOCAB)
    assert output.features.shape == (0, 32)
    assert generate(target, None, [], 3).tokens == []


def test_what_cannot_work_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"^feature_layers: got \[2\].*never the last one"):
        HuggingFaceTarget(model, (2,))
    with pytest.raises(ValueError, match=r"^feature_layers: got \[1, 0\]"):
        HuggingFaceTarget(model, (1, 0))
    with pytest.raises(TypeError, match=r"^model: got Qwen3Model"):
        HuggingFaceTarget(Qwen3Model(model.config))
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match=r"^model: got"):
        HuggingFaceTarget(recurrent)
    flash = tiny_model("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"^model: got attn_implementation 'flash_attention_2'"):
        HuggingFaceTarget(flash)

    class NoPositions(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None):  # pragma: no cover - only its signature matters
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"^model: got NoPositions, whose forward takes no position_ids"):
        HuggingFaceTarget(NoPositions(tiny_model("llama").config))


def test_cache_errors_name_the_argument(model):
    target = HuggingFaceTarget(model)
    cache = target.new_cache(2)
    batch = pack_prompts([[4, 5], [6]], 0)
    with pytest.raises(ValueError, match=r"^batch: got a position beyond"):
        target.forward_ragged(batch, cache)
    with pytest.raises(ValueError, match=r"^cache: got 1 requests, expected 2"):
        target.forward_ragged(batch, target.new_cache(1))
    cache.reserve(torch.tensor([2, 1]))
    target.forward_ragged(batch, cache)
    with pytest.raises(ValueError, match=r"^new_lengths: got \[1, 1\]"):
        cache.reserve(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"^lengths: got \[2, 2\]"):
        cache.rollback(torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"^rows: got \[0, 0\]"):
        cache.keep([0, 0])
    with pytest.raises(ValueError, match=r"^num_requests: got -1"):
        target.new_cache(-1)
    with pytest.raises(RuntimeError, match=r"^cache: got a pass of its own"):
        model(torch.tensor([[1]]), cache=target.new_cache(1).cache)

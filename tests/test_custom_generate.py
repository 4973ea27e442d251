"""`model.generate(..., custom_generate=Speculator(drafter))` against `model.generate` itself."""

from __future__ import annotations

import collections

import pytest
import torch
from hf_models import VOCAB, left_padded, prompts_of, tiny_model
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dsspark.custom_generate import Speculator
from dsspark.models.qwen3 import Qwen3Drafter
from dsspark.serving.policies import ConfidenceThreshold

LENGTHS = [3, 9, 6]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def drafter(model):
    return Qwen3Drafter.fresh(model, (0, 1), block_size=4, markov_rank=8)


def both(model, drafter, inputs, **arguments):
    """Return what transformers decodes and what we do, from the same arguments."""
    want = model.generate(**inputs, **arguments)
    return want, model.generate(**inputs, **arguments, custom_generate=Speculator(drafter))


def test_greedy_equals_generate_on_padded_batches(model, drafter):
    want, got = both(model, drafter, left_padded(prompts_of(LENGTHS)), max_new_tokens=14, do_sample=False)
    assert torch.equal(got, want)


def test_stop_tokens_end_rows_and_pad_them(model, drafter):
    inputs = left_padded(prompts_of(LENGTHS))
    free = model.generate(**inputs, max_new_tokens=14, do_sample=False)
    stops = [int(free[0, -8]), int(free[2, -5])]
    want, got = both(
        model, drafter, inputs, max_new_tokens=14, do_sample=False, eos_token_id=stops, pad_token_id=VOCAB - 1
    )
    assert (want[:, -1] == VOCAB - 1).any()
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(3, 60))},
        {"suppress_tokens": list(range(10, 60)), "bad_words_ids": [[61], [62, 63]]},
        {"repetition_penalty": 0.5, "forced_eos_token_id": 7, "renormalize_logits": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_processors_of_the_text_are_kept(model, drafter, arguments):
    """Each changes the text, and ours changes alike."""
    inputs = left_padded(prompts_of(LENGTHS))
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    want, got = both(model, drafter, inputs, max_new_tokens=12, do_sample=False, **arguments)
    assert not torch.equal(want, plain)
    assert torch.equal(got, want)


def test_a_single_prompt_without_a_mask_and_without_a_drafter(model):
    want, got = both(model, None, {"input_ids": torch.tensor(prompts_of([5]))}, max_new_tokens=7, do_sample=False)
    assert torch.equal(got, want)


def test_sampling_has_the_law_of_generate(model, drafter):
    """The joint law of two tokens under a processor and every warper, 800 samples: chi-square against the enumerated law."""
    prompt, count = prompts_of([4])[0], 800
    settings = {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    torch.manual_seed(3)
    out = model.generate(
        torch.tensor([prompt]),
        **settings,
        do_sample=True,
        num_return_sequences=count,
        max_new_tokens=2,
        custom_generate=Speculator(drafter),
    )
    observed = collections.Counter(tuple(row) for row in out[:, len(prompt) :].tolist())

    def law(text: list[int]) -> dict[int, float]:
        step = {"max_new_tokens": 1, "do_sample": True, "output_scores": True, "return_dict_in_generate": True}
        scores = model.generate(torch.tensor([text]), **settings, **step).scores[0][0]
        return {int(i): float(p) for i, p in enumerate(scores.softmax(-1)) if p > 0}

    expected = {}
    for first, p in law(prompt).items():
        for second, q in law([*prompt, first]).items():
            expected[first, second] = p * q * count
    assert len(expected) > 4
    assert set(observed) <= set(expected)
    common = [pair for pair, number in expected.items() if number >= 5]
    rest = count - sum(observed[pair] for pair in common), count - sum(expected[pair] for pair in common)
    counts = [observed[pair] for pair in common] + [rest[0]] * (rest[1] >= 5)
    numbers = [expected[pair] for pair in common] + [rest[1]] * (rest[1] >= 5)
    scale = sum(counts) / sum(numbers)
    assert chisquare(counts, [number * scale for number in numbers]).pvalue > 1e-6


def test_manual_seed_and_seeds_reproduce_a_text(model, drafter):
    inputs, speculator = left_padded(prompts_of(LENGTHS)), Speculator(drafter)
    arguments = {"max_new_tokens": 10, "do_sample": True, "temperature": 2.0}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(**inputs, **arguments, custom_generate=speculator))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    fixed = [
        model.generate(**inputs, **arguments, custom_generate=Speculator(drafter, seeds=[4, 5, 6])) for _ in range(2)
    ]
    assert torch.equal(*fixed)


def test_rounds_policies_and_statistics_are_at_hand(model, drafter):
    reports = []
    speculator = Speculator(drafter, policy=ConfidenceThreshold(0.2), on_round=reports.append)
    out = model.generate(
        torch.tensor(prompts_of([5])),
        max_new_tokens=9,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=speculator,
    )
    emitted = [token for report in reports for row in report.emitted for token in row]
    assert emitted == out.sequences[0, 5:].tolist() == speculator.last.tokens[0]
    assert speculator.last.statistics.rounds == len(reports)
    assert len(speculator.last.logprobs[0]) == 9


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, r"^num_beams: got 2"),
        ({"output_scores": True, "return_dict_in_generate": True}, r"^output_scores: got True"),
        ({"logits_processor": LogitsProcessorList([Custom()])}, r"^logits_processor: got Custom"),
        ({"stopping_criteria": StoppingCriteriaList([Never()])}, r"^stopping_criteria: got Never"),
        ({"do_sample": True, "typical_p": 0.5}, r"^logits_processor: got TypicalLogitsWarper"),
        ({"max_time": 3.0}, r"^stopping_criteria: got MaxTimeCriteria"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_kept_is_refused_by_name(model, drafter, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.generate(
            torch.tensor([[5, 6]]),
            max_new_tokens=3,
            custom_generate=Speculator(drafter),
            **{"do_sample": False, **arguments},
        )


def test_wrong_inputs_are_refused_by_name(model, drafter):
    speculator = Speculator(drafter)
    arguments = {"max_new_tokens": 3, "do_sample": False, "custom_generate": speculator}
    with pytest.raises(ValueError, match=r"^attention_mask: got padding behind text"):
        model.generate(torch.tensor([[5, 6, 0]]), attention_mask=torch.tensor([[1, 1, 0]]), **arguments)
    first = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, return_dict_in_generate=True, do_sample=False)
    cache = first.cache if "cache" in first else first.past_key_values
    with pytest.raises(ValueError, match=r"^cache: got 3 cached positions"):
        model.generate(first.sequences, cache=cache, **arguments)
    with pytest.raises(ValueError, match=r"^inputs_embeds: got a Tensor"):
        speculator(
            model,
            torch.tensor([[5]]),
            [],
            [],
            model.generation_config,
            inputs_embeds=torch.zeros(1, 1, 32),
        )
    with pytest.raises(ValueError, match=r"^feature_layers: got None with a object"):
        Speculator(object())

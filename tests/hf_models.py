"""Toy transformers models with random weights, large enough that every part of them matters."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 83
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    # Layers alternate between windows of 6 and full attention; logits and scores are soft-capped.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16, "sliding_window": 6, "tie_word_embeddings": False}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def tiny_model(name: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float64, **changes):
    """Return a model whose logits are far from flat, in eval mode."""
    torch.manual_seed(seed)
    if name == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512, pad_token_id=0, eos_token_id=None
            )
        )
    else:
        kind, config, sizes = MODELS[name]
        model = kind(config(**{**COMMON, **sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.to(dtype).eval()


def prompts_of(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Return random prompts of these lengths, ids from 3 up."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def left_padded(prompts: list[list[int]], pad: int = 0):
    """Return input_ids and attention_mask as a tokenizer with padding_side="left" does."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}

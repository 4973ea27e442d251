"""What is decoded: prompts that a user typed or keeps in a file, and held-out text of the three domains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dsspark.demo.text import harmless
from dsspark.models.target import BOS_ID
from dsspark.training.corpus import DOMAINS, Domain, held_out_prompts

MAX_POSITIONS = 4096
"""Bytes of prompt and text together. The law stays exact at any length; beyond it a byte-level demo only takes longer."""

_FRAMES = {
    "math": (b"Question: ", b"\nAnswer:"),
    "chat": (b"User: ", b"\nAssistant:"),
    "code": (b"", b""),
}


@dataclass(frozen=True)
class Prompt:
    """Text to continue: any bytes, and what to call it."""

    title: str
    text: bytes

    @property
    def tokens(self) -> list[int]:
        """The token ids: BOS, then the bytes."""
        return [BOS_ID, *self.text]


def user_prompts(texts: Sequence[str], file: str | None, domain: Domain | None, max_new_tokens: int) -> list[Prompt]:
    """Return the user's prompts, in the domain's form if one is named.

    Args:
        texts: what was typed; bytes of the command line that are no UTF-8 survive as surrogates.
        file: a path whose bytes, whatever they are, make one prompt.
        domain: "math" and "chat" put the prompt into the question form that the model was trained on; None takes it as it is.
        max_new_tokens: what is to follow.

    Raises:
        ValueError: for an empty prompt, a file that cannot be read, or one that is too long.
    """
    found = [("--prompt", "your prompt", text.encode("utf-8", "surrogateescape")) for text in texts]
    if file is not None:
        found.append(("--prompt-file", f"file {harmless(os.fsencode(os.path.basename(file)))}", _read(file)))
    before, after = _FRAMES[domain] if domain else (b"", b"")
    prompts = []
    for argument, title, body in found:
        if not body:
            raise ValueError(
                f"{argument}: got an empty prompt, expected at least one byte; type the beginning of a text"
            )
        prompt = Prompt(title, before + body.strip() + after if before else body)
        room = MAX_POSITIONS - max_new_tokens - 1
        if len(prompt.text) > room:
            got = f"more than {MAX_POSITIONS}" if len(body) > MAX_POSITIONS else str(len(prompt.text))
            raise ValueError(
                f"{argument}: got {got} bytes, expected at most {room} with --max-new-tokens {max_new_tokens}; shorten the prompt"
            )
        prompts.append(prompt)
    return prompts


def _read(file: str) -> bytes:
    """Return the first bytes of a file: enough to see that it is too long, whatever its size."""
    try:
        with open(file, "rb") as stream:
            return stream.read(MAX_POSITIONS + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"--prompt-file: got {file!r} ({reason}), expected a readable file of text") from error


def held_out(domains: Sequence[Domain], count: int) -> dict[str, list[Prompt]]:
    """Return `count` held-out prompts of each domain, none of which training has calibrated or measured on.

    Raises:
        ValueError: if the standard library of this Python holds none.
    """
    from dsspark.training.run import Plan  # training is a heavy import

    used = 2 * Plan().calibration_prompts
    prompts: dict[str, list[Prompt]] = {}
    for domain in domains:
        documents = held_out_prompts(domain, used + count)[used:]
        if not documents:
            raise ValueError(
                f"--domain: got no held-out text for {domain}; this Python ships without its library's sources"
            )
        prompts[domain] = [
            Prompt(f"{domain}, held out: {document.name.removeprefix(f'{domain}:')}", document.prompt)
            for document in documents
        ]
    return prompts


__all__ = ["DOMAINS", "MAX_POSITIONS", "Domain", "Prompt", "held_out", "user_prompts"]

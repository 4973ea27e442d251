"""Real text that every Python ships, and worked arithmetic: the three domains the models are trained and measured on.

- code: the standard library's sources;
- chat: its docstrings and the interpreter's help topics, as questions and answers;
- math: `dsspark.training.arithmetic`.

Held-out text comes from other *files* (a hash of the module's or topic's name decides) and, for math, from other seeds: never from
other lines of the same file.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dsspark.models.target import BOS_ID, EOS_ID
from dsspark.training.arithmetic import problem

Domain = Literal["math", "code", "chat"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
HELD_OUT_SHARE = 12
"""One file in this many is held out."""
HELD_OUT_MATH_SEED = 1_000_000_007
MAX_ANSWER = 1_500

_SKIPPED_PARTS = {
    *("test", "tests", "idle_test"),
    *("site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data", "turtledemo"),
}
"""Test suites, what is not the standard library, generated tables and demos."""
_SKIPPED_STEMS = {"stringprep", "entities", "keysyms", "topics", "this"}
_QUESTIONS = ("What does {} do?", "Explain {}.", "How do I use {}?", "Tell me about {}.")


@dataclass(frozen=True)
class Document:
    """One text: a `prompt` and what follows it. `name` tells which file, topic or seed it came from."""

    name: str
    prompt: bytes
    continuation: bytes

    @property
    def text(self) -> bytes:
        """Prompt and continuation."""
        return self.prompt + self.continuation


def is_held_out(name: str) -> bool:
    """Return whether the file or topic `name` belongs to the held-out split: a pure function of the name."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


def check_domain(domain: str) -> None:
    """Raise `ValueError` for a domain that does not exist."""
    if domain not in DOMAINS:
        raise ValueError(f"domain: got {domain!r}, expected one of {', '.join(DOMAINS)}")


@lru_cache(maxsize=1)
def _modules() -> tuple[tuple[str, str], ...]:
    """Return (dotted name, source) of every standard library module worth reading, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if (
            _SKIPPED_PARTS & set(parts)
            or path.stem in _SKIPPED_STEMS
            or path.name.startswith(("_sysconfigdata", "test_"))
        ):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(source) > 200:
            found.append((".".join((*parts[:-1], path.stem)).removesuffix(".__init__"), source))
    return tuple(found)


def _code(held_out: bool) -> Iterator[Document]:
    for name, source in _modules():
        if is_held_out(name) == held_out:
            yield Document(name, b"", source.encode())


def _docstrings(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted object name, docstring) of a module, without importing it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in sources that are only read
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    queue: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [(name, tree)]
    while queue:
        dotted, node = queue.pop(0)
        text = ast.get_docstring(node, clean=False)
        if text and len(text) > 20:
            yield dotted, inspect.cleandoc(text)
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                queue.append((f"{dotted}.{child.name}", child))


def _turn(name: str, answer: str) -> Document:
    """Return a question about `name` and its answer; the wording of the question is a function of the name."""
    question = _QUESTIONS[hashlib.sha256(name.encode()).digest()[1] % len(_QUESTIONS)].format(name)
    if len(answer) > MAX_ANSWER:
        answer = answer[:MAX_ANSWER].rsplit("\n", 1)[0]
    return Document(name, f"User: {question}\nAssistant:".encode(), f" {answer.strip()}\n".encode())


@lru_cache(maxsize=2)
def _chat(held_out: bool) -> tuple[Document, ...]:
    """Return the questions and answers of a split; parsing the sources takes seconds, so they are kept."""
    return tuple(_chat_turns(held_out))


def _chat_turns(held_out: bool) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, source in _modules():
        if is_held_out(name) == held_out:
            yield from (_turn(dotted, text) for dotted, text in _docstrings(name, source))
    for topic, text in sorted(topics.items()):
        if is_held_out(f"topic:{topic}") == held_out:
            paragraphs = [part for part in text.strip().split("\n\n") if len(part) > 80]
            for part in paragraphs:  # a long topic becomes several turns
                yield _turn(topic, inspect.cleandoc(part))


def _math(held_out: bool, count: int) -> Iterator[Document]:
    first = HELD_OUT_MATH_SEED if held_out else 0
    for seed in range(first, first + count):
        prompt, answer = problem(seed)
        yield Document(f"math:{seed}", prompt.encode(), answer.encode())


def documents(domain: Domain, *, held_out: bool, num_math: int = 20_000) -> list[Document]:
    """Return the documents of a domain's split, in a fixed order.

    Args:
        domain: "math", "code" or "chat".
        held_out: which split.
        num_math: problems to generate; ignored by the other domains.

    Raises:
        ValueError: for an unknown domain.
    """
    check_domain(domain)
    if domain == "math":
        return list(_math(held_out, num_math))
    return list(_code(held_out) if domain == "code" else _chat(held_out))


def held_out_prompts(domain: Domain, n: int, *, prompt_bytes: int = 160, seed: int = 0) -> list[Document]:
    """Return n prompts from held-out documents, each with the text that really follows.

    Math and chat prompts are questions; a code prompt is the piece of a source file that ends with a `def` or `class` line.

    Args:
        domain: "math", "code" or "chat".
        n: how many; fewer come back if the split is smaller.
        prompt_bytes: about how long code prompts are.
        seed: of the choice.

    Raises:
        ValueError: for an unknown domain.
    """
    check_domain(domain)
    rng = np.random.default_rng(seed)
    if domain == "math":
        return list(_math(True, n + seed * n))[-n:] if n else []
    pool = documents(domain, held_out=True)
    if domain == "code":
        pool = [prompt for document in pool for prompt in _code_prompts(document, prompt_bytes)]
    return [pool[index] for index in rng.permutation(len(pool))[:n]]


def _code_prompts(document: Document, prompt_bytes: int) -> Iterator[Document]:
    lines = document.text.splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in lines])
    for index, line in enumerate(lines):
        if line.lstrip().startswith((b"def ", b"class ")) and ends[index] >= prompt_bytes:
            start = int(np.searchsorted(ends, ends[index] - prompt_bytes))
            prompt, rest = b"".join(lines[start : index + 1]), document.text[ends[index] :]
            if len(prompt) <= 2 * prompt_bytes and len(rest) >= 200:
                yield Document(f"{document.name}:{index + 1}", prompt, rest)


class TokenStream:
    """The documents of a domain's split as one array of ids, each followed by EOS, with the places where a row may start.

    Args:
        texts: the documents.
        domain: rows of "code" and "chat" may start at any line, rows of "math" at a problem.
    """

    def __init__(self, texts: list[Document], domain: Domain) -> None:
        check_domain(domain)
        if not texts:
            raise ValueError(
                f"texts: got no document for {domain}, expected at least one; is the standard library readable?"
            )
        pieces = [
            np.append(np.frombuffer(text.text, dtype=np.uint8).astype(np.int16), np.int16(EOS_ID)) for text in texts
        ]
        self.tokens: NDArray[np.int16] = np.concatenate(pieces)
        breaks = self.tokens == EOS_ID
        if domain != "math":
            breaks |= self.tokens == ord("\n")
        self.starts: NDArray[np.int64] = np.append(0, np.flatnonzero(breaks) + 1)

    def rows(self, rng: np.random.Generator, count: int, length: int) -> NDArray[np.int64]:
        """Return [count, length] ids: BOS, then text from a start drawn at random (wrapping round at the end)."""
        starts = self.starts[rng.integers(len(self.starts), size=count)]
        offsets = (starts[:, None] + np.arange(length - 1)[None, :]) % len(self.tokens)
        bos = np.full((count, 1), BOS_ID, dtype=np.int64)
        return np.concatenate((bos, self.tokens[offsets].astype(np.int64)), axis=1)

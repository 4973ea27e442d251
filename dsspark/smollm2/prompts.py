"""What SmolLM2 is asked: word problems, functions to write, and questions. Held-out prompts are other ones.

- math: templates filled with names and numbers. Held-out problems use names and seeds that training never sees, in the same templates.
- code: signature and docstring of standard library functions, the function's body left out. Where those are used up, training goes on
  with functions of the packages that torch brings along.
- chat: the questions of `chatterbot-corpus` where it is installed, and questions about standard library modules.

For code and chat, one module or question in twelve is held out, by a hash of its name.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from dsspark.training.corpus import DOMAINS, Domain, documents, is_held_out

NAMES = ("Tom", "Anna", "Ben", "Lily", "Sam", "Maria", "Jack", "Emma", "Paul", "Sara", "Leo", "Nina", "Max", "Julia")
HELD_OUT_NAMES = ("David", "Alice", "Peter", "Olivia", "Daniel", "Kate")
THINGS = ("apples", "books", "pencils", "marbles", "stickers", "cookies", "oranges", "cards", "toys", "flowers")
TEMPLATES = (
    "{a} has {x} {t}. {b} gives {a} {y} more {t}. How many {t} does {a} have now?",
    "{a} had {z} {t} and gave {y} of them to {b}. How many {t} does {a} have left?",
    "{a} buys {y} boxes of {t}. Each box has {x} {t}. How many {t} does {a} have?",
    "{a} has {x} {t} and {b} has {y} {t}. How many {t} do they have together?",
    "A train travels {v} miles per hour. How far does it travel in {h} hours?",
    "{a} earns ${x} per hour and works {h} hours. How much money does {a} earn?",
    "{a} reads {x} pages every day. How many pages does {a} read in {h} days?",
    "There are {m} {t}. {a} shares them equally among {h} friends. How many {t} does each friend get?",
    "A rectangle is {x} cm long and {y} cm wide. What is its area?",
    "A rectangle is {x} cm long and {y} cm wide. What is its perimeter?",
    "{a} has ${z}. {a} buys a shirt for ${x}. How much money is left?",
    "What is {x} + {y}?",
    "What is {z} - {y}?",
    "What is {x} * {h}?",
    "Solve for x: x + {y} = {z}.",
    "Solve for x: {h}x = {m}.",
    "{a} has {x} {t}. {b} has {h} times as many. How many {t} does {b} have?",
    "What is {p} percent of {v}?",
)
MATH_HELD_OUT_SEED = 1_000_003
PACKAGES = ("networkx", "numpy", "sympy", "torch")
"""Whose functions training asks for after those of the standard library."""
_MAX_DOCSTRING = 240
_TOPICS = (
    "What is the Python module {} used for?",
    "Explain the Python module {} in simple terms.",
    "Give a short example of the Python module {}.",
)


def prompts(domain: Domain, count: int, seed: int = 0, *, held_out: bool = False) -> list[str]:
    """Return user messages of a domain, in an order that depends on the seed alone.

    Args:
        domain: "math", "code" or "chat".
        count: how many; "code" (training's own after thousands) and "chat" have an end, and then fewer come back.
        seed: of the choice.
        held_out: from the split that training never reads.

    Raises:
        ValueError: for a domain that does not exist.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain: got {domain!r}, expected one of {', '.join(DOMAINS)}")
    if domain == "math":
        first = seed * 1_000_000 + (MATH_HELD_OUT_SEED if held_out else 0)
        found: dict[str, None] = {}
        for index in range(20 * count):
            found.setdefault(word_problem(first + index, HELD_OUT_NAMES if held_out else NAMES))
            if len(found) == count:
                break
        return list(found)
    source = _functions() if domain == "code" else _questions()
    kept = [text for name, text in source if is_held_out(name) == held_out]
    rng = np.random.default_rng((seed, DOMAINS.index(domain)))
    chosen = [kept[i] for i in rng.permutation(len(kept))[:count]]
    if domain == "code" and not held_out and count > len(kept):
        known = {text for _, text in source}
        more = [text for _, text in _package_functions() if text not in known]
        chosen += [more[i] for i in rng.permutation(len(more))[: count - len(kept)]]
    return chosen


def word_problem(seed: int, names: tuple[str, ...]) -> str:
    """Return the word problem of a seed."""
    rng = np.random.default_rng(seed)
    first, second = rng.choice(len(names), size=2, replace=False)
    h, y, x = int(rng.integers(2, 10)), int(rng.integers(2, 30)), int(rng.integers(5, 50))
    template = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
    return template.format(
        a=names[first],
        b=names[second],
        t=THINGS[int(rng.integers(len(THINGS)))],
        x=x,
        y=y,
        h=h,
        z=x + y + int(rng.integers(1, 30)),
        m=h * int(rng.integers(2, 20)),
        v=10 * int(rng.integers(2, 20)),
        p=5 * int(rng.integers(1, 16)),
    )


def _modules() -> list[tuple[str, str]]:
    both = [*documents("code", held_out=False), *documents("code", held_out=True)]
    return sorted((document.name, document.text.decode()) for document in both)


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in sources that are only read
        try:
            return ast.parse(source)
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[])


@lru_cache(maxsize=1)
def _functions() -> tuple[tuple[str, str], ...]:
    """Return `_stubs` of the standard library."""
    return _stubs(_modules())


@lru_cache(maxsize=1)
def _package_functions() -> tuple[tuple[str, str], ...]:
    """Return `_stubs` of `PACKAGES`, tests left out; nothing is imported."""
    modules = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or [] if spec is not None else []:
            for path in sorted(Path(root).rglob("*.py")):
                parts = path.relative_to(root).parts
                if not {"test", "tests", "testing"} & set(parts):
                    name = ".".join((package, *parts[:-1], path.stem))
                    modules.append((name, path.read_text(encoding="utf-8")))
    return _stubs(modules)


def _stubs(modules: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return (first module, message) for every public function that says in a few lines what it does."""
    found: dict[str, str] = {}
    for module, source in modules:
        for node in ast.walk(_parsed(source)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            docstring = ast.get_docstring(node)
            if not docstring or len(docstring) > _MAX_DOCSTRING:
                continue
            body = docstring.replace("\n", "\n    ")
            stub = f'def {node.name}({ast.unparse(node.args)}):\n    """{body}"""'
            found.setdefault(f"Write this Python function.\n\n```python\n{stub}\n```", module)
    return tuple((module, message) for message, module in found.items())


@lru_cache(maxsize=1)
def _questions() -> tuple[tuple[str, str], ...]:
    """Return (name, message): the corpus' questions where it is installed, and questions about modules."""
    names = sorted({name for name, _ in _modules() if not name.split(".")[-1].startswith("_")})
    topics = [(name, question.format(name)) for name in names for question in _TOPICS]
    return (*topics, *((question, question) for question in _corpus_questions()))


def _corpus_questions() -> Iterator[str]:
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None:
        return
    import yaml  # type: ignore[import-untyped]

    seen = set()
    for folder in spec.submodule_search_locations or []:
        for file in sorted(Path(folder, "data", "english").glob("*.yml")):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            for conversation in content["conversations"]:
                question = inspect.cleandoc(str(conversation[0])).strip()
                if 8 <= len(question) <= 200 and question.lower() not in seen:
                    seen.add(question.lower())
                    yield question[0].upper() + question[1:]

"""Find the smallest case that fails, with Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Case = TypeVar("Case")


def smallest(
    cases: SearchStrategy[Case], fails: Callable[[Case], bool], *, max_examples: int, seed: int
) -> Case | None:
    """Return the smallest case for which `fails` holds, or None if none was found.

    Args:
        cases: a Hypothesis strategy; what it calls simpler is tried when shrinking.
        fails: the condition; an exception it raises is not a failure but passes through.
        max_examples: cases tried.
        seed: of the search, which is reproducible.

    Raises:
        ValueError: for a number of examples below 1.
        RuntimeError: without Hypothesis.
    """
    if max_examples < 1:
        raise ValueError(f"max_examples: got {max_examples}, expected 1 or more")
    hypothesis = require_hypothesis()
    settings = hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        found: Case = hypothesis.find(cases, fails, settings=settings, random=random.Random(seed))
    except hypothesis.errors.NoSuchExample:
        return None
    return found


def require_hypothesis() -> Any:
    """Import Hypothesis, or raise `RuntimeError` that says how to get it."""
    try:
        import hypothesis
    except ModuleNotFoundError as error:
        raise RuntimeError("the audits search with Hypothesis; install it with: pip install 'dsspark[test]'") from error
    return hypothesis


def name_of(subject: object) -> str:
    """Return a readable name of a callable."""
    name = getattr(subject, "__qualname__", None) or type(subject).__name__
    module = getattr(subject, "__module__", None)
    return f"{module}.{name}" if module else str(name)

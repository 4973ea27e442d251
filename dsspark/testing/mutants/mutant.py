"""What a mutant is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from dsspark.testing.checks import CHECKS, Library


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: what is wrong.
        fault: the kind of public fault it stands for.
        check: the name of the check that kills it, in `dsspark.testing.checks.CHECKS`; several, each of which does, separated
            by commas.
        parts: the parts of the `Library` that it replaces.
    """

    name: str
    fault: str
    check: str
    parts: dict[str, Any]

    @property
    def library(self) -> Library:
        """The library with the fault in it."""
        return self.in_library(Library())

    def in_library(self, base: Library) -> Library:
        """Return another library with the fault in it."""
        return replace(base, **self.parts)

    @property
    def checks(self) -> tuple[str, ...]:
        """The names in `check`."""
        return tuple(name.strip() for name in self.check.split(","))

    def complaint(self, seed: int = 0, base: Library | None = None) -> str | None:
        """Return what its check says of it, planted in `base`; None if it survives it (any of them)."""
        library = self.in_library(base or Library())
        complaints = [CHECKS[name](library, seed) for name in self.checks]
        return None if None in complaints else complaints[0]


@contextmanager
def swapped(module: ModuleType, name: str, stage: Callable[..., Any]) -> Iterator[None]:
    """Put another stage into a module for a while."""
    original = getattr(module, name)
    setattr(module, name, stage)
    try:
        yield
    finally:
        setattr(module, name, original)


def with_stage(
    function: Callable[..., Any], module: ModuleType, name: str, stage: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` as it is with another stage inside."""

    def mutated(*args: Any, **kwargs: Any) -> Any:
        with swapped(module, name, stage):
            return function(*args, **kwargs)

    return mutated

"""What a benchmark is made of: inputs, everybody who does the task, a parity check, and the bytes that have to move."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dsspark
from benchmarks.sizes import Size

Run = Callable[[SimpleNamespace], Any]

REFERENCE, COMPILED, KERNEL = "reference", "compiled reference", "kernel"
PUBLIC, COMPETENT = "eager, public", "eager, competent"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody who does a task.

    Attributes:
        run: does it; only this is timed.
        comparable: does it and returns what `Case.agree` compares; `run` if None.
    """

    run: Run
    comparable: Run | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task at one size.

    Attributes:
        name: the component, and what of it.
        size: the size.
        inputs: its tensors, on one device.
        contenders: by name; `REFERENCE` first.
        agree: raises `AssertionError` unless a result does what the reference's did.
        floor_bytes: each input read once, each output written once.
        facts: what else belongs in the record.
    """

    name: str
    size: Size
    inputs: SimpleNamespace
    contenders: Mapping[str, Contender]
    agree: Callable[[Any, Any], None]
    floor_bytes: int
    facts: Mapping[str, float] = field(default_factory=dict)

    def check(self, name: str) -> None:
        """Raise unless a contender agrees with the reference."""
        contender, reference = self.contenders[name], self.contenders[REFERENCE]
        result = (contender.comparable or contender.run)(self.inputs)
        self.agree(result, (reference.comparable or reference.run)(self.inputs))


def moved_to(value: Any, device: str) -> Any:
    """Return tensors, modules and the dataclasses and namespaces that hold them on another device."""
    if isinstance(value, Tensor | torch.nn.Module | dsspark.CostTable):
        return value.to(device)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: moved_to(entry, device) for name, entry in vars(value).items()})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved_to(getattr(value, f.name), device) for f in fields(value)})
    return value


def copied(value: Any) -> Any:
    """Return inputs of their own memory: what is timed rotates them, so that no cache keeps them from one call to the next."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: copied(entry) for name, entry in vars(value).items()})
    if is_dataclass(value) and not isinstance(value, type | dsspark.CostTable):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    return value


def rarely(different: Tensor, name: str) -> None:
    """Rounding near a breakpoint may change a draw; it must stay rare. The tests hold the exact statement."""
    count = int(different.sum())
    assert count <= max(1, len(different) // 20), f"{name}: {count} of {len(different)} requests differ"


def late_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled at its first call: loading the compiler takes seconds, and most who build a case never ask."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    return lambda *args, **named: compiled()(*args, **named)


def backends(
    function: Callable[..., Any], arguments: Callable[[SimpleNamespace], tuple[Any, ...]], **named: Any
) -> dict:
    """Return reference, compiled reference and kernel of one public function."""
    compiled = late_compiled(function.__wrapped__)  # type: ignore[attr-defined]
    return {
        REFERENCE: Contender(run=lambda x: function(*arguments(x), **named, backend="reference")),
        COMPILED: Contender(run=lambda x: compiled(*arguments(x), **named)),
        KERNEL: Contender(run=lambda x: function(*arguments(x), **named, backend="triton")),
    }


def seeded(device: str = "cpu") -> torch.Generator:
    """Return the generator that every input is drawn from, on the device it is for: gigabytes from a processor would take minutes."""
    return torch.Generator(device).manual_seed(0)


def kernel_of(component: str) -> Any:
    """Return a component's kernel module; imported late, for without Triton there is none."""
    return importlib.import_module(f"dsspark.kernels.{component}")

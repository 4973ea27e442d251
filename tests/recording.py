"""Shared by the kernel tests: what a public function launches, and whether a listed variant describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsspark.kernels.launch import TRITON_DTYPES


@dataclass(frozen=True)
class Launch:
    """A kernel launch: its grid, its arguments by name, its warps."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int


def record(monkeypatch, module):
    """Return a list that fills with what `module` launches; the launches still happen."""
    launches = []
    launch = module.launch

    def recording(kernel, grid, *arguments, num_warps=4, **named):
        bound = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        launches.append(Launch(kernel, grid, bound, num_warps))
        launch(kernel, grid, *arguments, num_warps=num_warps, **named)

    monkeypatch.setattr(module, "launch", recording)
    return launches


def describes(variant, launch):
    """Tell whether a variant is the specialisation that Triton would compile for a launch, up to alignment."""
    if variant.kernel is not launch.kernel or variant.num_warps != launch.num_warps:
        return False
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            fits = variant.signature.get(name) == f"*{TRITON_DTYPES[value.dtype]}"
        elif name in variant.signature:  # Triton compiles an integer of 1 in, unless told not to
            fits = isinstance(value, int) and variant.signature[name] == ("i32" if abs(value) < 2**31 else "i64")
        else:
            fits = name in variant.constexprs and variant.constexprs[name] == value
        if not fits:
            return False
    return True

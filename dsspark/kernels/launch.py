"""What every launcher shares: launching, knowing whether Triton interprets, and naming the variants that can be compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

TRITON_DTYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def interpreted(kernel: object) -> bool:
    """Return whether Triton interprets this kernel on the CPU instead of compiling it.

    The interpreter multiplies bfloat16 operands of `tl.dot` as raw bits: kernels take a constexpr flag and upcast them there.
    """
    return isinstance(kernel, InterpretedFunction)


def _on_device_of(arguments: Iterable[object]) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device of the first GPU tensor is the current one: Triton launches on that, not on the tensors'."""
    for value in arguments:
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return torch.cuda.device(value.device)
    return contextlib.nullcontext()


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: object, num_warps: int = 4, num_stages: int = 2, **named: object
) -> None:
    """Launch a kernel over a grid, on the device of its tensors; an empty grid launches nothing.

    Contraction of multiplications and additions is off, so that a law is computed by the same operations as in the reference.
    """
    if 0 in grid:
        return
    # A GPU's overflow to infinity is silent; numpy, which interprets, would warn.
    with np.errstate(all="ignore") if interpreted(kernel) else _on_device_of(arguments):
        kernel[grid](*arguments, **named, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One specialisation of a kernel that a launcher can choose, described well enough to compile it without a GPU.

    Attributes:
        name: "component/kernel/what differs".
        kernel: the `@triton.jit` function.
        signature: Triton type of each argument that is no constexpr ("*bf16", "i32", "i64", "fp32"), by name.
        constexprs: value of each constexpr argument, by name.
        aligned: names of the pointers that are 16-byte aligned and the sizes and strides that are multiples of 16.
        wide_loads: names of the pointers whose loads are vocabulary-sized or W2-sized and must be 16 bytes wide in this variant.
        num_warps: warps a program.
        num_stages: software pipelining.
    """

    name: str
    kernel: Callable[..., None]
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    aligned: tuple[str, ...] = ()
    wide_loads: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = field(default=2)

"""A launch, described in advance: the specialisation that Triton would compile for its arguments.

A component that builds its arguments in one place can list its variants by building them for tensors on the "meta" device, which have
shapes and strides but no memory: what is compiled ahead of time is then what would be launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dsspark.kernels.launch import TRITON_DTYPES, Variant


def describe(
    name: str,
    kernel: Any,
    arguments: Sequence[object],
    constants: Mapping[str, object],
    *,
    values: Sequence[str] = (),
    wide_loads: Sequence[str] = (),
    num_warps: int = 4,
) -> Variant:
    """Return the variant that a launch of `kernel` with these arguments needs; pointers count as aligned to 16 bytes.

    Args:
        name: of the variant.
        kernel: the `@triton.jit` function.
        arguments: tensors, integers and None, in the order of the kernel's parameters.
        constants: its constexprs, by name.
        values: the integers, and the pointers, that the kernel is not specialised on.
        wide_loads: see `Variant`; those that are not pointers here are left out.
        num_warps: warps a program.
    """
    signature: dict[str, str] = {}
    fixed = dict(constants)
    aligned = []
    for parameter, value in zip(kernel.arg_names, arguments, strict=False):
        special = parameter not in values
        if isinstance(value, Tensor):
            signature[parameter] = f"*{TRITON_DTYPES[value.dtype]}"
            aligned += [parameter] if special else []
        elif value is None or (special and value == 1):
            fixed[parameter] = value
        elif isinstance(value, int):
            signature[parameter] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned += [parameter] if special and value % 16 == 0 else []
        else:
            raise TypeError(f"arguments: got {type(value).__name__} for {parameter}, expected a tensor, an int or None")
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs={**fixed, **({"INTERPRETED": False} if "INTERPRETED" in fixed else {})},
        aligned=tuple(aligned),
        wide_loads=tuple(pointer for pointer in wide_loads if pointer in signature),
        num_warps=num_warps,
    )

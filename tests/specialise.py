"""Which specialisation Triton's just-in-time compiler would make of a launch: the rules that `Variant` describes in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsspark.kernels.launch import TRITON_DTYPES, Variant


@dataclass(frozen=True)
class Launch:
    """One launch, described as a `Variant` describes it."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    aligned: frozenset[str]
    num_warps: int
    num_stages: int

    def is_described_by(self, variant: Variant) -> bool:
        """Return whether this launch needs nothing but that variant."""
        return (
            variant.kernel is self.kernel
            and dict(variant.signature) == self.signature
            and dict(variant.constexprs) == self.constexprs
            and self._judged(variant.aligned) == self.aligned
            and (variant.num_warps, variant.num_stages) == (self.num_warps, self.num_stages)
        )

    def _judged(self, names):
        return frozenset(names) - _left_alone(self.kernel)[1]


def _left_alone(kernel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments whose value, and those whose alignment, the compiler ignores."""
    options = getattr(kernel, "kwargs", None)  # a kernel decorated for the interpreter
    if options is None:
        options = {
            "do_not_specialize": [p.name for p in kernel.params if p.do_not_specialize],
            "do_not_specialize_on_alignment": [p.name for p in kernel.params if p.do_not_specialize_on_alignment],
        }
    values = frozenset(options.get("do_not_specialize") or ())
    return values, values | frozenset(options.get("do_not_specialize_on_alignment") or ())


def specialise(kernel, *arguments, num_warps=4, num_stages=2, **constexprs) -> Launch:
    """Describe a launch of `dsspark.kernels.launch.launch`."""
    values, alignments = _left_alone(kernel)
    signature, fixed, aligned = {}, dict(constexprs), set()
    for name, value in zip(kernel.arg_names, arguments, strict=False):
        if value is None or (isinstance(value, int) and value == 1 and name not in values):
            fixed[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TRITON_DTYPES.get(value.dtype) or f'i{8 * value.element_size()}'}"
            if value.data_ptr() % 16 == 0 and name not in alignments:
                aligned.add(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in alignments:
                aligned.add(name)
    if "INTERPRETED" in fixed:
        fixed["INTERPRETED"] = False
    return Launch(kernel, signature, fixed, frozenset(aligned), num_warps, num_stages)

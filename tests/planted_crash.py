"""A kernel whose module takes the compiling process down, as a crash of the compiler would."""

from __future__ import annotations

import os

import triton

from dsspark.kernels.launch import Variant

if __name__.endswith("_compiled"):  # only in the process that compiles
    os._exit(3)


@triton.jit
def crashing_kernel(x_ptr):
    pass


CRASHING = Variant(name="crashing", kernel=crashing_kernel, signature={"x_ptr": "*fp32"}, constexprs={})

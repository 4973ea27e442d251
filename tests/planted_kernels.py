"""Kernels with planted faults for the ahead-of-time compiler, and one without."""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.launch import Variant


@triton.jit
def product_kernel(
    x_ptr,  # [BLOCK_R, V]
    w2_ptr,  # [V, RANK]
    latent_ptr,  # [BLOCK_R, RANK]
    out_ptr,  # [BLOCK_R]
    vocab_size,
    stride_xr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Leave the maximum of U + z W2 of each row: masked and unmasked loads, a loop-carried pointer."""
    offs_k = tl.arange(0, RANK)
    offs_r = tl.arange(0, BLOCK_R)
    latent = tl.load(latent_ptr + offs_r[:, None] * RANK + offs_k[None, :])
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    pointers = x_ptr + offs_r.to(tl.int64)[:, None] * stride_xr + tl.arange(0, BLOCK_V)[None, :]
    for start in range(0, vocab_size, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        mask_v = offs_v < vocab_size
        w2 = tl.load(w2_ptr + offs_v.to(tl.int64)[:, None] * RANK + offs_k[None, :], mask=mask_v[:, None], other=0.0)
        x = tl.load(pointers, mask=mask_v[None, :], other=float("-inf")).to(tl.float32)
        x += tl.dot(latent, tl.trans(w2), input_precision=PRECISION)
        top = tl.maximum(top, tl.max(x, axis=1))
        pointers += BLOCK_V
    tl.store(out_ptr + offs_r, top)


@triton.jit
def spilling_kernel(x_ptr, BLOCK: tl.constexpr):
    """Keep more numbers alive than one warp has registers."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(x_ptr + offs, x / tl.sum(x, axis=0))


@triton.jit
def waiting_kernel(x_ptr):
    """Wait until another program has left a 1."""
    while tl.atomic_cas(x_ptr, 1, 0) == 0:
        pass


@triton.jit
def overflowing_kernel(x_ptr, stride_xr, BLOCK: tl.constexpr):
    """Find a row by a product of 32 bits."""
    tl.store(x_ptr + tl.program_id(0) * stride_xr + tl.arange(0, BLOCK), 0)


@triton.jit
def undefined_kernel(x_ptr):
    """Run in the interpreter as long as the name is a global; never compile."""
    tl.store(x_ptr, no_such_name)  # noqa: F821


def product_variant(name, dtype="bf16", precision="ieee", aligned=True, wide=("x_ptr", "w2_ptr")):
    pointers = {"x_ptr": f"*{dtype}", "w2_ptr": f"*{dtype}", "latent_ptr": f"*{dtype}", "out_ptr": "*fp32"}
    return Variant(
        name=name,
        kernel=product_kernel,
        signature={**pointers, "vocab_size": "i32", "stride_xr": "i64"},
        constexprs={"BLOCK_R": 16, "BLOCK_V": 64, "RANK": 64, "PRECISION": precision},
        aligned=(*pointers, "vocab_size", "stride_xr") if aligned else (),
        wide_loads=wide,
    )


GOOD = product_variant("good")
NARROW = product_variant("narrow", aligned=False)
TF32 = product_variant("tf32", dtype="fp32", precision="tf32")
IEEE = product_variant("ieee", dtype="fp32")
UNUSED = product_variant("unused", wide=("out_ptr",))
MISNAMED = product_variant("misnamed", wide=("w3_ptr",))
SPILLING = Variant(
    name="spilling", kernel=spilling_kernel, signature={"x_ptr": "*fp32"}, constexprs={"BLOCK": 16_384}, num_warps=1
)
WAITING = Variant(name="waiting", kernel=waiting_kernel, signature={"x_ptr": "*i32"}, constexprs={})
OVERFLOWING = Variant(
    name="overflowing",
    kernel=overflowing_kernel,
    signature={"x_ptr": "*i32", "stride_xr": "i32"},
    constexprs={"BLOCK": 64},
)
UNDEFINED = Variant(name="undefined", kernel=undefined_kernel, signature={"x_ptr": "*fp32"}, constexprs={})

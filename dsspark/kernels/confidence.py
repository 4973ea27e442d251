r"""The confidence head, Sequential Temperature Scaling and the survival of prefixes in one launch (paper 3.2.1, eq. 7).

$$z_k = w^\top [h_k ; W_1[x_{k-1}]] + b, \qquad a_k = \prod_{i \le k} \sigma(z_i / T_i)$$

Bytes moved: every row of h and one row of W1 a position, once; w once a program, from cache; R gamma outputs. A program owns all
positions of its requests, for the product runs along them.

Departs from the reference where only the device can see: a token outside 0..V - 1 and a temperature that is not positive and finite
make their logit, or their survival, NaN, which the scheduler counts as 0; nothing is read out of bounds. No gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark.contracts import check_confidence_arguments, check_survival_arguments, check_temperatures
from dsspark.kernels.elementwise import divide, positions_tile, sigmoid
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.numerics import compute_dtype


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size a power of two.

    Attributes:
        block_r: requests a program of the head.
        block_d: entries of h read at once.
        block_e: entries of a row of W1 read at once.
        block_s: requests a program of `survival` alone.
        num_warps: warps a program.
    """

    block_r: int
    block_d: int
    block_e: int
    block_s: int
    num_warps: int = 4


def choose_config(block_size: int, dtype: torch.dtype) -> Config:
    """Return the configuration for blocks of gamma drafts and the dtype of h (or z): a tile of h holds 16 KiB."""
    positions = positions_tile(block_size)
    block_d = 16_384 // (positions * dtype.itemsize)
    return Config(
        block_r=1,
        block_d=block_d,
        block_e=min(256, block_d),
        block_s=512 // positions,
        num_warps=8 if positions > 16 else 4,  # four put 8 bytes of a thread on the stack
    )


@triton.jit
def _running_products(logits, temperatures_ptr, stride_tk, block_size, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return prod_{i <= k} sigmoid(z_i / T_i), [BLOCK_R, BLOCK_K], each product rounded once, left to right."""
    offs_k = tl.arange(0, BLOCK_K)
    if temperatures_ptr is not None:
        offs_t = offs_k.to(tl.int64) * stride_tk
        scale = tl.load(temperatures_ptr + offs_t, mask=offs_k < block_size, other=1.0).to(logits.dtype)
        usable = (scale > 0) & (scale < float("inf"))
        scaled = divide(logits, tl.broadcast_to(tl.where(usable, scale, 1.0)[None, :], (BLOCK_R, BLOCK_K)))
        logits = tl.where(usable[None, :], scaled, float("nan"))
    conditional = sigmoid(logits)
    prefix = tl.full((BLOCK_R,), 1.0, logits.dtype)
    products = tl.zeros((BLOCK_R, BLOCK_K), logits.dtype)
    for k in range(block_size):
        here = (offs_k == k)[None, :]
        prefix *= tl.sum(tl.where(here, conditional, 0.0), axis=1)
        products = tl.where(here, prefix[:, None], products)
    return products


@triton.jit(do_not_specialize=["num_requests", "block_size", "vocab_size"])
def confidence_kernel(
    hidden_ptr,  # [R, gamma, d]
    tokens_ptr,  # [R, gamma]
    w1_ptr,  # [V, r] or None
    weight_ptr,  # [d + r]
    bias_ptr,  # [1] or None
    temperatures_ptr,  # [gamma] or None
    logits_ptr,  # [R, gamma] contiguous or None
    survival_ptr,  # [R, gamma] contiguous or None
    stride_hr,
    stride_hk,
    stride_hd,
    stride_xr,
    stride_xk,
    stride_ev,
    stride_er,
    stride_w,
    stride_tk,
    num_requests,
    block_size,
    hidden_size,
    rank,
    vocab_size,
    COMPUTE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write z, a or both for BLOCK_R requests."""
    offs_row = tl.arange(0, BLOCK_R * BLOCK_K)
    request = tl.program_id(0).to(tl.int64) * BLOCK_R + offs_row // BLOCK_K
    offs_k = (offs_row % BLOCK_K).to(tl.int64)
    mask_row = (request < num_requests) & (offs_k < block_size)

    row_ptr = hidden_ptr + request * stride_hr + offs_k * stride_hk
    sums = tl.zeros((BLOCK_R * BLOCK_K, BLOCK_D), COMPUTE)
    for start in range(0, hidden_size, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = offs_d < hidden_size
        hidden = tl.load(
            row_ptr[:, None] + offs_d[None, :].to(tl.int64) * stride_hd,
            mask=mask_row[:, None] & mask_d[None, :],
            other=0.0,
        )
        weight = tl.load(weight_ptr + offs_d.to(tl.int64) * stride_w, mask=mask_d, other=0.0)
        sums += hidden.to(COMPUTE) * weight.to(COMPUTE)[None, :]
    logits = tl.sum(sums, axis=1)

    if w1_ptr is not None:
        token = tl.load(tokens_ptr + request * stride_xr + offs_k * stride_xk, mask=mask_row, other=0).to(tl.int64)
        known = (token >= 0) & (token < vocab_size)
        row_ptr = w1_ptr + tl.where(known, token, 0) * stride_ev
        sums = tl.zeros((BLOCK_R * BLOCK_K, BLOCK_E), COMPUTE)
        for start in range(0, rank, BLOCK_E):
            offs_e = start + tl.arange(0, BLOCK_E)
            mask_e = offs_e < rank
            embedding = tl.load(
                row_ptr[:, None] + offs_e[None, :].to(tl.int64) * stride_er,
                mask=(mask_row & known)[:, None] & mask_e[None, :],
                other=0.0,
            )
            offs_w = (hidden_size + offs_e).to(tl.int64) * stride_w
            weight = tl.load(weight_ptr + offs_w, mask=mask_e, other=0.0)
            sums += embedding.to(COMPUTE) * weight.to(COMPUTE)[None, :]
        logits = tl.where(known, logits + tl.sum(sums, axis=1), float("nan"))

    if bias_ptr is not None:
        logits += tl.load(bias_ptr).to(COMPUTE)
    offs_out = request * block_size + offs_k
    if logits_ptr is not None:
        tl.store(logits_ptr + offs_out, logits, mask=mask_row)
    if survival_ptr is not None:
        tile = tl.reshape(logits, (BLOCK_R, BLOCK_K))
        products = _running_products(tile, temperatures_ptr, stride_tk, block_size, BLOCK_R, BLOCK_K)
        tl.store(survival_ptr + offs_out, tl.reshape(products, (BLOCK_R * BLOCK_K,)), mask=mask_row)


@triton.jit(do_not_specialize=["num_requests", "block_size"])
def survival_kernel(
    logits_ptr,  # [R, gamma]
    temperatures_ptr,  # [gamma] or None
    survival_ptr,  # [R, gamma] contiguous
    stride_zr,
    stride_zk,
    stride_tk,
    num_requests,
    block_size,
    COMPUTE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a for BLOCK_R requests."""
    request = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask = (request < num_requests)[:, None] & (offs_k < block_size)[None, :]
    offs_in = request[:, None] * stride_zr + offs_k[None, :] * stride_zk
    logits = tl.load(logits_ptr + offs_in, mask=mask, other=0.0).to(COMPUTE)
    products = _running_products(logits, temperatures_ptr, stride_tk, block_size, BLOCK_R, BLOCK_K)
    tl.store(survival_ptr + request[:, None] * block_size + offs_k[None, :], products, mask=mask)


def _launch_head(
    hidden: Tensor,
    previous_tokens: Tensor,
    markov_w1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor | None,
    logits: Tensor | None,
    survival: Tensor | None,
    config: Config | None,
) -> None:
    num_requests, block_size, hidden_size = hidden.shape
    config = config or choose_config(block_size, hidden.dtype)
    vocab_size, rank = (0, 0) if markov_w1 is None else markov_w1.shape
    launch(
        confidence_kernel,
        (triton.cdiv(num_requests, config.block_r),),
        *(hidden, previous_tokens, markov_w1, weight, bias, temperatures, logits, survival),
        *hidden.stride(),
        *previous_tokens.stride(),
        *((0, 1) if markov_w1 is None else markov_w1.stride()),
        *(weight.stride(-1), 1 if temperatures is None else temperatures.stride(0)),
        *(num_requests, block_size, hidden_size, rank, vocab_size),
        COMPUTE=_triton_dtype(compute_dtype(hidden)),
        BLOCK_R=config.block_r,
        BLOCK_K=positions_tile(block_size),
        BLOCK_D=config.block_d,
        BLOCK_E=config.block_e,
        num_warps=config.num_warps,
    )


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _outputs(like: Tensor) -> Tensor:
    return torch.empty(like.shape[:2], dtype=compute_dtype(like), device=like.device)


def variants() -> list[Variant]:
    """Return the specialisations that the launchers choose for the dtypes of real heads; see `Variant`."""
    # A half-precision backbone may carry a head stored in float32.
    pairs = [(dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    pairs += [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
    found = [
        _head_variant(activations, head, gamma, aligned, outputs, optional)
        for activations, head in pairs
        for gamma, aligned, outputs, optional in (
            (7, True, "survival", True),
            (7, True, "logits", True),
            (7, True, "both", True),
            (7, True, "survival", False),
            (7, False, "both", True),
            (32, True, "both", True),
        )
    ]
    found += [_head_variant(torch.float64, torch.float64, gamma, True, "both", True) for gamma in (7, 32)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        found += [_survival_variant(dtype, gamma, scaled) for gamma in (7, 32) for scaled in (True, False)]
    return found


_HEAD_INTEGERS = (
    *("num_requests", "block_size", "hidden_size", "rank", "vocab_size"),
    *(
        "stride_hr",
        "stride_hk",
        "stride_hd",
        "stride_xr",
        "stride_xk",
        "stride_ev",
        "stride_er",
        "stride_w",
        "stride_tk",
    ),
)


def _head_variant(
    activations: torch.dtype, head: torch.dtype, block_size: int, aligned: bool, outputs: str, optional: bool
) -> Variant:
    """Describe `confidence_kernel`; `optional` tells whether there are W1, a bias and temperatures."""
    config = choose_config(block_size, activations)
    compute = compute_dtype(torch.empty(0, dtype=activations))
    result = f"*{TRITON_DTYPES[compute]}"
    signature = {"hidden_ptr": f"*{TRITON_DTYPES[activations]}", "weight_ptr": f"*{TRITON_DTYPES[head]}"}
    signature["tokens_ptr"] = "*i64"
    absent = {"w1_ptr", "bias_ptr", "temperatures_ptr", "logits_ptr", "survival_ptr"}
    if optional:
        signature |= {name: f"*{TRITON_DTYPES[head]}" for name in ("w1_ptr", "bias_ptr")}
        signature["temperatures_ptr"] = "*fp32"
    if outputs != "logits":
        signature["survival_ptr"] = result
    if outputs != "survival":
        signature["logits_ptr"] = result
    absent -= set(signature)
    ones = ["stride_hd", "stride_xk", "stride_er", "stride_w", "stride_tk"] if aligned else []
    signature |= {name: "i32" for name in _HEAD_INTEGERS if name not in ones}
    wide = ("hidden_ptr", "w1_ptr") if "w1_ptr" in signature else ("hidden_ptr",)
    multiples = [*(name for name in signature if name.endswith("_ptr")), "stride_hr", "stride_hk", "stride_ev"]
    return Variant(
        name=f"confidence/head/{TRITON_DTYPES[activations]}-{TRITON_DTYPES[head]}-gamma{block_size}-{outputs}"
        + ("" if optional else "-hidden-only")
        + ("" if aligned else "-unaligned"),
        kernel=confidence_kernel,
        signature=signature,
        constexprs={
            **dict.fromkeys(ones, 1),
            **dict.fromkeys(sorted(absent)),
            "COMPUTE": _triton_dtype(compute),
            "BLOCK_R": config.block_r,
            "BLOCK_K": positions_tile(block_size),
            "BLOCK_D": config.block_d,
            "BLOCK_E": config.block_e,
        },
        aligned=(*multiples, "hidden_size", "rank") if aligned else (),
        wide_loads=wide if aligned else (),
        num_warps=config.num_warps,
    )


def _survival_variant(dtype: torch.dtype, block_size: int, scaled: bool) -> Variant:
    config = choose_config(block_size, dtype)
    compute = compute_dtype(torch.empty(0, dtype=dtype))
    signature = {"logits_ptr": f"*{TRITON_DTYPES[dtype]}", "survival_ptr": f"*{TRITON_DTYPES[compute]}"}
    signature |= {"temperatures_ptr": "*fp32"} if scaled else {}
    signature |= dict.fromkeys(("stride_zr", "num_requests", "block_size"), "i32")
    return Variant(
        name=f"confidence/survival/{TRITON_DTYPES[dtype]}-gamma{block_size}" + ("-scaled" if scaled else ""),
        kernel=survival_kernel,
        signature=signature,
        constexprs={
            "stride_zk": 1,
            "stride_tk": 1,
            **({} if scaled else {"temperatures_ptr": None}),
            "COMPUTE": _triton_dtype(compute),
            "BLOCK_R": config.block_s,
            "BLOCK_K": positions_tile(block_size),
        },
        aligned=tuple(name for name in signature if name.endswith("_ptr")),
        num_warps=config.num_warps,
    )


def confidence_logits(
    hidden: Tensor,
    previous_tokens: Tensor,
    markov_w1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: Config | None = None,
) -> Tensor:
    """Fused twin of `dsspark.reference.confidence.confidence_logits`; same contract, no gradients."""
    check_confidence_arguments(hidden, previous_tokens, markov_w1, weight, bias)
    logits = _outputs(hidden)
    _launch_head(hidden, previous_tokens, markov_w1, weight, bias, None, logits, None, config)
    return logits


def survival(confidence_logits: Tensor, temperatures: Tensor | None = None, *, config: Config | None = None) -> Tensor:
    """Fused twin of `dsspark.reference.confidence.survival`; same contract, no gradients."""
    check_survival_arguments(confidence_logits, temperatures)
    num_requests, block_size = confidence_logits.shape
    config = config or choose_config(block_size, confidence_logits.dtype)
    result = _outputs(confidence_logits)
    launch(
        survival_kernel,
        (triton.cdiv(num_requests, config.block_s),),
        confidence_logits,
        temperatures,
        result,
        *confidence_logits.stride(),
        1 if temperatures is None else temperatures.stride(0),
        num_requests,
        block_size,
        COMPUTE=_triton_dtype(result.dtype),
        BLOCK_R=config.block_s,
        BLOCK_K=positions_tile(block_size),
        num_warps=config.num_warps,
    )
    return result


def confidence_survival(
    hidden: Tensor,
    previous_tokens: Tensor,
    markov_w1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    *,
    keep_logits: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Fused twin of `dsspark.reference.confidence.confidence_survival`; same contract, one launch, no gradients."""
    check_confidence_arguments(hidden, previous_tokens, markov_w1, weight, bias)
    check_temperatures(temperatures, hidden)
    logits = _outputs(hidden) if keep_logits else None
    result = _outputs(hidden)
    _launch_head(hidden, previous_tokens, markov_w1, weight, bias, temperatures, logits, result, config)
    return result, logits

r"""Sequential Temperature Scaling and the expected calibration error, fitted without leaving the device (paper 3.2.1).

$$T_k = \arg\min_T \sum_b \Big| \sum_{s : b(p_s) = b} (p_s - y_s) \Big|, \qquad p_s = a_{s, k-1}\, \sigma(z_{s, k} / T)$$

A position takes one pass over the samples for the whole grid: a program holds its samples and goes through the temperatures, and adds its
share of every bin's sum; a second launch of one program picks the temperature, which the next position's pass reads. The survival
$a_{s, k}$ of each sample is carried from pass to pass, at the temperatures found and at T = 1, for the error before.

Bytes moved a position: z twice (the last position's again, for the survival), y, two float32 a sample read and written. The sums are in
fixed point with 40 fractional bits (fewer beyond four million samples), so that they are exact and the atomics' order does not matter.

Departs from the reference within rounding: a probability is rounded as there, but its sigmoid may differ by an ulp, and with it the bin
of a sample at a bin's edge; two grid temperatures whose errors are that close may be exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark.contracts import (
    as_grid,
    check_bins,
    check_outcome_arguments,
    check_outcome_values,
    check_probability_values,
    check_sts_arguments,
    check_sts_values,
)
from dsspark.kernels.describe import describe
from dsspark.kernels.elementwise import divide, sigmoid
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.numerics import compute_dtype
from dsspark.types import STSFit

_BINS = 16
_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; a power of two.

    Attributes:
        block_s: samples a program.
        num_warps: warps a program.
    """

    block_s: int
    num_warps: int = 8


def choose_config() -> Config:
    """Return the configuration: a thread has 32 entries of the tile of samples and bins."""
    return Config(block_s=512)


def fraction_bits(num_samples: int) -> int:
    """Return the fractional bits with which a sum of that many probabilities fits an int64."""
    return min(40, 62 - num_samples.bit_length())


@triton.jit
def _add(sums_ptr, probability, outcome, mask, num_bins, BITS: tl.constexpr, BINS: tl.constexpr):
    """Add probability - outcome of each sample to the sum of its bin, int64 [num_bins]."""
    index = tl.minimum((probability * num_bins.to(probability.dtype)).to(tl.int32), num_bins - 1)
    unit: tl.constexpr = 1 << BITS
    value = tl.where(mask, (probability * unit).to(tl.int64) - tl.where(outcome, unit, 0), 0)
    for start in range(0, num_bins, BINS):
        offs_b = start + tl.arange(0, BINS)
        part = tl.sum(tl.where(index[:, None] == offs_b[None, :], value[:, None], 0), axis=0)
        tl.atomic_add(sums_ptr + offs_b, part, mask=(offs_b < num_bins) & (part != 0), sem="relaxed")


@triton.jit(do_not_specialize=["position", "block_size", "num_samples", "num_bins", "grid_size"])
def grid_kernel(
    logits_ptr,  # [S, gamma]
    accepted_ptr,  # [S, gamma]
    grid_ptr,  # [G]
    temperatures_ptr,  # [gamma], those before `position` are set
    fitted_ptr,  # [S], survival up to position - 2
    plain_ptr,  # [S], the same at T = 1, up to position - 1
    sums_ptr,  # [gamma, G + 1, num_bins], zeros
    stride_zs,
    stride_zk,
    stride_ys,
    stride_yk,
    position,
    block_size,
    num_samples,
    num_bins,
    grid_size,
    COMPUTE: tl.constexpr,
    BITS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Add BLOCK_S samples to the bins of every temperature at one position, and of T = 1 throughout as the last row."""
    sample = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = sample < num_samples
    place = tl.zeros((BLOCK_S,), tl.int32) + position
    later, kept = mask & (place > 0), mask & (place + 1 < block_size)
    at = logits_ptr + sample * stride_zs + position.to(tl.int64) * stride_zk
    logits = tl.load(at, mask=mask, other=0.0).to(COMPUTE)
    outcome = tl.load(accepted_ptr + sample * stride_ys + position.to(tl.int64) * stride_yk, mask=mask, other=0) != 0

    one = tl.full((BLOCK_S,), 1.0, COMPUTE)
    previous = tl.load(at - stride_zk, mask=later, other=0.0).to(COMPUTE)
    scale = tl.load(temperatures_ptr + position - 1, mask=position > 0, other=1.0).to(COMPUTE)
    prefix = tl.load(fitted_ptr + sample, mask=mask & (place > 1), other=1.0)
    prefix = tl.where(later, prefix * sigmoid(divide(previous, one * scale)), one)
    plain = tl.load(plain_ptr + sample, mask=later, other=1.0) * sigmoid(logits)
    tl.store(fitted_ptr + sample, prefix, mask=later & kept)
    tl.store(plain_ptr + sample, plain, mask=kept)

    row_ptr = sums_ptr + position.to(tl.int64) * (grid_size + 1) * num_bins
    for row in range(grid_size):
        scale = tl.load(grid_ptr + row).to(COMPUTE)
        probability = prefix * sigmoid(divide(logits, one * scale))
        _add(row_ptr, probability, outcome, mask, num_bins, BITS, BINS)
        row_ptr += num_bins
    _add(row_ptr, plain, outcome, mask, num_bins, BITS, BINS)


@triton.jit(do_not_specialize=["num_samples", "num_bins"])
def bins_kernel(
    probabilities_ptr,  # [S]
    outcomes_ptr,  # [S]
    sums_ptr,  # [num_bins], zeros
    stride_p,
    stride_y,
    num_samples,
    num_bins,
    COMPUTE: tl.constexpr,
    BITS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Add BLOCK_S samples to their bins."""
    sample = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = sample < num_samples
    probability = tl.load(probabilities_ptr + sample * stride_p, mask=mask, other=0.0).to(COMPUTE)
    outcome = tl.load(outcomes_ptr + sample * stride_y, mask=mask, other=0) != 0
    _add(sums_ptr, probability, outcome, mask, num_bins, BITS, BINS)


@triton.jit
def _mean(total, num_samples, BITS: tl.constexpr):
    unit: tl.constexpr = 1 << BITS
    return (total.to(tl.float64) / unit / num_samples.to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["position", "num_samples", "num_bins", "grid_size"])
def pick_kernel(
    sums_ptr,  # [gamma, G + 1, num_bins]
    grid_ptr,  # [G] or None
    temperatures_ptr,  # [gamma] or None
    after_ptr,  # [gamma] or None
    before_ptr,  # [gamma], the error of the last row
    position,
    num_samples,
    num_bins,
    grid_size,
    BITS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the first temperature of the least error at one position, that error, and the error of the last row; one program."""
    base_ptr = sums_ptr + position.to(tl.int64) * (grid_size + 1) * num_bins
    best = grid_size.to(tl.int64) * 0 + 0x7FFFFFFFFFFFFFFF
    chosen = grid_size * 0
    last = best * 0
    for first in range(0, grid_size + 1, ROWS):
        offs_g = first + tl.arange(0, ROWS)
        errors = tl.zeros((ROWS,), tl.int64)
        for start in range(0, num_bins, BINS):
            offs_b = start + tl.arange(0, BINS)
            mask = (offs_g <= grid_size)[:, None] & (offs_b < num_bins)[None, :]
            offs = offs_g[:, None].to(tl.int64) * num_bins + offs_b[None, :]
            errors += tl.sum(tl.abs(tl.load(base_ptr + offs, mask=mask, other=0)), axis=1)
        last += tl.sum(tl.where(offs_g == grid_size, errors, 0), axis=0)
        errors = tl.where(offs_g < grid_size, errors, 0x7FFFFFFFFFFFFFFF)
        least = tl.min(errors, axis=0)
        here = tl.min(tl.where(errors == least, offs_g, grid_size), axis=0)
        chosen = tl.where(least < best, here, chosen)  # a tie takes the first
        best = tl.minimum(best, least)
    tl.store(before_ptr + position, _mean(last, num_samples, BITS))
    if temperatures_ptr is not None:
        tl.store(temperatures_ptr + position, tl.load(grid_ptr + chosen))
        tl.store(after_ptr + position, _mean(best, num_samples, BITS))


@dataclass(frozen=True)
class _Step:
    """A launch."""

    kernel: Any
    programs: int
    arguments: Sequence[object]
    constants: Mapping[str, object]
    num_warps: int = 4


_TRITON_FLOATS = {torch.float32: tl.float32, torch.float64: tl.float64}


def _fit_steps(
    logits: Tensor, accepted: Tensor, grid: Tensor, num_bins: int, fit: STSFit, config: Config
) -> list[_Step]:
    """Return the launches of `fit_sts`, two a position."""
    num_samples, block_size = logits.shape
    dtype, device = compute_dtype(logits), logits.device
    sums = torch.zeros((block_size, len(grid) + 1, num_bins), dtype=torch.int64, device=device)
    fitted, plain = (torch.empty((num_samples,), dtype=dtype, device=device) for _ in range(2))
    bits = {"BITS": fraction_bits(num_samples), "BINS": _BINS}
    constants = {**bits, "COMPUTE": _TRITON_FLOATS[dtype], "BLOCK_S": config.block_s}
    tensors = (logits, accepted, grid, fit.temperatures, fitted, plain, sums, *logits.stride(), *accepted.stride())
    results = (sums, grid, fit.temperatures, fit.ece_after, fit.ece_before)
    steps = []
    for k in range(block_size):
        counted = (*tensors, k, block_size, num_samples, num_bins, len(grid))
        programs = triton.cdiv(num_samples, config.block_s)
        steps.append(_Step(grid_kernel, programs, counted, constants, config.num_warps))
        steps.append(_Step(pick_kernel, 1, (*results, k, num_samples, num_bins, len(grid)), bits | {"ROWS": _ROWS}))
    return steps


def _error_steps(values: Tensor, outcomes: Tensor, num_bins: int, error: Tensor, config: Config) -> list[_Step]:
    """Return the launches of `expected_calibration_error` on flat samples."""
    num_samples = values.shape[0]
    sums = torch.zeros((num_bins,), dtype=torch.int64, device=values.device)
    bits = {"BITS": fraction_bits(num_samples), "BINS": _BINS}
    constants = {**bits, "COMPUTE": _TRITON_FLOATS[compute_dtype(values)], "BLOCK_S": config.block_s}
    arguments = (values, outcomes, sums, values.stride(0), outcomes.stride(0), num_samples, num_bins)
    programs = triton.cdiv(num_samples, config.block_s)
    pick = (sums, None, None, None, error, 0, num_samples, num_bins, 0)
    return [
        _Step(bins_kernel, programs, arguments, constants, config.num_warps),
        _Step(pick_kernel, 1, pick, bits | {"ROWS": _ROWS}),
    ]


def _launch(steps: Sequence[_Step]) -> None:
    for step in steps:
        launch(step.kernel, (step.programs,), *step.arguments, **step.constants, num_warps=step.num_warps)  # type: ignore[arg-type]


def _empty_fit(block_size: int, device: torch.device) -> STSFit:
    numbers = [torch.empty((block_size,), dtype=torch.float32, device=device) for _ in range(3)]
    return STSFit(temperatures=numbers[0], ece_before=numbers[1], ece_after=numbers[2])


_INTEGERS = ("position", "block_size", "num_samples", "num_bins", "grid_size")


def variants() -> list[Variant]:
    """Return the specialisations for rows of seven positions and the dtypes of logits and outcomes that occur."""
    found: dict[str, Variant] = {}
    config, meta = choose_config(), torch.device("meta")
    grid, fit = torch.empty((97,), device=meta), _empty_fit(7, meta)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for outcomes in (torch.bool, torch.int64, torch.float32):
            logits, accepted = (torch.empty((4096, 7), dtype=kind, device=meta) for kind in (dtype, outcomes))
            steps = _fit_steps(logits, accepted, grid, 20, fit, config)[:2]
            steps += _error_steps(logits[:, 0].contiguous(), accepted[:, 0].contiguous(), 20, fit.ece_before[0], config)
            for step in steps:
                kinds = f"{TRITON_DTYPES[dtype]}-{TRITON_DTYPES[outcomes]}"
                if step.kernel is pick_kernel:
                    kinds = "error" if step.arguments[1] is None else "grid"
                name = f"calibration/{step.kernel.fn.__name__.removesuffix('_kernel')}/{kinds}"
                found[name] = describe(
                    name, step.kernel, step.arguments, step.constants, values=_INTEGERS, num_warps=step.num_warps
                )
    return list(found.values())


def fit_sts(
    confidence_logits: Tensor,
    accepted: Tensor,
    *,
    num_bins: int = 20,
    grid: Tensor | Sequence[float] | None = None,
    config: Config | None = None,
) -> STSFit:
    """Fused twin of `dsspark.reference.calibration.fit_sts`; same contract, two launches a position.

    Synchronises for the checks at the start and not after them.
    """
    check_sts_arguments(confidence_logits, accepted, num_bins)
    check_sts_values(confidence_logits, accepted)
    temperatures = as_grid(grid, confidence_logits.device, read=True).contiguous()
    fit = _empty_fit(confidence_logits.shape[1], confidence_logits.device)
    logits, outcomes = confidence_logits.detach(), accepted.detach()
    _launch(_fit_steps(logits, outcomes, temperatures, num_bins, fit, config or choose_config()))
    return fit


def expected_calibration_error(
    probabilities: Tensor, outcomes: Tensor, *, num_bins: int = 20, config: Config | None = None
) -> Tensor:
    """Fused twin of `dsspark.reference.calibration.expected_calibration_error`; same contract, two launches.

    Synchronises for the checks. Samples of more than one dimension whose strides do not flatten are copied.
    """
    check_bins(num_bins)
    check_outcome_arguments("probabilities", probabilities, outcomes)
    check_outcome_values(outcomes)
    check_probability_values(probabilities)
    error = torch.empty((), dtype=torch.float32, device=probabilities.device)
    values, events = probabilities.detach().flatten(), outcomes.detach().flatten()
    _launch(_error_steps(values, events, num_bins, error, config or choose_config()))
    return error

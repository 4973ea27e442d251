r"""Top-k, top-p and min-p of target rows as thresholds, without sorting: what `verify` needs to filter a row while it reads it.

The rule is `dsspark.reference.filters`': order the tokens of a row by (logit descending, id ascending); keep the first k; of the
renormalised survivors keep the smallest prefix whose mass reaches top_p; then drop what weighs less than min_p. The first two keep a
prefix of the order, so a row's filter is a logit, the last id kept among the tokens that tie at it, and a least weight: see `kept`.
Since the tokens that min-p keeps are a prefix too, the sum of what is kept is the smaller of two sums.

Bytes moved, in reads of a row after its statistics (`dsspark.kernels.selection` has the method): min-p alone reads it once. A search
reads it once, once more for the tokens it is then left with, if these are at most 2,048, and once for each further narrowing until they
are: two or three times, with top-k and top-p together as with one of them. Only where more than 2,048 tokens of a row are too close to
be told apart by then, as when that many are tied, there is more to read, at most:

    dtype      one of top-k, top-p   both
    bfloat16   2 1/64                3 1/64
    float16    2 1/8                 3 1/8
    float32    3 1/2                 4 1/512 (4 unless tied tokens are split)

The fractions are the part of a row that is searched for the last of tied tokens, where ties are split. Both together on float32 could
read 5: top-k's cut is certain after three passes, 11 of 32 bits each, top-p's target not before, and the fourth must then settle
top-p. It does if 2,048 tokens or 1,024 keys are left to it, which fails only if top-k's first two passes both cut a bin that holds
much of the mass, weights in it differ, and more than 2,048 tokens lie in one of 2,048 bins of the mass in doubt.
A row is no longer read once its cutoff is known. Rows that are greedy, skipped, invalid or keep all are not read.
Scratch: 24 KiB a row and filter.

Only tokens inside a search's interval touch its bins, by atomic additions. Top-p alone starts from an interval that leaves out what
is too light to matter; so does top-k if it is given the maxima of groups of tokens, which the statistics of a row have anyway.

Departs from the reference within rounding: masses are sums of weights in fixed point with 40 fractional bits, exact and independent of
the order, where the reference adds float64; top-p's crossing token can differ only where the two sums round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401 - `kept` is interpreted only where it is visible
from torch import Tensor

from dsspark._checks import INT_DTYPES, check_device, check_dtype, check_shape
from dsspark.contracts import check_filters
from dsspark.kernels.describe import describe
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.kernels.narrowing import end_kernel, walk_kernel
from dsspark.kernels.sampling import KERNEL_DTYPES, check_logits, rows_a_program
from dsspark.kernels.selection import (
    BIN_BITS,
    FIELDS,
    LAST_BITS,
    begin_kernel,
    count_kernel,
    floor_kernel,
)
from dsspark.types import Filters

MAX_VOCAB_SIZE = 1 << 22
"""The largest V whose masses, up to V * 2**40, leave room in an int64."""

_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that a value of the dtype leaves zero."""

_ROWS_BEGIN = 128
_MOST_GROUPS = 2048
_NEUTRAL = (0, 1, 0)
"""What keeps all: top-k, top-p, min-p."""

_UNSPECIALISED: dict[Any, tuple[str, ...]] = {
    begin_kernel: ("num_rows", "num_requests", "vocab_size"),
    floor_kernel: ("num_rows", "num_groups"),
    count_kernel: ("num_rows",),
    walk_kernel: ("num_rows",),
    end_kernel: ("num_rows",),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size a power of two.

    Attributes:
        block_r: rows a program.
        block_v: tokens of a row a program.
        block_s: rows a program of the kernels that read bins instead of logits.
        num_warps: warps a program of the kernels that count and walk; 4 in the others.
    """

    block_r: int
    block_v: int
    block_s: int = 1
    num_warps: int = 8


def choose_config(vocab_size: int) -> Config:
    """Return the configuration for rows of V logits: a thread has one load of 16 bytes of bfloat16 logits."""
    block_v = min(int(triton.next_power_of_2(vocab_size)), 2048)
    return Config(block_r=rows_a_program(block_v), block_v=block_v)


def middle_passes(dtype: torch.dtype, top_k: bool, top_p: bool) -> int:
    """Return how many passes may follow the first before the last one, whatever the logits are."""
    bits = 32 - _LOW_BITS[dtype] - BIN_BITS  # of the keys, left after the first pass
    alone = max(0, int(triton.cdiv(bits - LAST_BITS, BIN_BITS)))
    # With both, top-k's search must end, and until then top-p's may have to keep every bin.
    return alone + (int(triton.cdiv(bits, BIN_BITS)) if top_k and top_p else 0)


@dataclass(frozen=True, kw_only=True)
class Cutoffs:
    """What the filters leave of each row: see `kept`.

    Attributes:
        threshold: [N] float32; logits above it are kept. Not always a logit of the row, but one wherever tied tokens are split; -inf where
            top-k and top-p keep all, the largest logit at temperature 0.
        last_id: [N] int32; of the tokens whose logit equals the threshold, those up to this id are kept.
        min_weight: [N] float32; the least weight kept, relative to the row's maximum.
        kept_sum: [N] float32, the sum of the kept weights, relative to the row's maximum; 1 at temperature 0, where the law is one-hot
            whatever the filters are; NaN for a row that is no distribution, that was skipped, or whose filters are out of range.
        in_range: [N] bool, whether the row's entries of the filters are in range; False for a row that was skipped.
    """

    threshold: Tensor
    last_id: Tensor
    min_weight: Tensor
    kept_sum: Tensor
    in_range: Tensor


@triton.jit
def kept(x, token, weight, threshold, last_id, min_weight):
    """Return which tokens of a tile the filters keep; x is the stored logit in float32, `weight` relative to the row's maximum."""
    return ((x > threshold) | ((x == threshold) & (token <= last_id))) & (weight >= min_weight)


@dataclass(frozen=True)
class _Step:
    """A launch."""

    kernel: Any
    programs: int
    arguments: tuple[object, ...]
    constants: Mapping[str, int]
    num_warps: int = 4


def _values(filters: Filters) -> tuple[float | Tensor | None, ...]:
    return filters.top_k, filters.top_p, filters.min_p


def _entries(filters: Filters, num_requests: int, device: torch.device) -> Tensor:
    """Return the filters of each request, [3, R] float64, in which every entry is exact."""
    entries = torch.empty((3, num_requests), dtype=torch.float64, device=device)
    for row, value, neutral in zip(entries, _values(filters), _NEUTRAL, strict=True):
        if isinstance(value, Tensor):
            row.copy_(value)
        else:
            row.fill_(neutral if value is None else value)
    return entries


def _outputs(num_rows: int, device: torch.device) -> Cutoffs:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows,), dtype=dtype, device=device)

    return Cutoffs(
        threshold=empty(torch.float32),
        last_id=empty(torch.int32),
        min_weight=empty(torch.float32),
        kept_sum=empty(torch.float32),
        in_range=empty(torch.bool),
    )


def _steps(
    logits: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    filters: Filters,
    request_ids: Tensor,
    skip: Tensor | None,
    group_max: Tensor | None,
    found: Cutoffs,
    config: Config,
) -> Iterator[_Step]:
    """Yield what `cutoffs` launches, in order."""
    num_rows, vocab_size = logits.shape
    low = {"LOW": _LOW_BITS[logits.dtype]}
    state = torch.empty((FIELDS, num_rows), dtype=torch.int64, device=logits.device)
    outputs = (found.threshold, found.last_id, found.min_weight, found.kept_sum, found.in_range)
    entries = _entries(filters, temperature.shape[0], logits.device)
    tensors = (temperature, entries, row_max, row_sum, request_ids, skip, state, *outputs)
    strides = (temperature.stride(0), request_ids.stride(0), 0 if skip is None else skip.stride(0))
    arguments = (*tensors, *strides, num_rows, temperature.shape[0], vocab_size)
    yield _Step(begin_kernel, triton.cdiv(num_rows, _ROWS_BEGIN), arguments, low | {"BLOCK_N": _ROWS_BEGIN})

    # A filter may remove something, as far as the host knows.
    active = [
        isinstance(value, Tensor) or (value is not None and value != neutral)
        for value, neutral in zip(_values(filters), _NEUTRAL, strict=True)
    ]
    if any(active):
        yield from _searches(logits, row_max, state, group_max, found, config, *active[:2])


def _searches(
    logits: Tensor,
    row_max: Tensor,
    state: Tensor,
    group_max: Tensor | None,
    found: Cutoffs,
    config: Config,
    top_k: bool,
    top_p: bool,
) -> Iterator[_Step]:
    """Yield the launches of top-k's and top-p's searches, one of the two or neither, and of the end."""
    num_rows, vocab_size = logits.shape
    low = {"LOW": _LOW_BITS[logits.dtype]}
    slots = int(top_k) + int(top_p)
    shape = (num_rows, slots, 1 << BIN_BITS)
    counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
    masses = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    few = triton.cdiv(num_rows, config.block_s)
    searched = low | {"BLOCK_S": config.block_s}
    tile = {"BLOCK_R": config.block_r, "BLOCK_V": config.block_v, "SLOTS": slots}
    tiles = triton.cdiv(vocab_size, config.block_v) * triton.cdiv(num_rows, config.block_r)
    sizes = (*logits.stride(), num_rows, vocab_size)
    if top_k and group_max is not None:
        groups = {"GROUPS": min(_MOST_GROUPS, int(triton.next_power_of_2(group_max.shape[1])))}
        given = (group_max, state, *group_max.stride(), num_rows, group_max.shape[1])
        yield _Step(floor_kernel, few, given, searched | groups)
    middle = middle_passes(logits.dtype, top_k, top_p)
    for stage in (0, *(1,) * middle, 2) if slots else (0,):
        constants = low | tile | {"STAGE": stage}
        yield _Step(count_kernel, tiles, (logits, row_max, state, counts, masses, *sizes), constants, config.num_warps)
        if slots and stage < 2:
            constants = searched | {"STAGE": stage, "SLOTS": slots}
            yield _Step(walk_kernel, few, (row_max, state, counts, masses, num_rows), constants, config.num_warps)
    ends = (logits, row_max, state, counts, masses, found.threshold, found.last_id, found.kept_sum, *sizes)
    yield _Step(end_kernel, few, ends, searched | {"SLOTS": slots, "BLOCK_V": config.block_v})


def _check(
    logits: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    filters: Filters,
    request_ids: Tensor,
    skip: Tensor | None,
    group_max: Tensor | None,
) -> None:
    check_shape("logits", logits, ("N", "V"))
    check_logits("logits", logits)
    num_rows, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"logits: got V = {vocab_size}, expected 1..{MAX_VOCAB_SIZE}; masses are sums in an int64")
    check_shape("temperature", temperature, ("R",))
    check_filters(filters, temperature.shape[0], logits)
    rows = {"row_max": row_max, "row_sum": row_sum, "request_ids": request_ids, "skip": skip}
    for name, tensor in rows.items():
        if tensor is not None:
            check_shape(name, tensor, (num_rows,))
    if group_max is not None:
        check_shape("group_max", group_max, (num_rows, "G"))
    check_dtype("request_ids", request_ids, INT_DTYPES)
    if skip is not None:
        check_dtype("skip", skip, (torch.bool,))
    floats = {"temperature": temperature, "row_max": row_max, "row_sum": row_sum, "group_max": group_max}
    for name, tensor in floats.items():
        if tensor is not None:
            check_dtype(name, tensor, (torch.float32,))
    for name, tensor in (rows | floats).items():
        if tensor is not None:
            check_device(name, tensor, "logits", logits)
    for name, tensor in (("row_max", row_max), ("row_sum", row_sum)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: got strides {tensor.stride()}, expected a contiguous tensor; copy it")


def cutoffs(
    logits: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    filters: Filters,
    request_ids: Tensor,
    *,
    skip: Tensor | None = None,
    group_max: Tensor | None = None,
    config: Config | None = None,
) -> Cutoffs:
    """Find the cutoffs of each row.

    Args:
        logits: [N, V] float32, bfloat16 or float16, any strides.
        temperature: T of each request, [R] float32, any stride.
        row_max: [N] float32 contiguous, the largest logit of each row.
        row_sum: [N] float32 contiguous, the sum of its weights relative to it; NaN for a row that is no distribution, which is then not
            read.
        filters: one entry a request ([R] tensors) or scalars.
        request_ids: [N] int32 or int64, the request of each row; -1 for padding, which is not read.
        skip: [N] bool, rows that are not read either; None skips none.
        group_max: [N, G] float32, any strides: the maxima of parts of each row that have no token in common. Only speed depends on it:
            with G >= k, tokens that cannot be among the first k never touch the bins. None does without.
        config: how to cut the work.

    Raises:
        ValueError: for shapes or devices that do not belong together, and a vocabulary above `MAX_VOCAB_SIZE`.
        TypeError: for dtypes that are not listed.

    Numerics: see the module; deterministic. Cost: see the module; nothing synchronises; 3 to 15 launches, most of which return at once.
    """
    _check(logits, temperature, row_max, row_sum, filters, request_ids, skip, group_max)
    config = config or choose_config(logits.shape[1])
    found = _outputs(logits.shape[0], logits.device)
    steps = _steps(logits, temperature, row_max, row_sum, filters, request_ids, skip, group_max, found, config)
    for step in steps:
        launch(step.kernel, (step.programs,), *step.arguments, **step.constants, num_warps=step.num_warps)
    return found


def _examples(vocab_size: int, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, _Step]]:
    """Yield launches of every kind on tensors without memory."""
    num_rows = 48

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    config = choose_config(vocab_size)
    found = _outputs(num_rows, torch.device("meta"))
    for dtype in dtypes:
        logits, numbers = empty(num_rows, vocab_size, dtype=dtype), empty(num_rows)
        ids, groups = empty(num_rows, dtype=torch.int32), empty(num_rows, 594)
        for filters in (Filters(min_p=0.5), Filters(top_k=2), Filters(top_k=2, top_p=0.5)):
            for skip in (None, empty(num_rows, dtype=torch.bool)):
                arguments = (logits, numbers[:6], numbers, numbers, filters, ids, skip, groups, found, config)
                for step in _steps(*arguments):
                    which = TRITON_DTYPES[dtype] + ("" if vocab_size % 16 == 0 else "-unaligned")
                    for name in ("STAGE", "SLOTS"):
                        which += f"-{name.lower()}{step.constants[name]}" if name in step.constants else ""
                    which += "-skip" if step.kernel is begin_kernel and skip is not None else ""
                    yield f"filters/{step.kernel.fn.__name__.removesuffix('_kernel')}/{which}", step


def variants() -> list[Variant]:
    """Return the specialisations that `cutoffs` needs for a vocabulary that is a multiple of 16, and for one that is not."""
    found: dict[str, Variant] = {}
    for vocab_size, dtypes in ((151_936, KERNEL_DTYPES), (50_257, (torch.bfloat16,))):
        for name, step in _examples(vocab_size, dtypes):
            reads = step.kernel is count_kernel or (step.kernel is end_kernel and step.constants["SLOTS"] > 0)
            if name not in found and (reads or vocab_size % 16 == 0):
                found[name] = describe(
                    name,
                    step.kernel,
                    step.arguments,
                    step.constants,
                    values=_UNSPECIALISED[step.kernel],
                    wide_loads=("logits_ptr",) if reads and vocab_size % 16 == 0 else (),
                    num_warps=step.num_warps,
                )
    return list(found.values())

r"""Algorithm 1 and its production form in one launch or two, without a word to the host (paper 3.2.2 and 5.2).

$$\Theta_n = \Big(R + \sum_{i \le n} a_{(i)}\Big) \cdot \mathrm{SPS}(R + n)$$

Up to 512 padded candidates, `schedule` and `plan_budget` are one launch of one program, which sorts. Beyond that, and in float64,
a first launch ranks every candidate by counting (R gamma squared comparisons, over all multiprocessors; no limit on R gamma), and
a second walks along the order. `admit` ranks only, in one launch. See `dsspark.kernels.ranking`.

Bytes moved: the survivals, from cache after their first reading, R + n entries of SPS and R lengths; with two launches also eight
bytes a candidate (its survival in order and its rank), written and read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsspark.contracts import check_budget_arguments, check_search_arguments
from dsspark.cost_table import CostTable
from dsspark.kernels.elementwise import POSITIONS_TILES, positions_tile
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.kernels.ranking import (
    RANK_INTEGERS,
    SEARCH_INTEGERS,
    SORT_INTEGERS,
    rank_kernel,
    search_kernel,
    sort_kernel,
)
from dsspark.numerics import compute_dtype

_SORT_SIZES = (128, 512)
"""Candidates, padded, that one program sorts: 1,024 would take twice as long to compile for what a second launch costs."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size a power of two.

    Attributes:
        block_sort: candidates, padded, that are sorted in one launch; 0 for two launches.
        own_r: requests whose candidates a program ranks.
        other_r: requests it ranks them among at once.
        block_n: survivals in order that are searched at once.
        block_r: requests whose ranks are counted at once.
        num_warps: warps a program that ranks.
        search_warps: warps of the one that sorts or searches.
    """

    block_sort: int
    own_r: int
    other_r: int = 64
    block_n: int = 1024
    block_r: int = 256
    num_warps: int = 4
    search_warps: int = 8


def choose_config(num_requests: int, block_size: int, dtype: torch.dtype) -> Config:
    """Return the configuration for R blocks of gamma drafts and the dtype of survivals: a program ranks 64 candidates."""
    positions = positions_tile(block_size)
    fitting = (size for size in _SORT_SIZES if num_requests * positions <= size and dtype != torch.float64)
    return Config(block_sort=next(fitting, 0), own_r=max(1, 64 // positions))


def _empty(survival: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=survival.device)


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _scale(num_requests: int, num_candidates: int) -> float:
    """Return the largest 2 ** k such that sums of multiples of 2 ** -k up to R + R gamma are exact in float64."""
    return float(2 ** (53 - (num_requests + num_candidates).bit_length()))


def _rank(
    survival: Tensor,
    ranked: Tensor | None,
    ranks: Tensor | None,
    budget: Tensor | None,
    lengths: Tensor | None,
    limit: int,
    config: Config,
) -> None:
    """Launch `rank_kernel`."""
    num_requests, block_size = survival.shape
    launch(
        rank_kernel,
        (triton.cdiv(num_requests, config.own_r),),
        *(survival.detach(), ranked, ranks, budget, lengths),
        *(limit, num_requests, block_size, *survival.stride()),
        COMPUTE=_triton_dtype(survival.dtype),
        OWN_R=config.own_r,
        OTHER_R=config.other_r,
        BLOCK_K=positions_tile(block_size),
        num_warps=config.num_warps,
    )


def _search(
    survival: Tensor,
    cost_table: CostTable,
    fitting: int,
    lengths: Tensor | None,
    budget: Tensor | None,
    config: Config | None,
) -> None:
    """Write the lengths or the budget."""
    num_requests, block_size = survival.shape
    positions = positions_tile(block_size)
    config = config or choose_config(num_requests, block_size, survival.dtype)
    scale = _scale(num_requests, survival.numel())
    if config.block_sort:
        _check_sort(config, num_requests * positions, survival.dtype)
        launch(
            sort_kernel,
            (1,),
            *(survival.detach(), cost_table.sps, lengths, budget),
            *(num_requests, block_size, fitting, *survival.stride(), scale),
            BLOCK_R=config.block_sort // positions,
            BLOCK_K=positions,
            num_warps=config.search_warps,
        )
        return
    ranked = torch.empty((survival.numel(),), dtype=compute_dtype(survival), device=survival.device)
    ranks = None if lengths is None else _empty(survival, (survival.numel(),))
    _rank(survival, ranked, ranks, None, None, 0, config)
    launch(
        search_kernel,
        (1,),
        *(ranked, ranks, cost_table.sps, lengths, budget),
        *(num_requests, block_size, fitting, scale),
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        num_warps=config.search_warps,
    )


def _check_sort(config: Config, num_candidates: int, dtype: torch.dtype) -> None:
    if num_candidates > config.block_sort or dtype == torch.float64:
        raise ValueError(
            f"config: got block_sort = {config.block_sort} for {num_candidates} candidates in {dtype}, expected at least as many, "
            "and none in float64; use block_sort = 0, or choose_config(...)"
        )


def variants() -> list[Variant]:
    """Return the specialisations that the launchers choose; of other dtypes than float32, which survivals have, some."""
    single, double = torch.float32, torch.float64
    found = [_rank_variant(single, positions, use) for positions in POSITIONS_TILES for use in _RANK_USES]
    for positions, size, plan in product(POSITIONS_TILES, _SORT_SIZES, (False, True)):
        found.append(_sort_variant(single, positions, size, plan))
    found += [_search_variant(dtype, plan) for dtype in (single, double) for plan in (False, True)]
    found += [_rank_variant(double, 8, use) for use in _RANK_USES]
    for dtype in (torch.bfloat16, torch.float16):
        found += [_rank_variant(dtype, 8, use) for use in ("schedule", "admit-i32")]
        found.append(_sort_variant(dtype, 8, _SORT_SIZES[0], False))
    return found


_RANK_USES: dict[str, dict[str, str]] = {
    "schedule": {"sorted_ptr": "", "ranks_ptr": "*i32"},
    "plan": {"sorted_ptr": ""},
    "admit": {"lengths_ptr": "*i32"},
    "admit-i32": {"lengths_ptr": "*i32", "budget_ptr": "*i32"},
    "admit-i64": {"lengths_ptr": "*i32", "budget_ptr": "*i64"},
}
"""Which of its pointers `rank_kernel` gets, and their types; the survivals in order are float32 or float64."""


def _rank_variant(dtype: torch.dtype, positions: int, use: str) -> Variant:
    config = choose_config(2048, positions, dtype)
    compute = compute_dtype(torch.empty(0, dtype=dtype))
    pointers = {name: kind or f"*{TRITON_DTYPES[compute]}" for name, kind in _RANK_USES[use].items()}
    absent = {"sorted_ptr", "ranks_ptr", "budget_ptr", "lengths_ptr"} - set(pointers)
    return Variant(
        name=f"scheduler/rank/{TRITON_DTYPES[dtype]}-gamma{positions}-{use}",
        kernel=rank_kernel,
        signature={"survival_ptr": f"*{TRITON_DTYPES[dtype]}", **pointers, **dict.fromkeys(RANK_INTEGERS, "i32")},
        constexprs={
            **dict.fromkeys(sorted(absent)),
            "COMPUTE": _triton_dtype(dtype),
            "OWN_R": config.own_r,
            "OTHER_R": config.other_r,
            "BLOCK_K": positions,
        },
        aligned=tuple(name for name in pointers if name != "budget_ptr"),
        num_warps=config.num_warps,
    )


def _sort_variant(dtype: torch.dtype, positions: int, size: int, plan: bool) -> Variant:
    config = choose_config(size // positions, positions, dtype)
    output, absent = ("budget_ptr", "lengths_ptr") if plan else ("lengths_ptr", "budget_ptr")
    return Variant(
        name=f"scheduler/sort/{TRITON_DTYPES[dtype]}-gamma{positions}-{size}-{'plan' if plan else 'schedule'}",
        kernel=sort_kernel,
        signature={
            "survival_ptr": f"*{TRITON_DTYPES[dtype]}",
            "sps_ptr": "*fp64",
            output: "*i32",
            **dict.fromkeys(SORT_INTEGERS, "i32"),
            "scale": "fp32",
        },
        constexprs={absent: None, "BLOCK_R": size // positions, "BLOCK_K": positions},
        aligned=(output,),
        num_warps=config.search_warps,
    )


def _search_variant(dtype: torch.dtype, plan: bool) -> Variant:
    config = choose_config(2048, 7, dtype)
    outputs, absent = (
        (("budget_ptr",), ("ranks_ptr", "lengths_ptr")) if plan else (("ranks_ptr", "lengths_ptr"), ("budget_ptr",))
    )
    return Variant(
        name=f"scheduler/search/{TRITON_DTYPES[dtype]}-{'plan' if plan else 'schedule'}",
        kernel=search_kernel,
        signature={
            "sorted_ptr": f"*{TRITON_DTYPES[dtype]}",
            "sps_ptr": "*fp64",
            **dict.fromkeys(outputs, "*i32"),
            **dict.fromkeys(SEARCH_INTEGERS, "i32"),
            "scale": "fp32",
        },
        constexprs={**dict.fromkeys(absent), "BLOCK_N": config.block_n, "BLOCK_R": config.block_r},
        aligned=("sorted_ptr", *outputs),
        num_warps=config.search_warps,
    )


def schedule(
    survival: Tensor, cost_table: CostTable, *, max_tokens: int | None = None, config: Config | None = None
) -> Tensor:
    """Fused twin of `dsspark.reference.scheduler.schedule`; same contract, one launch or two."""
    fitting = check_search_arguments(survival, cost_table, max_tokens)
    lengths = _empty(survival, (survival.shape[0],))
    if lengths.numel():
        _search(survival, cost_table, fitting, lengths, None, config)
    return lengths


def plan_budget(
    survival: Tensor, cost_table: CostTable, *, max_tokens: int | None = None, config: Config | None = None
) -> Tensor:
    """Fused twin of `dsspark.reference.scheduler.plan_budget`; same contract, one launch or two."""
    fitting = check_search_arguments(survival, cost_table, max_tokens)
    budget = _empty(survival, ())
    _search(survival, cost_table, fitting, None, budget, config)
    return budget


def admit(survival: Tensor, budget: int | Tensor, *, config: Config | None = None) -> Tensor:
    """Fused twin of `dsspark.reference.scheduler.admit`; same contract, one launch."""
    check_budget_arguments(survival, budget)
    lengths = _empty(survival, (survival.shape[0],))
    config = config or choose_config(survival.shape[0], survival.shape[1], survival.dtype)
    on_device, limit = (budget, 0) if isinstance(budget, Tensor) else (None, min(budget, survival.numel()))
    _rank(survival, None, None, on_device, lengths, limit, config)
    return lengths

"""The specialisations of `verify`'s kernels that its launcher chooses, described for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch

from dsspark.kernels.acceptance import accept_kernel, rows_kernel, statistics_kernel
from dsspark.kernels.draft_law import POINT, RECOMPUTED, STORED
from dsspark.kernels.launch import TRITON_DTYPES, Variant
from dsspark.kernels.product import product_shape
from dsspark.kernels.rejection_plan import Plan, choose_config
from dsspark.kernels.resampling import pick_kernel, resample_kernel
from dsspark.numerics import CELL

_HALVES_AND_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
_VOCABULARIES = (151_936, 128_256, 32_000)
_UNALIGNED = 50_257
_RANK = 256
_PRODUCT_MULTIPLES = ("rank", "stride_lr", "stride_lk", "stride_wv")
_CUTOFFS = {"threshold_ptr": torch.float32, "last_id_ptr": torch.int32, "min_weight_ptr": torch.float32}
_FACTS = {"ids_ptr": torch.int64, "numbers_ptr": torch.float32}
_RESULTS = {
    "num_accepted_ptr": torch.int32,
    "num_emitted_ptr": torch.int32,
    "valid_ptr": torch.bool,
    "tokens_ptr": torch.int64,
    "logprobs_ptr": torch.float32,
}
_CHUNKS = {"tops_ptr": torch.float32, "totals_ptr": torch.float32}
_BATCH = {"temperature_ptr": torch.float32, "cu_ptr": torch.int32, "num_tokens_ptr": torch.int32}
_ROW_TERMS = {"row_max_ptr": torch.float32, "row_sum_ptr": torch.float32, "best_ptr": torch.int32}

Source = tuple[int, torch.dtype | None, torch.dtype | None, bool]
"""Kind, dtype of the logits, dtype of the product's operands, whether there is a map."""


def _plan(vocab_size: int, gamma: int = 7, filtered: bool = False, source: Source | None = None) -> Plan:
    kind, logits, weights, mapped = source or (POINT.value, None, None, False)
    sizes = {"RANK": 0, "BLOCK_K": 0} if weights is None else product_shape(_RANK, weights, weights)
    weight_bytes, logit_bytes = (2 if dtype is None else dtype.itemsize for dtype in (weights, logits))
    config = choose_config(vocab_size, sizes["BLOCK_K"], weight_bytes, logit_bytes, mapped=mapped)
    return Plan(
        vocab_size=vocab_size,
        block_size=gamma,
        cell=CELL,
        filtered=filtered,
        kind=kind,
        mapped=mapped,
        product=sizes,
        config=config,
    )


def _variant(
    name: str,
    kernel: Callable[..., None],
    pointers: Mapping[str, torch.dtype | None],
    constexprs: Mapping[str, Any],
    num_warps: int,
    *,
    num_stages: int = 2,
    ones: tuple[str, ...] = (),
    aligned: tuple[str, ...] = (),
    wide: tuple[str, ...] = (),
) -> Variant:
    """Describe a launch: every argument that is neither a pointer nor a constexpr is a 32-bit integer."""
    signature = {key: f"*{TRITON_DTYPES[dtype]}" for key, dtype in pointers.items() if dtype is not None}
    fixed = {key: None for key, dtype in pointers.items() if dtype is None} | dict.fromkeys(ones, 1)
    names = kernel.arg_names  # type: ignore[attr-defined]
    signature |= {key: "i32" for key in names if key not in pointers and key not in constexprs and key not in fixed}
    return Variant(
        name=f"rejection/{name}",
        kernel=kernel,
        signature=signature,
        constexprs={**constexprs, **fixed},
        aligned=aligned,
        wide_loads=wide,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _statistics(dtype: torch.dtype, vocab_size: int, filtered: bool) -> Variant:
    plan, aligned = _plan(vocab_size, filtered=filtered), vocab_size % 16 == 0
    return _variant(
        f"statistics/{TRITON_DTYPES[dtype]}-v{vocab_size}" + ("-filtered" if filtered else ""),
        statistics_kernel,
        {"logits_ptr": dtype, **_BATCH, **_CHUNKS},
        plan.statistics(),
        plan.config.num_warps,
        ones=("stride_tv",),
        aligned=("logits_ptr", "vocab_size", "stride_tn") if aligned else ("logits_ptr",),
        wide=("logits_ptr",) if aligned else (),
    )


def _rows(dtype: torch.dtype, vocab_size: int, filtered: bool) -> Variant:
    plan = _plan(vocab_size, filtered=filtered)
    return _variant(
        f"rows/{TRITON_DTYPES[dtype]}-v{vocab_size}" + ("-filtered" if filtered else ""),
        rows_kernel,
        {"logits_ptr": dtype, **_BATCH, **_CHUNKS, **_ROW_TERMS},
        plan.rows(),
        plan.config.num_warps,
    )


def _accept(dtype: torch.dtype, gamma: int, filtered: bool) -> Variant:
    plan = _plan(_VOCABULARIES[0], gamma, filtered)
    probabilities = ("draft_probs_ptr", "draft_temperature_ptr", "draft_max_ptr", "draft_sum_ptr", "uniforms_ptr")
    return _variant(
        f"accept/{TRITON_DTYPES[dtype]}-gamma{gamma}" + ("-filtered" if filtered else ""),
        accept_kernel,
        {"logits_ptr": dtype, **_BATCH, "drafted_ptr": torch.int64, **dict.fromkeys(probabilities, torch.float32)}
        | {**_ROW_TERMS, **(_CUTOFFS if filtered else dict.fromkeys(_CUTOFFS)), **_RESULTS, **_FACTS},
        plan.accept(),
        plan.config.num_warps,
    )


def _draft_pointers(source: Source) -> dict[str, torch.dtype | None]:
    _, logits, weights, mapped = source
    vectors: dict[str, torch.dtype | None] = dict.fromkeys(("latent_ptr", "w2_ptr"), weights)
    return {"draft_logits_ptr": logits, **vectors, "map_ptr": torch.int64 if mapped else None}


def _name(dtype: torch.dtype, source: Source, vocab_size: int, filtered: bool) -> str:
    kind, logits, weights, mapped = source
    words = [TRITON_DTYPES[dtype], {POINT.value: "point", STORED.value: "stored", RECOMPUTED.value: "recomputed"}[kind]]
    words += [TRITON_DTYPES[other] for other in (logits, weights) if other is not None]
    return "-".join([*words, *(["mapped"] if mapped else []), f"v{vocab_size}", *(["filtered"] if filtered else [])])


def _resample(dtype: torch.dtype, source: Source, vocab_size: int, filtered: bool) -> Variant:
    _, logits, weights, mapped = source
    plan, aligned = _plan(vocab_size, filtered=filtered, source=source), vocab_size % 16 == 0
    multiples = [*_PRODUCT_MULTIPLES, "logits_ptr", *(["draft_logits_ptr"] if logits else [])]
    multiples += ["latent_ptr", "w2_ptr"] if weights else []
    multiples += ["vocab_size", "draft_vocab", "stride_tn", "stride_dr", "stride_dk"] if aligned else []
    # Through a map the draft's logits are gathered, by pointers that are not traced to their argument: widths cannot be judged there.
    wide = ["logits_ptr"] if weights or not mapped else []
    wide += (["draft_logits_ptr"] if logits and not mapped else []) + (["w2_ptr"] if weights else [])
    return _variant(
        f"resample/{_name(dtype, source, vocab_size, filtered)}",
        resample_kernel,
        {"logits_ptr": dtype, **_FACTS, **_draft_pointers(source)}
        | dict.fromkeys(("first_ptr", "second_ptr"), torch.float32),
        {**plan.resample(), "INTERPRETED": False},
        plan.resample_warps,
        num_stages=plan.config.product_stages,
        ones=("stride_tv", "stride_dv", "stride_le", "stride_we"),
        aligned=tuple(multiples),
        wide=tuple(wide) if aligned else (),
    )


def _pick(dtype: torch.dtype, source: Source, vocab_size: int, filtered: bool, gamma: int = 7) -> Variant:
    plan = _plan(vocab_size, gamma, filtered, source)
    return _variant(
        f"pick/{_name(dtype, source, vocab_size, filtered)}-gamma{gamma}",
        pick_kernel,
        {"logits_ptr": dtype, **_FACTS, **_draft_pointers(source)}
        | dict.fromkeys(("first_ptr", "second_ptr", "uniforms_ptr"), torch.float32)
        | _RESULTS,
        {**plan.pick(), "INTERPRETED": False},
        plan.pick_warps,
        ones=("stride_le", "stride_we"),
        aligned=(*_PRODUCT_MULTIPLES, *(("latent_ptr", "w2_ptr") if source[2] else ())),
    )


def verify_variants() -> list[Variant]:
    """Return the variants for every dtype and source of q, the largest vocabulary of each tiling, with and without filters."""
    largest = _VOCABULARIES[0]
    found = [_statistics(dtype, largest, filtered) for dtype, filtered in product(_HALVES_AND_FLOAT, (False, True))]
    found += [_statistics(torch.bfloat16, _UNALIGNED, False)]
    found += [_rows(dtype, largest, filtered) for dtype, filtered in product(_HALVES_AND_FLOAT, (False, True))]
    found += [_rows(torch.bfloat16, vocab_size, False) for vocab_size in (*_VOCABULARIES[1:], _UNALIGNED)]
    found += [
        _accept(dtype, gamma, filtered) for dtype, gamma, filtered in product(_HALVES_AND_FLOAT, (7, 32), (False, True))
    ]
    sources: list[tuple[torch.dtype, Source]] = []
    for dtype in _HALVES_AND_FLOAT:
        sources += [
            (dtype, (POINT.value, None, None, False)),
            (dtype, (STORED.value, dtype, None, False)),
            (dtype, (STORED.value, dtype, None, True)),
            (dtype, (RECOMPUTED.value, dtype, dtype, False)),
        ]
    bf16, fp32 = torch.bfloat16, torch.float32
    sources += [(bf16, (RECOMPUTED.value, bf16, bf16, True)), (bf16, (STORED.value, fp32, None, False))]
    sources += [(bf16, (RECOMPUTED.value, bf16, fp32, False))]
    for dtype, source in sources:
        for filtered in (False, True) if dtype == bf16 else (False,):
            found += [_resample(dtype, source, largest, filtered), _pick(dtype, source, largest, filtered)]
    stored = (STORED.value, bf16, None, False)
    found += [_resample(bf16, stored, _UNALIGNED, False), _pick(bf16, stored, largest, False, gamma=32)]
    found += [_pick(bf16, stored, vocab_size, False) for vocab_size in (*_VOCABULARIES[1:], _UNALIGNED)]
    return found

r"""Semi-autoregressive drafting: parallel logits, corrected and sampled left to right (paper 3.1, eq. 4-6).

$$q_k(v \mid x_0, x_{<k}) = \mathrm{softmax}\big((U_k(v) + B_k(x_{<k}, v)) / T\big)$$

Two launches a position: statistics of the corrected rows, then the draw (`dsspark.kernels.drafting`), which for a vanilla head also
gathers the next row of W1; a gated or RNN head has a third, before them (`dsspark.kernels.latent`), a vanilla head one at the start.
A parallel-only draft takes two launches in all. No value reaches the host and every buffer is allocated up front: the sequence can be
captured in a CUDA graph.

Bytes moved per position: W2 once for all requests, R rows of U, eight bytes a chunk of a row, the picked chunks again; R rows
written if logits are kept. See `dsspark.kernels.drafting` for the exceptions.

Departs from the reference where only the device can see: for an anchor, or a mapped token, that W1 has no row for the latent is NaN, and
so the row is no distribution; nothing is read out of bounds. `row_max` of a row that is no distribution is the largest finite logit, or 0.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsspark._checks import as_temperature, check_device, check_dtype
from dsspark.contracts import check_draft_arguments
from dsspark.kernels.describe import describe
from dsspark.kernels.draft_plan import Config, Work, choose_config, launches, plan
from dsspark.kernels.drafting import PICK_VALUES, STATISTICS_VALUES, pick_kernel, statistics_kernel
from dsspark.kernels.latent import LATENT_POINTERS, LATENT_VALUES, latent_kernel
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.kernels.sampling import KERNEL_DTYPES, check_logits, check_uniforms
from dsspark.numerics import CELL
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead

__all__ = ["Config", "choose_config", "draft_block", "variants"]

_UNSPECIALISED = {
    latent_kernel: LATENT_VALUES + LATENT_POINTERS,
    statistics_kernel: STATISTICS_VALUES,
    pick_kernel: PICK_VALUES,
}


def _check_kernel_dtypes(base_logits: Tensor, head: MarkovHead | None, hidden: Tensor | None, uniforms: Tensor) -> None:
    """Raise `TypeError` for dtypes that the references take and the kernels don't, `ValueError` for devices."""
    check_logits("base_logits", base_logits)
    check_uniforms("uniforms.draft", uniforms)
    if head is None:
        return
    if hidden is not None and head.kind != "vanilla":
        check_dtype("hidden", hidden, KERNEL_DTYPES)
    for name, weight in head.named_parameters():
        check_dtype(f"head.{name}", weight, KERNEL_DTYPES)
        check_device(f"head.{name}", weight, "base_logits", base_logits)


def variants() -> list[Variant]:
    """Return the specialisations that `draft_block` launches for real heads; see `Variant`."""
    half, single = torch.bfloat16, torch.float32
    found: dict[str, Variant] = {}
    for kind in ("vanilla", "gated", "rnn", None):
        for base, weights in ((half, half), (torch.float16, torch.float16), (single, single), (single, half)):
            for keep_logits in (True, False):
                if kind is not None or base == weights:
                    found |= _block_variants(kind, base, weights, keep_logits)
    for keep_logits in (True, False):
        found |= _block_variants("vanilla", half, half, keep_logits, vocab_size=151_936)
        found |= _block_variants("vanilla", half, half, keep_logits, vocab_size=32_003)
        found |= _block_variants("vanilla", half, half, keep_logits, mapped=True)
        found |= _block_variants("vanilla", single, single, keep_logits, num_requests=64)
        found |= _block_variants("vanilla", half, half, keep_logits, num_requests=256)
        found |= _block_variants(None, half, half, keep_logits, num_requests=64)
        found |= _block_variants("vanilla", half, half, keep_logits, rank=512)
        found |= _block_variants("vanilla", half, half, keep_logits, rank=1024)
    return list(found.values())


def _block_variants(
    kind: str | None,
    base: torch.dtype,
    weights: torch.dtype,
    keep_logits: bool,
    *,
    vocab_size: int = 32_768,
    num_requests: int = 4,
    rank: int = 256,
    mapped: bool = False,
) -> dict[str, Variant]:
    """Return the variants, by name, of blocks of 7 drafts and a backbone of width 4096."""
    work = plan(
        _meta(num_requests, 7, vocab_size, dtype=base),
        _meta(num_requests, dtype=torch.int64),
        _meta_head(kind, vocab_size, rank, weights),
        _meta(num_requests, 7, 2),
        temperature=_meta(num_requests),
        hidden=_meta(num_requests, 7, 4096, dtype=base),
        draft_to_target=_meta(vocab_size, dtype=torch.int64) if mapped else None,
        keep_logits=keep_logits,
        cell=CELL,
        config=None,
    )
    kept, ids = "-kept" if keep_logits else "", "-mapped" if mapped else ""
    sizes = f"{TRITON_DTYPES[base]}-{TRITON_DTYPES[weights]}-V{vocab_size}-R{num_requests}-r{rank}"
    found: dict[str, Variant] = {}
    for index, (kernel, _, arguments, constants) in enumerate(launches(work)):
        wide: tuple[str, ...] = ()
        if kernel is latent_kernel:  # the names say what makes a difference
            what, wide = f"latent/{kind}{'-first' if index == 0 else ''}", ("hidden_ptr",)
        elif kernel is statistics_kernel:
            what = f"statistics/{'head' if kind else 'parallel'}{kept}"
            wide = ("base_ptr", "w2_ptr") if vocab_size % 16 == 0 else ()
        else:
            what = f"pick/{ {None: 'parallel', 'vanilla': 'vanilla'}.get(kind, 'other') }{kept}{ids}"
        name, values, warps = f"markov/{what}-{sizes}", _UNSPECIALISED[kernel], work.warps(kernel)
        found[name] = describe(name, kernel, arguments, constants, values=values, wide_loads=wide, num_warps=warps)
    return found


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta_head(kind: str | None, vocab_size: int, rank: int, dtype: torch.dtype) -> Any:
    """Return what `plan` reads of a head for a backbone of width 4096, without memory."""
    if kind is None:
        return None
    inputs, outputs = {"vanilla": (0, 0), "gated": (4096 + rank, rank), "rnn": (4096 + 2 * rank, 3 * rank)}[kind]
    layer = SimpleNamespace(weight=_meta(outputs, inputs, dtype=dtype), bias=_meta(outputs, dtype=dtype))
    return SimpleNamespace(
        kind=kind,
        rank=rank,
        markov_w1=SimpleNamespace(weight=_meta(vocab_size, rank, dtype=dtype)),
        markov_w2=SimpleNamespace(weight=_meta(vocab_size, rank, dtype=dtype)),
        gate_proj=layer if kind == "gated" else None,
        joint_proj=layer if kind == "rnn" else None,
    )


def _result(work: Work, keep_logits: bool) -> DraftBlock:
    w2 = work.head.markov_w2.weight if work.head is not None and not keep_logits else None
    return DraftBlock(
        tokens=work.tokens,
        token_probs=work.token_probs,
        row_max=work.row_max,
        row_sum=work.row_sum,
        temperature=work.temperature,
        logits=work.logits,
        latent=None if w2 is None else work.latent,
        markov_w2=w2,
        base_logits=None if keep_logits else work.base_logits,
        draft_to_target=work.draft_to_target,
    )


def draft_block(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Uniforms,
    *,
    temperature: float | Tensor = 1.0,
    hidden: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    keep_logits: bool = True,
    cell: int = CELL,
    config: Config | None = None,
) -> DraftBlock:
    """Fused twin of `dsspark.reference.markov.draft_block`; same contract, no float64."""
    check_draft_arguments(base_logits, anchors, head, uniforms, hidden, draft_to_target, cell)
    _check_kernel_dtypes(base_logits, head, hidden, uniforms.draft)
    work = plan(
        base_logits,
        anchors,
        head,
        uniforms.draft,
        temperature=as_temperature(temperature, base_logits.shape[0], base_logits),
        hidden=hidden,
        draft_to_target=draft_to_target,
        keep_logits=keep_logits,
        cell=cell,
        config=config,
    )
    for kernel, grid, arguments, constants in launches(work):
        launch(kernel, grid, *arguments, **constants, num_warps=work.warps(kernel))
    return _result(work, keep_logits)

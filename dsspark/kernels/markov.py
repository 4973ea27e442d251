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
from dsspark.kernels.draft_plan import Config, choose_config, launches, plan
from dsspark.kernels.drafting import PICK_VALUES, STATISTICS_VALUES, statistics_kernel
from dsspark.kernels.latent import LATENT_POINTERS, LATENT_VALUES, latent_kernel
from dsspark.kernels.launch import TRITON_DTYPES, Variant, launch
from dsspark.kernels.sampling import KERNEL_DTYPES, check_logits, check_uniforms
from dsspark.numerics import CELL
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead

__all__ = ["Config", "choose_config", "draft_block", "variants"]


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

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    head: Any = None
    if kind is not None:
        inputs, outputs = {"vanilla": (0, 0), "gated": (4096 + rank, rank), "rnn": (4096 + 2 * rank, 3 * rank)}[kind]
        layer = SimpleNamespace(weight=meta(outputs, inputs, dtype=weights), bias=meta(outputs, dtype=weights))
        head = SimpleNamespace(
            kind=kind,
            rank=rank,
            markov_w1=SimpleNamespace(weight=meta(vocab_size, rank, dtype=weights)),
            markov_w2=SimpleNamespace(weight=meta(vocab_size, rank, dtype=weights)),
            gate_proj=layer if kind == "gated" else None,
            joint_proj=layer if kind == "rnn" else None,
        )
    work = plan(
        meta(num_requests, 7, vocab_size, dtype=base),
        meta(num_requests, dtype=torch.int64),
        head,
        meta(num_requests, 7, 2),
        temperature=meta(num_requests),
        hidden=meta(num_requests, 7, 4096, dtype=base),
        draft_to_target=meta(vocab_size, dtype=torch.int64) if mapped else None,
        keep_logits=keep_logits,
        cell=CELL,
        config=None,
    )
    kept, ids = "-kept" if keep_logits else "", "-mapped" if mapped else ""
    found: dict[str, Variant] = {}
    for index, (kernel, _, arguments, constants) in enumerate(launches(work)):
        values: tuple[str, ...]
        wide: tuple[str, ...] = ()
        if kernel is latent_kernel:  # the names say what makes a difference
            values, what, wide = (
                LATENT_VALUES + LATENT_POINTERS,
                f"latent/{kind}{'-first' if index == 0 else ''}",
                ("hidden_ptr",),
            )
        elif kernel is statistics_kernel:
            values, what = STATISTICS_VALUES, f"statistics/{'head' if kind else 'parallel'}{kept}"
            wide = ("base_ptr", "w2_ptr") if vocab_size % 16 == 0 else ()
        else:
            values, what = (
                PICK_VALUES,
                f"pick/{ {None: 'parallel', 'vanilla': 'vanilla'}.get(kind, 'other') }{kept}{ids}",
            )
        name = f"markov/{what}-{TRITON_DTYPES[base]}-{TRITON_DTYPES[weights]}-V{vocab_size}-R{num_requests}-r{rank}"
        found[name] = describe(
            name,
            kernel,
            arguments,
            constants,
            values=values,
            wide_loads=wide,
            num_warps=work.config.num_warps,
        )
    return found


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
        launch(kernel, grid, *arguments, **constants, num_warps=work.config.num_warps)
    recompute = head is not None and not keep_logits
    return DraftBlock(
        tokens=work.tokens,
        token_probs=work.token_probs,
        row_max=work.row_max,
        row_sum=work.row_sum,
        temperature=work.temperature,
        logits=work.logits,
        latent=work.latent if recompute else None,
        markov_w2=head.markov_w2.weight if head is not None and recompute else None,
        base_logits=None if keep_logits else base_logits,
        draft_to_target=draft_to_target,
    )

"""The launches of a block of drafts: how the work is cut, what they read and write, and their arguments in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from dsspark.kernels.drafting import pick_kernel, statistics_kernel
from dsspark.kernels.latent import latent_kernel
from dsspark.kernels.launch import interpreted
from dsspark.kernels.product import MOST_PRODUCT_ROWS, PRODUCT_ROWS, STEP_FLOAT32, product_shape
from dsspark.kernels.sampling import Tiling, rows_a_program
from dsspark.numerics import CELL

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead

_FEW_PROGRAMS = 64
_PICK_LANES = 256
_PICK_FACTORS = 32_768


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size a power of two.

    Attributes:
        block_v: tokens of a tile whose statistics a program takes, at least 16.
        block_r: rows it takes at once: 16 or 32 with a head, any number without.
        pick_rows: rows a program draws; at most 32 with a head whose logits are not kept.
        latent_rows: requests a program forms latents of, 16 or 32.
        block_j: entries of each latent it forms, at least 16.
        block_k: factors of a sum it reads at once, at least 32; half as many of the float32 state of an RNN head.
        num_warps: warps a program.
        pick_warps: warps a program that draws.
    """

    block_v: int
    block_r: int
    pick_rows: int
    latent_rows: int = 16
    block_j: int = 16
    block_k: int = 32
    num_warps: int = 4
    pick_warps: int = 4


def choose_config(
    num_rows: int,
    vocab_size: int,
    product: dict[str, int] | None,
    cell: int = CELL,
    *,
    keep_logits: bool = True,
    halves: bool = True,
) -> Config:
    """Return the configuration for rows of V logits and the product of `product_shape`, None without a head.

    `halves` tells whether the inputs of a gated or RNN head and its matrix have one half-precision dtype.

    A tile of W2 has 64 KiB where it is kept.
    Few rows are drawn one a program; many share programs as far as their sums fit.
    """
    if product is None:
        block_v, block_r = 1024, min(4, triton.next_power_of_2(max(1, num_rows)))
    elif product["BLOCK_K"] == product["RANK"]:
        block_v, block_r = 128, 16
    elif product["BLOCK_K"] > STEP_FLOAT32:  # W2 is read again for each tile of requests; narrower tiles spill
        block_v, block_r = 64, 32
    else:  # float32: registers hold the operands
        block_v, block_r = 64, (16 if num_rows <= 16 else 32)
    tiling = Tiling.cut(vocab_size, cell, block_v)
    shared = triton.next_power_of_2(max(1, triton.cdiv(num_rows, _FEW_PROGRAMS)))
    lanes = max(tiling.lanes, 16)
    pick_rows = min(shared, rows_a_program(max(tiling.summary_lanes, lanes)))
    if product is not None and not keep_logits:  # each row brings rows of W2 of its own
        pick_rows = min(
            pick_rows,
            max(1, min(_PICK_LANES // lanes, _PICK_FACTORS // (lanes * product["BLOCK_K"]), MOST_PRODUCT_ROWS)),
        )
    # What more than one row has, or 64 KiB of W2, is too much for the registers of four warps.
    heavy = pick_rows > 1 or (product is not None and not keep_logits and lanes * product["BLOCK_K"] >= _PICK_FACTORS)
    return Config(
        block_v=block_v,
        block_r=block_r,
        pick_rows=int(pick_rows),
        block_k=64 if halves else 32,
        pick_warps=8 if heavy else 4,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything the launches of a block read and write."""

    base_logits: Tensor
    anchors: Tensor
    head: MarkovHead | None
    hidden: Tensor | None
    uniforms: Tensor
    temperature: Tensor
    draft_to_target: Tensor | None
    config: Config
    tiling: Tiling
    product: dict[str, int] | None
    tokens: Tensor
    token_probs: Tensor
    row_max: Tensor
    row_sum: Tensor
    tops: Tensor
    totals: Tensor
    logits: Tensor | None
    latent: Tensor | None
    states: tuple[Tensor, Tensor] | None

    @property
    def vanilla(self) -> bool:
        return self.head is not None and self.head.kind == "vanilla"

    def warps(self, kernel: Any) -> int:
        """Return the warps of a program of one of the kernels."""
        return self.config.pick_warps if kernel is pick_kernel else self.config.num_warps

    @property
    def num_rows(self) -> int:
        return self.tops.shape[0]

    def integers(self, first_position: int) -> tuple[int, ...]:
        """Return num_rows .. num_chunks of both kernels."""
        _, block_size, vocab_size = self.base_logits.shape
        rank = 0 if self.head is None else self.head.rank
        positions = block_size if self.head is None else 1
        return self.num_rows, positions, first_position, block_size, vocab_size, rank, self.tiling.num_chunks

    def constants(self) -> dict[str, Any]:
        """Return the constexprs that both kernels share."""
        return {**(self.product or {"RANK": 16, "BLOCK_K": 16}), "INTERPRETED": interpreted(statistics_kernel)}


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * (count - 1) + (1,) if tensor is None else tuple(tensor.stride())


def _latent_launch(work: Work, k: int) -> tuple[Any, ...]:
    """Return kernel, grid, arguments and constexprs of the launch that forms the latents of position k."""
    head, config, latent = work.head, work.config, work.latent
    if head is None or latent is None:
        raise RuntimeError("latent: got no head, expected one; a parallel-only draft has no latents")
    layer = head.gate_proj or head.joint_proj
    matrix, bias = (None, None) if layer is None else (layer.weight, layer.bias)
    hidden = None if layer is None else work.hidden
    num_requests, block_size, rank = latent.shape
    previous = work.anchors if k == 0 else work.tokens[:, k - 1]
    w1 = head.markov_w1.weight
    state, next_state = (None, None) if work.states is None else (work.states[k % 2 - 1], work.states[k % 2])
    arguments = (
        *(previous, w1, hidden, matrix, bias, None if k == 0 else state, next_state, latent),
        *(previous.stride(0), *w1.stride(), *_strides(hidden, 3), *_strides(matrix, 2), *_strides(bias, 1)),
        *(num_requests, k, block_size, w1.shape[0], 0 if hidden is None else hidden.shape[2], rank),
    )
    grid = triton.cdiv(num_requests, config.latent_rows), triton.cdiv(rank, config.block_j)
    blocks = {"BLOCK_R": config.latent_rows, "BLOCK_J": config.block_j, "BLOCK_K": config.block_k}
    blocks["STATE_K"] = config.block_k // 2
    return latent_kernel, grid, arguments, {**blocks, "INTERPRETED": interpreted(latent_kernel)}


def _statistics_launch(work: Work, k: int) -> tuple[Any, ...]:
    """Return the same of the launch that takes the statistics of position k, or of all of them without a head."""
    w2 = None if work.head is None else work.head.markov_w2.weight
    base, config = work.base_logits, work.config
    arguments = (
        *(base, work.latent, w2, work.temperature, work.logits, work.tops, work.totals),
        *(*base.stride(), *_strides(w2, 2), work.temperature.stride(0)),
        *work.integers(k),
    )
    # W2 is read once: a program takes all rows. Without it rows are nothing to share.
    splits = min(1, work.num_rows) if work.head is not None else triton.cdiv(work.num_rows, config.block_r)
    constants = {"BLOCK_R": config.block_r, **work.constants(), **work.tiling.shape()}
    return statistics_kernel, (work.tiling.num_tiles, splits), arguments, constants


def _pick_launch(work: Work, k: int) -> tuple[Any, ...]:
    """Return the same of the launch that draws the tokens of position k, or of all of them without a head."""
    head = work.head
    stored = work.base_logits if work.logits is None else work.logits
    w1 = head.markov_w1.weight if head is not None and work.vanilla else None
    w2 = None if head is None or work.logits is not None else head.markov_w2.weight
    latent = None if w1 is None and w2 is None else work.latent
    arguments = (
        *(stored, latent, w2, w1, work.temperature, work.uniforms, work.draft_to_target, work.tops, work.totals),
        *(work.tokens, work.token_probs, work.row_max, work.row_sum),
        *(*stored.stride(), *_strides(w2, 2), *_strides(w1, 2), work.temperature.stride(0), *work.uniforms.stride()),
        *_strides(work.draft_to_target, 1),
        *(*work.integers(k), 0 if w1 is None else w1.shape[0]),
    )
    search = work.tiling.search()
    search["LANES"] = max(search["LANES"], 16)  # the columns of a product
    constants = {
        "BLOCK_R": work.config.pick_rows,
        "PRODUCT_ROWS": max(PRODUCT_ROWS, work.config.pick_rows),
        **work.constants(),
        **search,
    }
    return pick_kernel, (triton.cdiv(work.num_rows, work.config.pick_rows),), arguments, constants


def launches(work: Work) -> list[tuple[Any, ...]]:
    """Return every launch of a block, in order."""
    if work.head is None:
        return [_statistics_launch(work, 0), _pick_launch(work, 0)]
    found = []
    for k in range(work.tokens.shape[1]):
        if k == 0 or not work.vanilla:
            found.append(_latent_launch(work, k))
        found += [_statistics_launch(work, k), _pick_launch(work, k)]
    return found


def _product(head: MarkovHead | None) -> dict[str, int] | None:
    """Return the constexprs of the product with W2, None without a head."""
    if head is None:
        return None
    return product_shape(head.rank, head.markov_w1.weight.dtype, head.markov_w2.weight.dtype)


def _halves(head: MarkovHead | None, hidden: Tensor | None) -> bool:
    """Return whether the inputs of a gated or RNN head and its matrix have one half-precision dtype."""
    layer = None if head is None else head.gate_proj or head.joint_proj
    return layer is not None and hidden is not None and layer.weight.dtype == hidden.dtype != torch.float32


def _buffers(
    base_logits: Tensor, head: MarkovHead | None, statistics: tuple[int, int], keep_logits: bool
) -> dict[str, Any]:
    """Allocate what the launches write, by the names of `Work`."""
    num_requests, block_size, vocab_size = base_logits.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=base_logits.device)

    found: dict[str, Any] = {"tokens": empty(num_requests, block_size, dtype=torch.int64)}
    found |= {name: empty(num_requests, block_size) for name in ("token_probs", "row_max", "row_sum")}
    found |= {name: empty(*statistics) for name in ("tops", "totals")}
    found |= dict.fromkeys(("logits", "latent", "states"))
    if keep_logits:
        found["logits"] = empty(num_requests, block_size, vocab_size, dtype=base_logits.dtype)
    if head is not None:
        found["latent"] = empty(num_requests, block_size, head.rank, dtype=head.markov_w1.weight.dtype)
        if head.kind == "rnn":
            found["states"] = empty(num_requests, head.rank), empty(num_requests, head.rank)
    return found


def plan(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Tensor,
    *,
    temperature: Tensor,
    hidden: Tensor | None,
    draft_to_target: Tensor | None,
    keep_logits: bool,
    cell: int,
    config: Config | None,
) -> Work:
    """Choose the configuration and allocate what the launches write."""
    num_requests, block_size, vocab_size = base_logits.shape
    num_rows = num_requests * (block_size if head is None else 1)
    product = _product(head)
    halves = _halves(head, hidden)
    config = config or choose_config(num_rows, vocab_size, product, cell, keep_logits=keep_logits, halves=halves)
    tiling = Tiling.cut(vocab_size, cell, config.block_v)

    return Work(
        base_logits=base_logits,
        anchors=anchors,
        head=head,
        hidden=hidden,
        uniforms=uniforms,
        temperature=temperature,
        draft_to_target=draft_to_target,
        config=config,
        tiling=tiling,
        product=product,
        **_buffers(base_logits, head, (num_rows, tiling.num_chunks), keep_logits),
    )

"""How `verify` cuts its work: the configuration, where q comes from, and the constexprs of every launch.

The launcher and the list of variants to compile ahead of time read the same plan, so that they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from dsspark._checks import check_shape
from dsspark.kernels.draft_law import POINT, RECOMPUTED, STORED
from dsspark.kernels.elementwise import positions_tile
from dsspark.kernels.product import PRODUCT_ROWS, product_shape
from dsspark.kernels.sampling import Tiling, check_logits, rows_a_program
from dsspark.types import DraftBlock

_PRODUCT_BYTES = 65_536
_ACCEPT_LANES = 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; every size a power of two.

    Attributes:
        block_v: tokens of a row a program reads.
        block_w: likewise where it recomputes q: rows of W2 in a tile, at least 16.
        num_warps: warps a program.
        product_warps: likewise where q is recomputed, for a tile of W2 stays in registers, or found through a map.
        product_stages: stages of the loop over the entries of a row of W2.
    """

    block_v: int
    block_w: int
    num_warps: int = 4
    product_warps: int = 8
    product_stages: int = 2


def choose_config(
    vocab_size: int, step: int = 0, weight_bytes: int = 2, logit_bytes: int = 2, *, mapped: bool = False
) -> Config:
    """Return the configuration for a vocabulary; where q is recomputed, for a product of `step` entries of a row of W2 at once.

    Rows of W2 that are found through a map have an address each, and those that are wider than the logits are laid out twice, so that
    registers hold half as many. For the latter, with two stages, Triton 3.6 puts bytes of a thread on the stack.
    """
    lanes = int(triton.next_power_of_2(vocab_size))
    tile = _PRODUCT_BYTES // (max(step, 16) * weight_bytes)
    wider = step > 0 and weight_bytes > logit_bytes
    narrow = wider or (mapped and step > 0)
    return Config(
        block_v=min(2048, lanes),
        block_w=max(16, min(64 if narrow else 128, tile, lanes)),
        product_warps=4 if narrow else 8,
        product_stages=3 if wider else 2,
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the draft's rows of q come from.

    Attributes:
        kind: `POINT`, `STORED` or `RECOMPUTED`.
        logits: [R, gamma, V_draft], or None for a point.
        latent: [R, gamma, r], or None where nothing is recomputed.
        markov_w2: [V_draft, r], likewise.
        draft_to_target: [V_draft], or None where the ids are the same.
    """

    kind: int
    logits: Tensor | None = None
    latent: Tensor | None = None
    markov_w2: Tensor | None = None
    draft_to_target: Tensor | None = None

    @classmethod
    def of(cls, draft: DraftBlock) -> Source:
        """Return where the rows of q of a block come from, or raise for what the kernels do not take."""
        num_requests, block_size = draft.tokens.shape
        name, logits = ("draft.logits", draft.logits)
        if logits is None:
            name, logits = ("draft.base_logits", draft.base_logits)
        if logits is None:
            return cls(kind=POINT.value)
        check_shape(name, logits, (num_requests, block_size, "V_draft"))
        check_logits(name, logits)
        if draft.draft_to_target is not None:
            check_shape("draft.draft_to_target", draft.draft_to_target, (logits.shape[2],))
        if draft.logits is not None or draft.latent is None or draft.markov_w2 is None:
            return cls(kind=STORED.value, logits=logits, draft_to_target=draft.draft_to_target)
        check_shape("draft.markov_w2", draft.markov_w2, (logits.shape[2], "r"))
        check_shape("draft.latent", draft.latent, (num_requests, block_size, draft.markov_w2.shape[1]))
        check_logits("draft.latent", draft.latent)
        check_logits("draft.markov_w2", draft.markov_w2)
        return cls(
            kind=RECOMPUTED.value,
            logits=logits,
            latent=draft.latent,
            markov_w2=draft.markov_w2,
            draft_to_target=draft.draft_to_target,
        )

    @property
    def draft_vocab(self) -> int:
        """V_draft; 0 for a point."""
        return 0 if self.logits is None else self.logits.shape[2]

    @property
    def rank(self) -> int:
        """Rank of the product; 0 where there is none."""
        return 0 if self.markov_w2 is None else self.markov_w2.shape[1]

    @property
    def product(self) -> dict[str, int]:
        """Constexprs of the product, zeros where there is none."""
        if self.latent is None or self.markov_w2 is None:
            return {"RANK": 0, "BLOCK_K": 0}
        return product_shape(self.rank, self.latent.dtype, self.markov_w2.dtype)

    def pointers(self) -> tuple[Tensor | None, ...]:
        """Return the tensors as the kernels take them."""
        return self.logits, self.latent, self.markov_w2, self.draft_to_target

    def strides(self) -> tuple[int, ...]:
        """Return their strides as the kernels take them."""
        return (
            *((0, 0, 1) if self.logits is None else self.logits.stride()),
            *((0, 0, 1) if self.latent is None else self.latent.stride()),
            *((0, 1) if self.markov_w2 is None else self.markov_w2.stride()),
            0 if self.draft_to_target is None else self.draft_to_target.stride(0),
        )

    def config(self, vocab_size: int) -> Config:
        """Return the configuration that suits this source."""
        weight_bytes = 2 if self.markov_w2 is None else self.markov_w2.element_size()
        mapped = self.draft_to_target is not None
        logit_bytes = 2 if self.logits is None else self.logits.element_size()
        return choose_config(vocab_size, self.product["BLOCK_K"], weight_bytes, logit_bytes, mapped=mapped)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The constexprs of every launch.

    Attributes:
        vocab_size: V of the target.
        block_size: gamma.
        cell: tokens in a cell of the draw.
        filtered: whether p has filters.
        kind: of the source of q.
        mapped: whether the ids of its tokens are others than the target's.
        product: its constexprs, RANK and BLOCK_K.
        config: how the work is cut.
    """

    vocab_size: int
    block_size: int
    cell: int
    filtered: bool
    kind: int
    mapped: bool
    product: dict[str, int]
    config: Config

    @property
    def statistics_tiling(self) -> Tiling:
        """How the rows are cut whose statistics are taken."""
        return Tiling.cut(self.vocab_size, self.cell, self.config.block_v)

    @property
    def draw_tiling(self) -> Tiling:
        """How the rows are cut that are drawn from."""
        recomputed = self.kind == RECOMPUTED.value
        return Tiling.cut(self.vocab_size, self.cell, self.config.block_w if recomputed else self.config.block_v)

    @property
    def resample_warps(self) -> int:
        """Warps of `resample_kernel`."""
        heavy = self.mapped or self.kind == RECOMPUTED.value
        return self.config.product_warps if heavy else self.config.num_warps

    @property
    def pick_warps(self) -> int:
        """Warps of `pick_kernel`."""
        return self.config.product_warps if self.kind == RECOMPUTED.value else self.config.num_warps

    @property
    def rows_a_request(self) -> int:
        """Rows that the acceptance test needs to know: all drafted ones, and with filters the bonus row."""
        return self.block_size + self.filtered

    def statistics(self) -> dict[str, int]:
        """Return the constexprs of `statistics_kernel`."""
        tiling = self.statistics_tiling
        return {"FILTERED": self.filtered, "ROWS": rows_a_program(tiling.per_tile * tiling.lanes), **tiling.shape()}

    def rows(self) -> dict[str, int]:
        """Return the constexprs of `rows_kernel`."""
        tiling = self.statistics_tiling
        return {
            "FILTERED": self.filtered,
            "ROWS": rows_a_program(max(tiling.summary_lanes, tiling.lanes)),
            **tiling.search(),
        }

    def accept(self) -> dict[str, int]:
        """Return the constexprs of `accept_kernel`."""
        positions = positions_tile(self.block_size)
        return {"FILTERED": self.filtered, "BLOCK_R": _ACCEPT_LANES // positions, "BLOCK_K": positions}

    def resample(self) -> dict[str, int]:
        """Return the constexprs of `resample_kernel`, INTERPRETED excepted."""
        tiling = self.draw_tiling
        rows = PRODUCT_ROWS if self.kind == RECOMPUTED.value else rows_a_program(tiling.per_tile * tiling.lanes)
        return {"SOURCE": self.kind, "FILTERED": self.filtered, "ROWS": rows, **self.product, **tiling.shape()}

    def pick(self) -> dict[str, int]:
        """Return the constexprs of `pick_kernel`, INTERPRETED excepted."""
        tiling = self.draw_tiling
        rows = 1 if self.kind == RECOMPUTED.value else rows_a_program(max(tiling.summary_lanes, tiling.lanes))
        return {
            "SOURCE": self.kind,
            "FILTERED": self.filtered,
            "ROWS": rows,
            "POSITIONS": positions_tile(self.block_size),
            **self.product,
            **tiling.search(),
        }

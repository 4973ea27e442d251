r"""The exact law of a round on any vocabulary, by bisecting its uniforms.

A round is a step function of its uniforms: the draft draw, the acceptance test and the final draw are each monotone in one number.
Every step is found as the first float32 (bit pattern by bit pattern, so to the last ulp) at which the outcome changes, and the law
is composed from the steps in float64. With $t_x$ the acceptance threshold of token x and r the law of the final draw:

$$P(v) = q(v)\, t_v + \sum_x q(x) (1 - t_x)\, r_x(v)$$

No tolerance and no Monte Carlo: what is left is the rounding of float32, and this measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from einops import repeat
from torch import Tensor

import dsspark
from dsspark._checks import FLOAT_DTYPES, check_cell, check_dtype, check_shape
from dsspark.numerics import CELL
from dsspark.testing.oracles import exact_law_of_row, exact_residual, over_target_ids
from dsspark.types import DraftBlock, Filters, Verification

_ONE = 0x3F800000
"""Bit pattern of 1.0: the patterns below it are the float32 numbers of [0, 1), in order."""
_STEPS = 30
"""Halvings that single out one of fewer than 2**30 patterns."""
_CHUNK_ENTRIES = 1 << 20
"""Logits handed to a sampler at once."""
_MARGIN = 1e-5
"""Width of a step in whose middle two computations of one law that differ by rounding agree."""
_PROBES = 16
"""Breakpoints at which every drafted token's final draw is compared with the measured one."""
_MOST_VARYING = 32
"""Drafted tokens whose final draw is measured on its own where it is not the common one."""

TOP = 1 - 2.0**-24
"""The largest uniform."""
EPS = 2.0**-23
"""Float32 epsilon."""

DraftFn = Callable[..., DraftBlock]
VerifyFn = Callable[..., Verification]


@dataclass(frozen=True, kw_only=True)
class LawError:
    """How far the exact law of a round is from the target's.

    Attributes:
        max_law_error: largest absolute deviation of a probability, of the first emitted token or of the bonus token.
        in_eps: the same over the float32 epsilon, 2**-23.
        max_threshold_ulps: largest deviation of an acceptance threshold from min(1, p / q), in float32 ulps of the exact value,
            over the tokens that the draft can draw.
        draft_error: largest deviation of the draft draw's distribution function from that of q.
        residual_error: likewise of the residual, times the probability that it is used; 0 if it never is.
        bonus_error: likewise of the bonus draw; 0 if it is never used.
        final_varies: whether the residual or the bonus draw depends on which token was drafted, which it must not.
    """

    max_law_error: float
    in_eps: float
    max_threshold_ulps: float
    draft_error: float
    residual_error: float
    bonus_error: float
    final_varies: bool


def first_true(predicate: Callable[[Tensor], Tensor], count: int, device: torch.device | None = None) -> Tensor:
    """Return the smallest float32 in [0, 1) at which each of `count` monotone predicates holds; 1 where none does.

    Args:
        predicate: maps uniforms [count] float32 to bool [count], each entry False below its breakpoint and True from it on.
        count: how many are bisected at once.
        device: of the uniforms.

    Returns:
        [count] float64: the probability that a real uniform, rounded down to float32, makes the predicate False.
    """
    low = torch.zeros(count, dtype=torch.int64, device=device)
    high = torch.full_like(low, _ONE)
    for _ in range(_STEPS):
        middle = ((low + high) // 2).clamp(max=_ONE - 1)
        hit = predicate(middle.to(torch.int32).view(torch.float32))
        open_ = low < high
        high = torch.where(open_ & hit, middle, high)
        low = torch.where(open_ & ~hit, middle + 1, low)
    return high.to(torch.int32).view(torch.float32).to(torch.float64)


def _below(breakpoint: Tensor) -> Tensor:
    """Return the float32 just below a breakpoint in (0, 1]."""
    bits = breakpoint.to(torch.float32).view(torch.int32)
    return (bits - 1).clamp(min=0).view(torch.float32)


@dataclass(frozen=True)
class Steps:
    """The breakpoints of a two-level draw and the law they make.

    Attributes:
        probs: [V] float64.
        first: [V, 2] float32: the smallest uniforms that draw each token of positive probability.
        middle: [V, 2] float32: uniforms in the middle of what draws it.
        wide: [V] bool: whether `middle` is further from a breakpoint than two float32 computations of one law can be.
    """

    probs: Tensor
    first: Tensor
    middle: Tensor
    wide: Tensor

    def cdf_error(self, law: Tensor) -> float:
        """Return the largest deviation of the distribution function from that of `law`, [V] float64."""
        return float((self.probs.cumsum(0) - law.cumsum(0)).abs().max())


def two_level_steps(name: str, draw: Callable[[Tensor], Tensor], vocab_size: int, cell: int) -> Steps:
    """Return the exact law of a two-level inverse-CDF draw, taken as a black box.

    Args:
        name: whose draw it is, for the error message.
        draw: maps uniforms [N, 2] to ids [N] in [0, V).
        vocab_size: V.
        cell: tokens in a cell.

    Raises:
        ValueError: if the draw turns out not to be a two-level inverse CDF, for which this measure means nothing.
    """
    token = torch.arange(vocab_size)
    cells = torch.arange(-(-vocab_size // cell))
    zero = torch.zeros(len(cells))
    cell_end = first_true(lambda u: draw(torch.stack((u, zero), dim=1)) // cell > cells, len(cells))
    cell_start = torch.cat((cell_end.new_zeros(1), cell_end[:-1]))
    of_token = token // cell
    u0 = cell_start.clamp(max=TOP).to(torch.float32)[of_token]
    token_end = first_true(lambda u: draw(torch.stack((u0, u), dim=1)) > token, vocab_size)
    token_start = torch.cat((token_end.new_zeros(1), token_end[:-1]))
    token_start[::cell] = 0
    probs = (cell_end - cell_start)[of_token] * (token_end - token_start)

    drawn = (probs > 0).nonzero()[:, 0]
    first = torch.stack((u0, token_start.to(torch.float32)), dim=1)
    last = torch.stack((_below(cell_end)[of_token], _below(token_end)), dim=1)
    regular = bool((probs >= 0).all()) and bool((first[drawn] < 1).all())
    if not regular or not all(torch.equal(draw(corner[drawn]), drawn) for corner in (first, last)):
        raise ValueError(
            f"{name}: got a draw that does not rise with its uniforms, expected a two-level inverse CDF of cells of {cell} tokens; "
            "pass the cell size it was built for, or compare samples with dsspark.testing.laws.g_test"
        )
    middle = torch.stack(((cell_start + cell_end)[of_token], token_start + token_end), dim=1) / 2
    wide = (cell_end - cell_start > _MARGIN)[of_token] & (token_end - token_start > _MARGIN)
    return Steps(probs, first, middle.to(torch.float32), wide)


class _Round:
    """One request's round as a function of its uniforms; everything else is fixed."""

    def __init__(
        self,
        rows: Tensor,
        draft_row: Tensor,
        temperature: float,
        draft_temperature: float,
        filters: Filters | None,
        draft_to_target: Tensor | None,
        cell: int,
        draft_fn: DraftFn,
        verify_fn: VerifyFn,
    ) -> None:
        self.rows, self.draft_row = rows, draft_row
        self.temperature, self.draft_temperature = temperature, draft_temperature
        self.filters, self.draft_to_target, self.cell = filters, draft_to_target, cell
        self.draft_fn, self.verify_fn = draft_fn, verify_fn
        self.chunk = max(1, _CHUNK_ENTRIES // max(rows.shape[1], draft_row.shape[0]))

    def split(self, count: int) -> Iterator[slice]:
        """Return slices of at most `chunk` requests."""
        return (slice(start, min(start + self.chunk, count)) for start in range(0, count, self.chunk))

    def draft(self, uniforms: Tensor) -> DraftBlock:
        """Draft one token for each row of uniforms [N, 2]."""
        count = len(uniforms)
        whole = dsspark.Uniforms(draft=uniforms[:, None], accept=torch.zeros(count, 1), final=torch.zeros(count, 2))
        return self.draft_fn(
            repeat(self.draft_row, "v -> r 1 v", r=count),
            torch.zeros(count, dtype=torch.int64),
            None,
            whole,
            temperature=self.draft_temperature,
            draft_to_target=self.draft_to_target,
            cell=self.cell,
        )

    def drawn_ids(self, uniforms: Tensor) -> Tensor:
        """Return the draft ids (not target ids) of the drafted tokens, [N]."""
        tokens = torch.cat([self.draft(uniforms[part]).tokens[:, 0] for part in self.split(len(uniforms))])
        return tokens if self.draft_to_target is None else torch.searchsorted(self.draft_to_target, tokens)

    def verify(self, block: DraftBlock, accept: Tensor, final: Tensor) -> Verification:
        """Verify a block of one draft a request with accept [N] and final [N, 2]."""
        count = len(accept)
        zeros = torch.zeros(count, dtype=torch.int64)
        uniforms = dsspark.Uniforms(draft=torch.zeros(count, 1, 2), accept=accept[:, None], final=final)
        return self.verify_fn(
            repeat(self.rows, "two v -> (r two) v", r=count),
            dsspark.pack(zeros, block.tokens, zeros + 1, zeros),
            block,
            uniforms,
            temperature=self.temperature,
            cell=self.cell,
            **({} if self.filters is None else {"filters": self.filters}),
        )

    def thresholds(self, uniforms: Tensor) -> Tensor:
        """Return the smallest acceptance uniform that rejects the token drafted by each row of uniforms, [N] float64."""
        found = []
        for part in self.split(len(uniforms)):
            block = self.draft(uniforms[part])
            final = torch.full((len(block.tokens), 2), 0.5)
            found.append(
                first_true(lambda u, b=block, f=final: self.verify(b, u, f).num_accepted == 0, len(final))  # type: ignore[misc]
            )
        return torch.cat(found)

    def final_tokens(self, uniforms: Tensor, accept: Tensor, final: Tensor) -> Tensor:
        """Return the last emitted token of rounds with draft uniforms [N, 2], accept [N] and final [N, 2]."""
        found = []
        for part in self.split(len(final)):
            result = self.verify(self.draft(uniforms[part]), accept[part], final[part])
            found.append(result.tokens.gather(1, result.num_accepted[:, None].to(torch.int64))[:, 0])
        return torch.cat(found)


@dataclass(frozen=True)
class _Final:
    """The final draw of rounds that draft each of some tokens: probs [N, V], the common steps, and whether any differs."""

    probs: Tensor
    steps: Steps | None
    varies: bool


def _measure_final(round_: _Round, name: str, uniforms: Tensor, accept: Tensor, weight: Tensor) -> _Final:
    """Measure the final draw after each draft of `uniforms` [N, 2], in full after the one of largest weight [N].

    The draw must be the same after every draft. That is checked inside the steps of several tokens; a draft after which it is not
    gets a measure of its own.
    """
    vocab_size, cell = round_.rows.shape[1], round_.cell
    count = len(uniforms)
    if count == 0:
        return _Final(torch.zeros(0, vocab_size, dtype=torch.float64), None, False)

    def steps_after(which: int) -> Steps:
        def draw(final: Tensor) -> Tensor:
            rows = len(final)
            return round_.final_tokens(uniforms[which].expand(rows, 2), accept[which].expand(rows), final)

        return two_level_steps(name, draw, vocab_size, cell)

    common = steps_after(int(weight.argmax()))
    probs = repeat(common.probs, "v -> n v", n=count).clone()
    differs = torch.zeros(count, dtype=torch.bool)
    probed = common.wide.nonzero()[:, 0]
    for probe in range(min(_PROBES, len(probed))):
        # Consecutive drafts probe different tokens, so that together they reach many.
        stride = max(1, len(probed) // _PROBES)
        expected = probed[(probe * stride + torch.arange(count)) % len(probed)]
        differs |= round_.final_tokens(uniforms, accept, common.middle[expected]) != expected
    for which in (differs * weight).argsort(descending=True)[: min(_MOST_VARYING, int(differs.sum()))].tolist():
        probs[which] = steps_after(which).probs
    return _Final(probs, common, bool(differs.any()))


def _ulps(value: Tensor, exact: Tensor) -> float:
    """Return the largest deviation in float32 ulps of the exact value."""
    if len(exact) == 0:
        return 0.0
    exponent = torch.frexp(exact).exponent - 1
    ulp = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-126) - 23)
    return float(((value - exact).abs() / ulp).max())


@torch.no_grad()
def law_error(
    target_logits_row: Tensor,
    draft_logits_row: Tensor,
    bonus_row: Tensor | None = None,
    *,
    temperature: float = 1.0,
    draft_temperature: float | None = None,
    filters: Filters | None = None,
    draft_to_target: Tensor | None = None,
    cell: int = CELL,
    draft_fn: DraftFn = dsspark.draft_block,
    verify_fn: VerifyFn = dsspark.verify,
) -> LawError:
    """Measure the exact law of a one-draft round on real logits and compare it with the target's.

    `draft_fn` and `verify_fn` are black boxes: only their uniforms are varied and only their tokens are read.

    Args:
        target_logits_row: [V] float, the target's logits where the draft was made.
        draft_logits_row: [V_draft] float, the drafter's logits (corrected, if it has a sequential head).
        bonus_row: [V] float, the target's logits after an accepted draft; the target row again if None.
        temperature: T of the target, 0 or more.
        draft_temperature: T of the draft; the target's if None.
        filters: scalar top-k, top-p, min-p on p.
        draft_to_target: [V_draft] int64 strictly increasing target ids, or None.
        cell: tokens in a cell of the two-level draw.
        draft_fn: called as `dsspark.draft_block`.
        verify_fn: called as `dsspark.verify`.

    Raises:
        ValueError: for shapes that do not belong together, a row that is no distribution, or a draw that is no two-level
            inverse CDF.
        TypeError: for dtypes that are not listed.

    Numerics: breakpoints to the last float32 bit; composition, and the laws compared with, in float64.
    Cost: about 200 calls on V rows of V logits, at most 2**20 entries at once: 0.3 s for V = 272 on one core, a minute or
        two for V = 4,096.

    Example:
        >>> error = law_error(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 1.0, 0.0]))
        >>> error.in_eps < 4, error.final_varies
        (True, False)
    """
    check_shape("target_logits_row", target_logits_row, ("V",))
    check_shape("draft_logits_row", draft_logits_row, ("V_draft",))
    bonus_row = target_logits_row if bonus_row is None else bonus_row
    check_shape("bonus_row", bonus_row, (len(target_logits_row),))
    for name, row in (
        ("target_logits_row", target_logits_row),
        ("draft_logits_row", draft_logits_row),
        ("bonus_row", bonus_row),
    ):
        check_dtype(name, row, FLOAT_DTYPES)
    check_cell(cell)
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    vocab_size = len(target_logits_row)
    p = exact_law_of_row(target_logits_row, temperature, filters)
    bonus_law = exact_law_of_row(bonus_row, temperature, filters)
    q = exact_law_of_row(draft_logits_row, draft_temperature)
    rows = torch.stack((target_logits_row, bonus_row.to(target_logits_row.dtype)))
    round_ = _Round(
        rows, draft_logits_row, temperature, draft_temperature, filters, draft_to_target, cell, draft_fn, verify_fn
    )

    draft = two_level_steps("draft_fn", round_.drawn_ids, len(draft_logits_row), cell)
    drawn = (draft.probs > 0).nonzero()[:, 0]
    ids = drawn if draft_to_target is None else draft_to_target[drawn]
    uniforms, drawn_probs = draft.first[drawn], draft.probs[drawn]
    threshold = round_.thresholds(uniforms)
    inside = ids < vocab_size
    exact_threshold = torch.zeros_like(threshold)
    exact_threshold[inside] = (p[ids[inside]] / q[drawn[inside]]).clamp(max=1)

    rejects, accepts = threshold < 1, threshold > 0
    rejected = drawn_probs[rejects] * (1 - threshold[rejects])
    accepted = drawn_probs[accepts] * threshold[accepts]
    residual = _measure_final(
        round_, "verify_fn (residual)", uniforms[rejects], threshold[rejects].to(torch.float32), rejected
    )
    bonus = _measure_final(round_, "verify_fn (bonus)", uniforms[accepts], torch.zeros(int(accepts.sum())), accepted)

    law = rejected @ residual.probs
    law.index_add_(0, ids[accepts], accepted)
    deviation = float((law - p).abs().max())
    if bonus.steps is not None:
        deviation = max(deviation, float((bonus.probs - bonus_law).abs().max()))
    exact_rest = exact_residual(p, over_target_ids(q, vocab_size, draft_to_target))
    return LawError(
        max_law_error=deviation,
        in_eps=deviation / EPS,
        max_threshold_ulps=_ulps(threshold, exact_threshold),
        draft_error=draft.cdf_error(q),
        residual_error=residual.steps.cdf_error(exact_rest) * float(rejected.sum()) if residual.steps else 0.0,
        bonus_error=bonus.steps.cdf_error(bonus_law) if bonus.steps else 0.0,
        final_varies=residual.varies or bonus.varies,
    )

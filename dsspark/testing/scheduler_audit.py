"""Audit a scheduler: the joint non-anticipation condition and, independently, the joint output law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dsspark.cost_table import CostTable
from dsspark.testing.adapters import scheduler_maker
from dsspark.testing.grid import GridLaw
from dsspark.testing.report import AuditReport, Finding
from dsspark.testing.rounds import check_lengths
from dsspark.testing.scheduling import LengthsFn, anticipates, compare_scheduled
from dsspark.testing.search import name_of, require_hypothesis, smallest

if TYPE_CHECKING:
    from hypothesis import strategies as st

Case = TypeVar("Case")

SHAPES = ((1, 2), (1, 2), (2, 2), (1, 3))
"""(R, gamma) tried, the smallest first and twice. At gamma = 1 no survival depends on a drafted token, so nothing can leak."""

_LAWS = (((3, 1), (1, 1)), ((1, 3), (1, 1)), ((7, 3), (1, 1)), ((1, 1), (3, 1)), ((1, 3), (3, 1)), ((1, 0), (1, 1)))
"""Numerators of p and q: they differ, so that accepting something for the wrong reason shows."""
_TELLING = ((1.0, 0.0), (0.0, 1.0), (1.0, 0.5), (0.5, 0.0), (0.9, 0.0), (0.25, 0.75), (1.0, 1.0))
"""Confidences after either token."""
_RATES = (1.0, 0.5, 0.45, 0.9, 0.4, 0.25)
"""Steps per second in a ragged table: from few values, so that Theta often falls and then rises above where it was."""

Steps = tuple[tuple[tuple[float, ...], ...], ...]
"""Survivals [R][gamma] of earlier steps."""


def _as_lists(survival: Tensor) -> list[list[float]]:
    return [[round(a, 6) for a in row] for row in survival.tolist()]


@dataclass(frozen=True, kw_only=True)
class LawCase:
    """A step of R requests: what target and drafter say, what the engine costs, and what the scheduler saw before."""

    law: GridLaw
    sps: tuple[float, ...]
    anchors: tuple[int, ...]
    history: Steps = ()

    def __str__(self) -> str:
        law = self.law
        lines = [
            f"R = {len(self.anchors)}, gamma = {law.block_size}, V = {law.vocab_size}, anchors {list(self.anchors)}",
            f"SPS(1..) = {list(self.sps)}",
            f"p after each token: {[[str(f) for f in row] for row in law.p]}",
            f"q after each token: {[{v: str(f) for v, f in row.items()} for row in law.q]}",
            f"confidence c_k after each token: {[list(row) for row in law.confidence or ()]}",
        ]
        return "\n".join(lines + [f"survival of an earlier step: {step}" for step in self.history])


@dataclass(frozen=True, kw_only=True)
class CausalityCase:
    """Two steps that differ only behind the first draft left out of each request."""

    survival: Tensor
    other: Tensor
    sps: tuple[float, ...]
    history: Steps = ()

    def __str__(self) -> str:
        lines = [f"SPS(1..) = {list(self.sps)}", f"survival {_as_lists(self.survival)}"]
        return "\n".join(lines + [f"survival of an earlier step: {step}" for step in self.history])


def audit_scheduler(
    scheduler: Callable[..., Any], *, max_examples: int = 200, seed: int = 0, name: str | None = None
) -> AuditReport:
    """Audit a scheduler for leaks: does which drafts are verified depend on tokens whose verification it decides?

    Two independent checks, each of which returns the smallest counterexample Hypothesis finds:

    - causality: replacing all survivals behind the first draft left out, in all requests at once, changes no length;
    - joint law: the texts of up to two requests have exactly the product of their target laws, in fractions.

    Args:
        scheduler: a function `f(survival [R, gamma], cost_table) -> lengths [R]`, or a class `C(cost_table, block_size)` with
            `step(survival, request_ids) -> lengths [R]`, which is audited after random earlier steps too.
        max_examples: cases tried a check, for each of the sizes (R, gamma) in `SHAPES`.
        seed: of the search.
        name: of the subject in the report.

    Raises:
        TypeError: if `scheduler` is neither.
        ValueError: if it returns anything but integer lengths [R] in 0..gamma.
        RuntimeError: without Hypothesis.

    Source: design condition of this library; paper 3.2.2 and Appendix A.
    """
    make, remembers = scheduler_maker(scheduler)
    require_hypothesis()

    def at_this_step(sps: tuple[float, ...], history: Steps, num_requests: int, block_size: int) -> LengthsFn:
        def lengths(survival: Tensor) -> Tensor:
            instance = make(CostTable([1.0, *sps]), block_size)
            ids = list(range(num_requests))
            for step in history:
                instance.step(torch.tensor(step), ids)
            return check_lengths(instance.step(survival, ids), num_requests, block_size)

        return lengths

    def leaks_law(case: LawCase) -> bool:
        return not compare_case(case).equal

    def compare_case(case: LawCase) -> Any:
        step = at_this_step(case.sps, case.history, len(case.anchors), case.law.block_size)
        return compare_scheduled(case.law, step, case.anchors)

    def peeks(case: CausalityCase) -> bool:
        return replaced_by(case) is not None

    def replaced_by(case: CausalityCase) -> Tensor | None:
        step = at_this_step(case.sps, case.history, *case.survival.shape)
        others = (case.other, torch.ones_like(case.other), torch.zeros_like(case.other))
        changed = (anticipates(step, case.survival, other) for other in others)
        return next((replaced for replaced in changed if replaced is not None), None)

    def search(
        cases: Callable[[int, int, bool], st.SearchStrategy[Case]], fails: Callable[[Case], bool]
    ) -> Case | None:
        for round_, shape in enumerate(SHAPES):
            case = smallest(cases(*shape, remembers), fails, max_examples=max_examples, seed=seed + round_)
            if case is not None:
                return case
        return None

    law_case = search(law_cases, leaks_law)
    causality_case = search(causality_cases, peeks)
    tried = max_examples * len(SHAPES)
    if causality_case is None:
        causality = Finding(check="causality", passed=True, detail=f"lengths never changed in {tried} cases")
    else:
        step = at_this_step(causality_case.sps, causality_case.history, *causality_case.survival.shape)
        replaced = replaced_by(causality_case)
        assert replaced is not None  # it is what the search found
        detail = (
            f"lengths {step(causality_case.survival).tolist()} become {step(replaced).tolist()} when survivals behind the first "
            f"draft left out change to {_as_lists(replaced)}"
        )
        causality = Finding(check="causality", passed=False, detail=detail, counterexample=causality_case)
    if law_case is None:
        law = Finding(check="joint law", passed=True, detail=f"exactly the target's in {tried} cases")
    else:
        comparison = compare_case(law_case)
        law = Finding(
            check="joint law", passed=False, detail=str(comparison), counterexample=law_case, comparison=comparison
        )
    return AuditReport(subject=name or name_of(scheduler), kind="scheduler", findings=(law, causality))


def law_cases(num_requests: int, block_size: int, remembers: bool) -> st.SearchStrategy[LawCase]:
    """Return the strategy of law cases of one size."""
    from hypothesis import strategies as st

    from dsspark.testing import strategies

    @st.composite
    def cases(draw: st.DrawFn) -> LawCase:
        p, q = draw(st.sampled_from(_LAWS))
        # All anchors look alike, so that survivals tie; the later confidences tell the drafted tokens apart.
        first = draw(strategies.confidences(1, 1))[0] * 2
        confidence = (first, *(draw(st.sampled_from(_TELLING)) for _ in range(block_size - 1)))
        return LawCase(
            law=GridLaw.independent(p, q, block_size, confidence),
            sps=draw(_tables(num_requests * (1 + block_size))),
            anchors=tuple(range(num_requests)),
            history=_history(draw, remembers, num_requests, block_size),
        )

    return cases()


def causality_cases(num_requests: int, block_size: int, remembers: bool) -> st.SearchStrategy[CausalityCase]:
    """Return the strategy of pairs of steps of one size."""
    from hypothesis import strategies as st

    from dsspark.testing import strategies

    @st.composite
    def cases(draw: st.DrawFn) -> CausalityCase:
        return CausalityCase(
            survival=draw(strategies.survivals(num_requests, block_size)),
            other=draw(strategies.survivals(num_requests, block_size)),
            sps=draw(_tables(num_requests * (1 + block_size))),
            history=_history(draw, remembers, num_requests, block_size),
        )

    return cases()


def _tables(max_tokens: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Return SPS(1..max_tokens): mostly ragged tables, on which a scheduler that looks too far finds something to gain."""
    from hypothesis import strategies as st

    from dsspark.testing import strategies

    ragged = st.tuples(*[st.sampled_from(_RATES)] * max_tokens)
    shaped = strategies.cost_tables(max_tokens).map(lambda table: tuple(table.sps.tolist()[1:]))
    return st.one_of(ragged, ragged, shaped)


def _history(draw: st.DrawFn, remembers: bool, num_requests: int, block_size: int) -> Steps:
    if not remembers:
        return ()
    from hypothesis import strategies as st

    from dsspark.testing import strategies

    steps = [draw(strategies.survivals(num_requests, block_size)) for _ in range(draw(st.integers(0, 3)))]
    return tuple(tuple(tuple(row) for row in step.tolist()) for step in steps)

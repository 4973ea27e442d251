"""Audit a sampler: exact laws on grids, edges, thresholds on real numbers; or, where it draws by itself, a statistical test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsspark.testing.adapters import WHOLE_VOCABULARY, OutsideSampler
from dsspark.testing.bisection import law_error
from dsspark.testing.boundary import EDGES, edge_failures
from dsspark.testing.enumeration import Comparison, compare, exact_law
from dsspark.testing.grid import GridLaw, lattice
from dsspark.testing.gtest import g_test
from dsspark.testing.report import AuditReport, Finding
from dsspark.testing.rounds import Stages, grid_round
from dsspark.testing.search import name_of, require_hypothesis, smallest
from dsspark.types import Verification

if TYPE_CHECKING:
    from hypothesis import strategies as st

VerifyLike = Callable[..., Verification]

_MAX_EPS = 32.0
"""Float32 epsilons a law may be off on rows whose exponentials are correct to the last bits."""
_MAX_ULPS = 64.0
_LATTICE_POINTS = 1 << 14
_GRID = 64.0
"""Logits are multiples of 1/64: differences are exact in float32, so that only exp and sums round; bfloat16 cannot hold them."""


@dataclass(frozen=True)
class FixedLengths:
    """Verify given numbers of drafts, one a request."""

    lengths: tuple[int, ...]

    def step(self, survival: Tensor, request_ids: object) -> Tensor:
        """Return the lengths."""
        return torch.tensor(self.lengths, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class SamplerCase:
    """A round whose whole lattice of uniforms is enumerated."""

    law: GridLaw
    lengths: tuple[int, ...]
    cell: int
    temperature: float = 1.0
    draft_temperature: float = 1.0

    @property
    def anchors(self) -> tuple[int, ...]:
        """Distinct anchors where there are enough tokens, so that exchanged rows show."""
        return tuple(r % self.law.vocab_size for r in range(len(self.lengths)))

    def stages(self, verify: VerifyLike) -> Stages:
        """Return the stages of the round around a sampler."""
        return Stages(
            verify=verify,
            scheduler=lambda: FixedLengths(self.lengths),
            temperature=self.temperature,
            draft_temperature=self.draft_temperature,
            cell=self.cell,
        )

    def compare(self, verify: VerifyLike) -> Comparison:
        """Return the exact law of the round beside the target's."""
        points = lattice(self.law, cell=self.cell, num_requests=len(self.lengths), max_points=1 << 22)
        counts = exact_law(grid_round(self.law, self.stages(verify), self.anchors), points)
        return compare(counts.counts, counts.total, self.law, self.anchors)

    def __str__(self) -> str:
        law = self.law
        ids = "" if law.draft_to_target is None else f", draft ids {list(law.draft_to_target)}"
        return "\n".join(
            [
                f"R = {len(self.lengths)}, gamma = {law.block_size}, V = {law.vocab_size}{ids}, lengths {list(self.lengths)}, "
                f"anchors {list(self.anchors)}, cell = {self.cell}, T = {self.temperature}, draft T = {self.draft_temperature}",
                f"p after each token: {[[str(f) for f in row] for row in law.p]}",
                f"q after each token: {[{v: str(f) for v, f in row.items()} for row in law.q]}",
            ]
        )


def audit_sampler(
    sampler: VerifyLike | OutsideSampler,
    *,
    max_examples: int = 60,
    samples: int = 40_000,
    false_alarm: float = 1e-6,
    seed: int = 0,
    name: str | None = None,
) -> AuditReport:
    """Audit a sampler: does what it emits have exactly the target's law?

    A callable with `dsspark.verify`'s signature, and an `OutsideSampler` that takes uniforms, are checked exactly:

    - law: integer counts over whole lattices of uniforms, one and two requests, ragged lengths, draft vocabularies of their
      own, several temperatures; Hypothesis returns the smallest case that differs;
    - edges: u = 0, u = p / q, the largest u, tiny and empty residuals, placeholder tokens;
    - thresholds: every acceptance threshold and breakpoint on rows of 37 tokens with probabilities down to 1e-9, bisected.

    An `OutsideSampler` that draws by itself is tested by a G-test of the texts it emits.

    Args:
        sampler: called as `dsspark.verify` (the keywords `temperature` and `cell` are given), or an `OutsideSampler`.
        max_examples: lattices tried for the law.
        samples: draws of each statistical test.
        false_alarm: of each statistical test.
        seed: of the search, and of the drafts of the statistical tests.
        name: of the subject in the report.

    Raises:
        TypeError: if `sampler` is not callable.
        ValueError: if it returns anything but tokens of the right shape.
        RuntimeError: without Hypothesis.
    """
    if isinstance(sampler, OutsideSampler):
        name = name or name_of(sampler.function)
        if not sampler.takes_uniforms:
            findings = _statistical_findings(sampler, samples, false_alarm, seed)
            return AuditReport(subject=name, kind="sampler", findings=findings)
        verify, whole = sampler.verify, True
    elif callable(sampler):
        verify, whole = sampler, False
    else:
        raise TypeError(
            f"sampler: got {type(sampler).__name__}, expected a callable with the signature of dsspark.verify, or an OutsideSampler"
        )
    require_hypothesis()
    findings = (
        _law_finding(verify, whole, max_examples, seed),
        _edge_finding(verify, whole),
        _threshold_finding(verify, whole, seed),
    )
    return AuditReport(subject=name or name_of(sampler), kind="sampler", findings=findings)


def _law_finding(verify: VerifyLike, whole: bool, max_examples: int, seed: int) -> Finding:
    case: SamplerCase | None = None
    # One request first: a fault that shows there should be told there.
    for num_requests in (1, 1) if whole else (1, 2):
        case = smallest(
            sampler_cases(num_requests, whole),
            lambda c: not c.compare(verify).equal,
            max_examples=max_examples,
            seed=seed,
        )
        if case is not None:
            break
    if case is None:
        return Finding(check="law", passed=True, detail=f"integer counts exact on {2 * max_examples} lattices")
    comparison = case.compare(verify)
    return Finding(check="law", passed=False, detail=str(comparison), counterexample=case, comparison=comparison)


def sampler_cases(num_requests: int, whole: bool) -> st.SearchStrategy[SamplerCase]:
    """Return the strategy of rounds; `whole`: whole blocks and one cell only."""
    from hypothesis import strategies as st

    from dsspark.testing import strategies

    @st.composite
    def cases(draw: st.DrawFn) -> SamplerCase:
        cell = WHOLE_VOCABULARY if whole else draw(st.sampled_from([2, 1, 3]))
        vocab_sizes, block_sizes = draw(st.sampled_from([((2,), (1, 2)), ((3, 4), (1,))]))
        law = draw(
            strategies.grid_laws(
                vocab_sizes, block_sizes, num_requests=num_requests, cell=cell, max_points=_LATTICE_POINTS
            )
        )
        lengths = (law.block_size,) * num_requests
        if not whole:
            lengths = tuple(draw(st.integers(0, law.block_size)) for _ in range(num_requests))
        return SamplerCase(
            law=law,
            lengths=lengths,
            cell=cell,
            temperature=draw(st.sampled_from([1.0, 0.5])),
            draft_temperature=draw(st.sampled_from([1.0, 2.0])),
        )

    return cases()


def _edge_finding(verify: VerifyLike, whole: bool) -> Finding:
    # Samplers of probabilities get whole blocks of tokens that have one.
    edges = tuple(edge for edge in EDGES if not whole or edge.token not in (None, -1, 7))
    failures = edge_failures(verify, cell=WHOLE_VOCABULARY if whole else 2, edges=edges)
    detail = f"{len(failures)} of {len(edges)} cases wrong" if failures else f"{len(edges)} cases"
    return Finding(
        check="boundary draw", passed=not failures, detail=detail, counterexample=failures[0] if failures else None
    )


def threshold_rows(seed: int, vocab_size: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Return target, draft and bonus logits [V] with probabilities from large to 1e-9, multiples of 1/64.

    The improbable tokens come first, where a running float32 sum still resolves them.
    """
    generator = torch.Generator().manual_seed(seed)

    def row(spread: float) -> Tensor:
        return (torch.randn(vocab_size, generator=generator) * spread * _GRID).round() / _GRID

    slope = torch.linspace(0, 20, vocab_size).mul(_GRID).round() / _GRID
    return slope + row(1.0), slope + row(1.0), row(2.0)


def _threshold_finding(verify: VerifyLike, whole: bool, seed: int) -> Finding:
    worst_ulps = worst_eps = 0.0
    for offset in range(3):
        target, draft, bonus = threshold_rows(seed + offset)
        cell = WHOLE_VOCABULARY if whole else 8
        try:
            error = law_error(target, draft, bonus, cell=cell, verify_fn=verify)
        except ValueError as problem:
            return Finding(check="thresholds", passed=False, detail=str(problem))
        if error.final_varies:
            detail = "the residual or bonus draw depends on which token was drafted"
            return Finding(
                check="thresholds", passed=False, detail=detail, counterexample=f"threshold_rows({seed + offset})"
            )
        worst_ulps, worst_eps = max(worst_ulps, error.max_threshold_ulps), max(worst_eps, error.in_eps)
    passed = worst_ulps <= _MAX_ULPS and worst_eps <= _MAX_EPS
    rows = None if passed else f"threshold_rows({seed}) to threshold_rows({seed + 2})"
    detail = (
        f"acceptance thresholds within {worst_ulps:.1f} ulps of min(1, p / q) (allowed {_MAX_ULPS:g}), "
        f"law within {worst_eps:.2f} float32 epsilons (allowed {_MAX_EPS:g})"
    )
    return Finding(check="thresholds", passed=passed, detail=detail, counterexample=rows)


STATISTICAL_LAWS = (
    GridLaw(target=((3, 1), (1, 3)), draft=((1, 1), (1, 1)), block_size=2),
    GridLaw(target=((2, 1, 1), (1, 1, 2), (0, 2, 2)), draft=((1, 1, 2), (2, 1, 1), (1, 1, 2)), block_size=2),
    GridLaw(target=((1, 2, 5), (4, 4, 0), (1, 6, 1)), draft=((6, 1, 1), (1, 0, 7), (2, 3, 3)), block_size=3),
    GridLaw.independent((1, 2, 1), (1, 2, 1), block_size=2),
)


def _statistical_findings(sampler: OutsideSampler, samples: int, false_alarm: float, seed: int) -> tuple[Finding, ...]:
    findings = []
    for index, law in enumerate(STATISTICAL_LAWS):
        texts = _sampled_texts(sampler, law, samples, torch.Generator().manual_seed(seed + index))
        exact = _text_law(law)
        counts = torch.bincount(texts.clamp(min=0), minlength=len(exact))
        test = g_test(counts, exact, false_alarm=false_alarm)
        detail = f"{samples} texts, p-value {test.p_value:.2g}, false-alarm rate {false_alarm}"
        passed = test.passed and bool((texts >= 0).all())
        findings.append(
            Finding(
                check=f"G-test of law {index + 1}", passed=passed, detail=detail, counterexample=None if passed else law
            )
        )
    return tuple(findings)


def _text_law(law: GridLaw) -> Tensor:
    """Return the target's probability of every text of gamma + 1 tokens after anchor 0, in base-V order."""
    p = torch.tensor([[float(f) for f in row] for row in law.p], dtype=torch.float64)
    texts = p[0]
    for _ in range(law.block_size):
        last = torch.arange(len(texts)) % law.vocab_size
        texts = (texts[:, None] * p[last]).flatten()
    return texts


def _sampled_texts(sampler: OutsideSampler, law: GridLaw, samples: int, generator: torch.Generator) -> Tensor:
    """Return `samples` emitted texts, finished by the target, as numbers in base V; -1 for one with an impossible token."""
    anchors = torch.zeros(samples, dtype=torch.int64)
    p = torch.tensor([[float(f) for f in row] for row in law.p])
    q = torch.tensor([[float(row.get(v, 0)) for v in range(law.vocab_size)] for row in law.q])
    drafted = anchors[:, None]
    for _ in range(law.block_size):
        drafted = torch.cat((drafted, torch.multinomial(q[drafted[:, -1]], 1, generator=generator)), dim=1)
    tokens = sampler.tokens(p[drafted], q[drafted[:, :-1]], drafted[:, 1:])
    number = torch.zeros_like(anchors)
    previous, ended = anchors, torch.zeros(samples, dtype=torch.bool)
    lawful = tokens[:, 0] >= 0
    for k in range(law.block_size + 1):
        ended = ended | (tokens[:, k] < 0)
        finish = torch.multinomial(p[previous], 1, generator=generator)[:, 0]
        token = torch.where(ended, finish, tokens[:, k])
        lawful = lawful & (token < law.vocab_size)
        previous = token.clamp(0, law.vocab_size - 1)
        number = number * law.vocab_size + previous
    return torch.where(lawful, number, -1)

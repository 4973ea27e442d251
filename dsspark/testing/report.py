"""What an audit returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from dsspark.testing.enumeration import Comparison, Outcome
from dsspark.testing.errors import LosslessnessError

_MOST_OUTCOMES = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        passed: whether it held.
        detail: what was covered, or what went wrong.
        counterexample: the smallest case that fails; None if it passed.
        comparison: exact and observed law of that case, where the check compares laws.
    """

    check: str
    passed: bool
    detail: str
    counterexample: object | None = None
    comparison: Comparison | None = None


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The findings of an audit.

    Attributes:
        subject: what was audited.
        kind: "sampler", "scheduler" or "rng".
        findings: one a check.
    """

    subject: str
    kind: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every check held."""
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that failed."""
        return tuple(finding for finding in self.findings if not finding.passed)

    @property
    def counterexample(self) -> object | None:
        """The smallest case that fails, of the first check that has one."""
        return next((f.counterexample for f in self.failures if f.counterexample is not None), None)

    @property
    def comparison(self) -> Comparison | None:
        """The laws of the first failure that compares laws."""
        return next((f.comparison for f in self.failures if f.comparison is not None), None)

    @property
    def exact(self) -> Mapping[Outcome, Fraction]:
        """The target's law in the counterexample; empty if no law was found wrong."""
        return self.comparison.exact if self.comparison else {}

    @property
    def observed(self) -> Mapping[Outcome, Fraction]:
        """The law that came out instead."""
        return self.comparison.observed if self.comparison else {}

    @property
    def total_variation(self) -> Fraction:
        """Half the summed difference of the two laws; 0 if no law was found wrong."""
        return self.comparison.total_variation if self.comparison else Fraction(0)

    def assert_lossless(self) -> None:
        """Raise `LosslessnessError` with the report unless every check held."""
        if not self.passed:
            raise LosslessnessError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.kind} {self.subject}: {'lossless' if self.passed else 'NOT LOSSLESS'}"]
        for finding in self.findings:
            lines.append(f"  {'ok  ' if finding.passed else 'FAIL'} {finding.check}: {finding.detail}")
            if finding.counterexample is not None:
                lines += [f"       {line}" for line in str(finding.counterexample).splitlines()]
            if finding.comparison is not None:
                lines += [f"       {line}" for line in _table(finding.comparison)]
        return "\n".join(lines)


def _table(comparison: Comparison) -> list[str]:
    difference = {o: abs(comparison.observed[o] - p) for o, p in comparison.exact.items()}
    shown = sorted(difference, key=lambda o: -difference[o])[:_MOST_OUTCOMES]
    lines = [f"total variation {comparison.total_variation} = {float(comparison.total_variation):.4g}"]
    for outcome in sorted(shown):
        texts = " | ".join(" ".join(map(str, text)) for text in outcome)
        lines.append(f"text {texts}: target {comparison.exact[outcome]}, observed {comparison.observed[outcome]}")
    if len(difference) > len(shown):
        lines.append(f"and {len(difference) - len(shown)} more")
    return lines

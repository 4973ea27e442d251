"""The checks that see faults: each takes a whole library, right or wrong, and a seed, and says what is wrong or nothing.

`dsspark.testing.mutants` runs them on planted faults. The seed varies the laws, so that no kill hangs on one lucky choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsspark
from dsspark.cost_table import CostTable
from dsspark.randomness import Uniforms
from dsspark.testing import oracles
from dsspark.testing.adapters import scheduler_maker
from dsspark.testing.bisection import law_error
from dsspark.testing.boundary import edge_failures
from dsspark.testing.enumeration import compare, exact_law, is_exact
from dsspark.testing.grid import GridLaw, lattice
from dsspark.testing.rng_audit import audit_rng
from dsspark.testing.rounds import Noise, Scheduler, Stages, SurvivalFn, fresh_noise, grid_round, law_survival
from dsspark.testing.sampler_audit import FixedLengths, threshold_rows
from dsspark.testing.scheduling import anticipates
from dsspark.types import DraftBlock, Filters, STSFit, Verification

_MAX_ULPS = 64.0
_MAX_EPS = 32.0


@dataclass(frozen=True, kw_only=True)
class Library:
    """Everything a decoding engine is made of; a mutant replaces one part.

    Attributes:
        draft_block, verify, admit, fit_sts, expected_calibration_error: as in `dsspark`.
        from_seeds: as `dsspark.Uniforms.from_seeds`.
        scheduler: makes a scheduler from a cost table and gamma.
        noise: which of the rounds' uniforms a round uses.
        survival: what the scheduler is shown.
        dtype: of the logits of the oracle check; kernels take no float64.
        brief: whether the checks of laws keep to their smallest lattices: for interpreted kernels, where a row costs milliseconds.
    """

    draft_block: Callable[..., DraftBlock] = dsspark.draft_block
    verify: Callable[..., Verification] = dsspark.verify
    admit: Callable[[Tensor, int], Tensor] = dsspark.admit
    fit_sts: Callable[..., STSFit] = dsspark.fit_sts
    expected_calibration_error: Callable[..., Tensor] = dsspark.expected_calibration_error
    from_seeds: Callable[[list[int], list[int], int], Uniforms] = Uniforms.from_seeds
    scheduler: Callable[[CostTable, int], Scheduler] = scheduler_maker(dsspark.schedule)[0]
    noise: Noise = fresh_noise
    survival: SurvivalFn = law_survival
    dtype: torch.dtype = torch.float64
    brief: bool = False

    @classmethod
    def on(cls, backend: str, **changes: Any) -> Library:
        """Return the library whose every part runs on one backend."""
        names = ("draft_block", "verify", "admit", "fit_sts", "expected_calibration_error")
        parts: dict[str, Any] = {name: partial(getattr(dsspark, name), backend=backend) for name in names}
        parts["scheduler"] = scheduler_maker(partial(dsspark.schedule, backend=backend))[0]
        return cls(**{**parts, **changes})

    def stages(self, **changes: Any) -> Stages:
        """Return the stages of a round made of this library."""
        parts: dict[str, Any] = {
            "draft": self.draft_block,
            "verify": self.verify,
            "noise": self.noise,
            "survival": self.survival,
        }
        return Stages(**{**parts, **changes})


Check = Callable[[Library, int], "str | None"]


def _shuffled(rows: Sequence[Sequence[int]], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return a table [previous][token] with the tokens renamed."""
    return tuple(tuple(rows[a][b] for b in order) for a in order)


def _deviation(law: GridLaw, stages: Stages, anchors: Sequence[int], rounds: int = 1) -> str | None:
    points = lattice(law, cell=stages.cell, num_requests=len(anchors), rounds=rounds)
    counts = exact_law(grid_round(law, stages, anchors), points)
    if is_exact(counts, law, anchors):
        return None
    return str(compare(counts.counts, counts.total, law, anchors))


def _first(complaints: Any) -> str | None:
    return next((complaint for complaint in complaints if complaint is not None), None)


def law_check(library: Library, seed: int) -> str | None:
    """Integer counts of single requests: several cells, temperatures, draft vocabularies, laws that depend on the last token."""
    order = random.Random(seed).sample(range(3), 3)
    three = GridLaw(
        target=_shuffled(((2, 1, 1), (1, 1, 2), (0, 2, 2)), order),
        draft=_shuffled(((1, 1, 2), (2, 1, 1), (1, 1, 2)), order),
    )
    two = GridLaw(target=((3, 1), (1, 3)), draft=((1, 1), (1, 1)), block_size=2)
    narrow = GridLaw(target=((1, 1, 2), (2, 1, 1), (1, 2, 1)), draft=((1, 1), (1, 1), (1, 1)))
    cases = [
        (three, library.stages(cell=2)),
        (three, library.stages(cell=1, temperature=0.5, draft_temperature=2.0)),
        (two, library.stages(cell=2)),
        (two, library.stages(cell=2, draft_temperature=2.0)),
        (narrow, library.stages(cell=2)),
    ]
    if library.brief:
        cases = [
            (three, library.stages(cell=1, temperature=0.5, draft_temperature=2.0)),
            (two, library.stages(cell=2)),
            (narrow, library.stages(cell=1)),
        ]
    anchor = seed % 2
    return _first(_deviation(law, stages, (anchor,)) for law, stages in cases)


def filtered_law_check(library: Library, seed: int) -> str | None:
    """Integer counts under top-k = 2 where the second and the third token tie."""
    rows = random.Random(seed).sample([(2, 1, 0), (3, 1, 0), (1, 1, 0)], 3)
    law = GridLaw(target=tuple(rows), draft=((1, 1, 2), (2, 1, 1), (1, 2, 1)))

    def verify(target_logits: Tensor, *args: Any, **kwargs: Any) -> Verification:
        least = torch.where(target_logits == -torch.inf, torch.inf, target_logits).amin(dim=1, keepdim=True)
        unfiltered = torch.where(target_logits == -torch.inf, least, target_logits)
        return library.verify(unfiltered, *args, filters=Filters(top_k=2), **kwargs)

    return _deviation(law, library.stages(cell=1 if library.brief else 2, verify=verify), (seed % 3,))


def bisected_law_check(library: Library, seed: int) -> str | None:
    """Thresholds and breakpoints on rows of 37 tokens with probabilities down to 1e-9."""
    target, draft, bonus = threshold_rows(seed, 12 if library.brief else 37)
    error = law_error(target, draft, bonus, cell=8, draft_fn=library.draft_block, verify_fn=library.verify)
    if error.final_varies or error.max_threshold_ulps > _MAX_ULPS or error.in_eps > _MAX_EPS:
        return str(error)
    return None


def joint_law_check(library: Library, seed: int) -> str | None:
    """Integer counts of two requests, ragged, with the scheduler inside, and of several rounds."""
    chooser = random.Random(seed)
    heads, tails = chooser.choice([(3, 1), (1, 3)])
    chain = GridLaw(target=((heads, tails), (tails, heads)), draft=((1, 1), (1, 1)), block_size=2)
    biased = GridLaw(target=((1, 1), (1, 1)), draft=((3, 1), (1, 3)))
    # The second draft pays after one token only: whoever looks at it before admitting the first leaks (paper Appendix A).
    good = chooser.randrange(2)
    tempting = tuple(0.9 if v == good else 0.0 for v in range(2))
    certain = tuple(1.0 if v == good else 0.0 for v in range(2))
    skewed = GridLaw(target=((1, 3), (1, 3)), draft=((3, 1), (3, 1)), block_size=1, confidence=((0.75, 0.75),))
    appendix_a = GridLaw.independent((heads, tails), (1, 1), 2, ((0.8, 0.8), tempting))
    tied = GridLaw.independent((heads, tails), (1, 1), 2, ((1.0, 1.0), certain))
    anchors = (0, 1) if seed % 2 else (1, 0)
    scheduled = [
        (appendix_a, (0,), (1.0, 0.5, 0.45)),
        (tied, anchors, (1.0, 1.0, 0.95, 0.4, 0.3, 0.2)),
        (skewed, (0,), (1.0, 0.6)),
    ]

    def with_scheduler(law: GridLaw, sps: Sequence[float]) -> Stages:
        return library.stages(cell=2, scheduler=lambda: library.scheduler(CostTable([1.0, *sps]), law.block_size))

    if library.brief:
        once = GridLaw(target=chain.target, draft=chain.draft)
        certainly = GridLaw(target=((1, 1), (1, 1)), draft=((1, 0), (0, 1)))
        brief = [
            *(_deviation(law, library.stages(cell=2), anchors) for law in (certainly, once)),
            _deviation(once, library.stages(cell=2), (seed % 2,), rounds=2),
        ]
        even = GridLaw.independent((1, 1), (1, 1), 2, ((1.0, 1.0), certain))
        scheduled[1] = (even, *scheduled[1][1:])
        return _first([*brief, *(_deviation(law, with_scheduler(law, sps), who) for law, who, sps in scheduled)])
    complaints = [
        _deviation(biased, library.stages(cell=2), anchors),
        _deviation(chain, library.stages(cell=2), anchors),
        _deviation(chain, library.stages(cell=2, scheduler=lambda: FixedLengths((seed % 3, 2))), anchors),
        _deviation(chain, library.stages(cell=2), (seed % 2,), rounds=2),
    ]
    return _first([*complaints, *(_deviation(law, with_scheduler(law, sps), who) for law, who, sps in scheduled)])


def causality_check(library: Library, seed: int) -> str | None:
    """Lengths do not change with survivals behind the first draft left out, in all requests at once."""
    chooser = random.Random(seed)
    rows = [[1.0, 1.0], [1.0, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.25], [0.25, 0.0]]
    tables: list[tuple[float, ...]] = [(1.0, 0.5, 0.45, 0.4, 0.3, 0.2), (1.0, 1.0, 0.8, 0.4, 0.3, 0.2), (1.0,) * 6]
    tables.append(tuple(chooser.randint(1, 20) / 20 for _ in range(6)))
    for sps in tables:
        for first in rows:
            for second in (None, *rows):
                survival = torch.tensor([first] if second is None else [first, second])

                def lengths(a: Tensor, sps: Sequence[float] = sps) -> Tensor:
                    return library.scheduler(CostTable([1.0, *sps]), 2).step(a, list(range(len(a))))

                for other in (torch.ones_like(survival), torch.zeros_like(survival)):
                    replaced = anticipates(lengths, survival, other)
                    if replaced is not None:
                        return (
                            f"SPS {list(sps)}: lengths for {survival.tolist()} are {lengths(survival).tolist()}, "
                            f"for {replaced.tolist()} {lengths(replaced).tolist()}"
                        )
    return None


def boundary_check(library: Library, seed: int) -> str | None:
    """Draws at the edges."""
    return _first(edge_failures(library.verify, cell=(2, 3, 4, 1, 8)[seed % 5]))


def budget_check(library: Library, seed: int) -> str | None:
    """`admit` takes exactly min(K, candidates), ties or not."""
    generator = torch.Generator().manual_seed(seed)
    for size in (1, 2, 4):
        factors = torch.randint(0, 4, (3, size), generator=generator) / 3
        survival = torch.cat((torch.ones(1, size), factors.cumprod(dim=1)))
        candidates = int((survival > 0).sum())
        for budget in range(4 * size + 2):
            taken = int(library.admit(survival, budget).sum())
            if taken != min(budget, candidates):
                return f"admit({survival.tolist()}, {budget}) took {taken} of {candidates} candidates"
    return None


def rng_check(library: Library, seed: int) -> str | None:
    """No number is used twice, and a request's numbers depend on nothing but its seed and round."""

    def shifted(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
        return library.from_seeds([s ^ (seed << 20) for s in seeds], rounds, block_size)

    report = audit_rng(shifted, num_rounds=6, block_size=3)
    return None if report.passed else f"{report.failures[0].check}: {report.failures[0].detail}"


def oracle_check(library: Library, seed: int) -> str | None:
    """Drafted rows equal equations 4 to 6 written out by hand, for every kind of head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base, hidden = (torch.randn(3, 5, n, dtype=torch.float64).to(library.dtype) for n in (11, 4))
        anchors = torch.tensor([1, 7, 10])
        uniforms = Uniforms.draw(3, 5)
        heads = [
            dsspark.MarkovHead(11, 3, kind, hidden_size=4).to(library.dtype) for kind in ("vanilla", "gated", "rnn")
        ]
    tolerance = 1e-9 if library.dtype == torch.float64 else 1e-5
    for head in heads:
        block = library.draft_block(base, anchors, head, uniforms, hidden=hidden, cell=4)
        logits = oracles.markov_logits(base, anchors, block.tokens, head, hidden)
        assert block.logits is not None
        if not torch.allclose(block.logits, logits, rtol=tolerance, atol=tolerance):
            return f"{head.kind} head: logits are off by {float((block.logits - logits).abs().max()):.3g}"
    return None


def calibration_check(library: Library, seed: int) -> str | None:
    """STS minimises the ECE of the *prefix* survival, and the ECE counts every probability, 0 and 1 included."""
    ece = library.expected_calibration_error
    certain = float(ece(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([1, 1, 0, 0])))
    if abs(certain - 1) > 1e-6:
        return f"the ECE of four certain and wrong predictions is {certain} instead of 1"
    grid = [0.5, 1.0, 2.0, 4.0]
    for sample in range(3):
        logits, accepted = oracles.overconfident_samples(3 * seed + sample, 400, 3)
        fitted = library.fit_sts(logits, accepted, num_bins=10, grid=grid).temperatures.tolist()
        for k, (achieved, least) in enumerate(oracles.sts_by_brute_force(logits, accepted, 10, grid, fitted)):
            if achieved > least + 1e-6:
                return f"position {k + 1}: ECE {achieved:.4f} at T = {fitted[k]}, but {least:.4f} is possible"
    return None


CHECKS: dict[str, Check] = {
    "law": law_check,
    "law under filters": filtered_law_check,
    "law by bisection": bisected_law_check,
    "joint law": joint_law_check,
    "causality": causality_check,
    "boundary draw": boundary_check,
    "budget": budget_check,
    "RNG account": rng_check,
    "oracle equality": oracle_check,
    "calibration": calibration_check,
}

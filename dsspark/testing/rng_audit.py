"""Audit a source of uniforms: no number may be used twice, and a request's numbers may depend on nothing but itself.

A slot is one number of a round: (round, stream, position, component). Two slots that carry the same noise agree for every seed; two
honest ones agree with probability 2**-24 a seed. Agreement for two seeds of a few dozen is therefore a leak, not chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsspark.randomness import Uniforms
from dsspark.testing.gtest import g_test
from dsspark.testing.report import AuditReport, Finding
from dsspark.testing.search import name_of

FromSeeds = Callable[[list[int], list[int], int], Uniforms]
Counters = Callable[[list[int], list[int], int], Mapping[str, Tensor]]

_SEEDS = [*range(24), 2**31, 2**32, 2**32 + 1, 2**63 - 1, -1, -2, 10**9 + 7, 123456789]
_TWICE = 2
_CORRELATION_SEEDS = 4096
_DEVIATIONS = 7.0
"""Standard deviations at which a correlation counts: once in 4e11 pairs by chance."""
_FALSE_ALARM = 1e-9


@dataclass(frozen=True, kw_only=True)
class NoiseCase:
    """Two numbers that must differ and do not."""

    first: str
    second: str
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.first} = {self.second} for seeds {list(self.seeds)}"


def audit_rng(
    from_seeds: FromSeeds,
    *,
    counters: Counters | None = None,
    num_rounds: int = 24,
    block_size: int = 4,
    name: str | None = None,
) -> AuditReport:
    """Audit a callable `f(seeds, rounds, block_size) -> Uniforms`, such as `dsspark.Uniforms.from_seeds`.

    `rounds` is whatever the engine keys its noise by; pass an adapter that hands over token positions, say, and the audit tells why
    that is a leak: a position is drafted again in a later round.

    Checks: shapes and range; the same arguments give the same numbers; a request's numbers do not depend on its neighbours
    or its row; no number appears in two places (streams draft, accept, final; positions; rounds) or under two seeds; streams
    are not correlated; the numbers are uniform; and, where `counters` tells them, no counter is used twice.

    Args:
        from_seeds: the source.
        counters: optional, `g(seeds, rounds, block_size)` -> stream name -> integer counters [R, n, words] (key words included) of
            every random word the round draws.
        num_rounds: rounds looked at.
        block_size: gamma.
        name: of the subject in the report.

    Raises:
        TypeError: if `from_seeds` is not callable.
        ValueError: if it returns anything but `Uniforms` of the right shapes.
    """
    if not callable(from_seeds):
        raise TypeError(
            f"from_seeds: got {type(from_seeds).__name__}, expected a callable (seeds, rounds, block_size) -> Uniforms"
        )

    def draw(seeds: list[int], rounds: list[int]) -> Uniforms:
        return check_uniforms(from_seeds(seeds, rounds, block_size), len(seeds), block_size)

    seeds, names = _SEEDS, _slot_names(num_rounds, block_size)
    table = torch.cat([_flat(draw(seeds, [t] * len(seeds))) for t in range(num_rounds)], dim=1)
    findings = [
        _range_finding(table),
        _purity_finding(draw),
        _collision_finding(table, names),
        _seed_finding(table),
        _correlation_finding(draw, block_size),
        _uniformity_finding(table),
    ]
    if counters is not None:
        findings.append(_counter_finding(counters, seeds, num_rounds, block_size))
    return AuditReport(subject=name or name_of(from_seeds), kind="rng", findings=tuple(findings))


def check_uniforms(result: object, num_requests: int, block_size: int) -> Uniforms:
    """Return `result` if it is the `Uniforms` of R requests, or raise `ValueError` that says what was expected."""
    wanted = f"expected the Uniforms of R = {num_requests} requests, gamma = {block_size}: draft [R, gamma, 2], accept [R, gamma]"
    if not isinstance(result, Uniforms):
        raise ValueError(f"from_seeds: returned {type(result).__name__}, {wanted}")
    if tuple(result.accept.shape) != (num_requests, block_size):
        raise ValueError(f"from_seeds: returned accept {list(result.accept.shape)}, {wanted}")
    return result


def _flat(uniforms: Uniforms) -> Tensor:
    """Return all numbers of a round, [R, slots]: draft by position and component, accept by position, final."""
    return torch.cat((uniforms.draft.flatten(1), uniforms.accept, uniforms.final), dim=1)


def _slot_names(num_rounds: int, block_size: int) -> list[str]:
    one = [f"draft[{k}, {c}]" for k in range(block_size) for c in range(2)]
    one += [f"accept[{k}]" for k in range(block_size)] + [f"final[{c}]" for c in range(2)]
    return [f"{slot} of round {t}" for t in range(num_rounds) for slot in one]


def _range_finding(table: Tensor) -> Finding:
    bad = ~((table >= 0) & (table < 1))
    detail = "all in [0, 1)" if not bad.any() else f"got {table[bad][0].item()}, expected numbers in [0, 1)"
    return Finding(check="range", passed=not bool(bad.any()), detail=detail)


def _purity_finding(draw: Callable[[list[int], list[int]], Uniforms]) -> Finding:
    """A request's numbers are a function of its seed and round: the same again, alone, reordered, among others."""
    seeds, rounds = [3, 1, 4, 15, 9], [0, 5, 2, 2, 7]
    together = _flat(draw(seeds, rounds))
    again = _flat(draw(seeds, rounds))
    order = [4, 2, 0, 3, 1]
    reordered = _flat(draw([seeds[i] for i in order], [rounds[i] for i in order]))
    alone = torch.cat([_flat(draw([s], [t])) for s, t in zip(seeds, rounds, strict=True)])
    neighbours = _flat(draw([s + 50 for s in seeds[:3]] + seeds[3:], [9, 9, 9, *rounds[3:]]))
    complaints = [
        text
        for text, same in (
            ("the same call gave other numbers", torch.equal(together, again)),
            ("a request draws other numbers alone than in a batch", torch.equal(together, alone)),
            ("a request draws other numbers in another row", torch.equal(together[order], reordered)),
            ("a request's numbers change with its neighbours", torch.equal(together[3:], neighbours[3:])),
        )
        if not same
    ]
    detail = complaints[0] if complaints else "a function of seed and round alone"
    return Finding(check="independence of the batch", passed=not complaints, detail=detail)


def _collision_finding(table: Tensor, names: list[str]) -> Finding:
    """No two slots agree for two seeds."""
    agreeing: dict[tuple[int, int], list[int]] = {}
    for row, values in enumerate(table):
        ordered, index = values.sort(stable=True)
        for i in (ordered[1:] == ordered[:-1]).nonzero()[:, 0].tolist():
            pair = (int(index[i]), int(index[i + 1]))
            agreeing.setdefault(pair, []).append(row)
    shared = {pair: rows for pair, rows in agreeing.items() if len(rows) >= _TWICE}
    if not shared:
        detail = f"{table.shape[1]} numbers a seed, none used twice"
        return Finding(check="noise used twice", passed=True, detail=detail)
    (a, b), rows = min(shared.items(), key=lambda item: (max(item[0]), item[0]))
    case = NoiseCase(first=names[a], second=names[b], seeds=tuple(_SEEDS[row] for row in rows[:4]))
    return Finding(check="noise used twice", passed=False, detail=f"{len(shared)} pairs agree", counterexample=case)


def _seed_finding(table: Tensor) -> Finding:
    """No two seeds share two numbers of the same slot."""
    same = (table[:, None] == table[None]).sum(dim=2)
    same.fill_diagonal_(0)
    worst = int(same.max())
    if worst < _TWICE:
        return Finding(check="streams of different seeds", passed=True, detail="no two seeds share their noise")
    a, b = divmod(int(same.argmax()), len(table))
    detail = f"seeds {_SEEDS[a]} and {_SEEDS[b]} share {worst} of {table.shape[1]} numbers"
    return Finding(
        check="streams of different seeds", passed=False, detail=detail, counterexample=(_SEEDS[a], _SEEDS[b])
    )


def _correlation_finding(draw: Callable[[list[int], list[int]], Uniforms], block_size: int) -> Finding:
    """Numbers of neighbouring rounds are uncorrelated over consecutive seeds: neither shifted nor mirrored copies."""
    seeds = list(range(_CORRELATION_SEEDS))
    table = torch.cat([_flat(draw(seeds, [t] * len(seeds))) for t in range(2)], dim=1).to(torch.float64)
    correlation = torch.corrcoef(table.T).nan_to_num(1.0)
    correlation.fill_diagonal_(0)
    worst = float(correlation.abs().max()) * _CORRELATION_SEEDS**0.5
    names = _slot_names(2, block_size)
    a, b = divmod(int(correlation.abs().argmax()), len(names))
    detail = f"largest correlation {worst:.1f} standard deviations, of {names[a]} with {names[b]}"
    return Finding(check="correlation", passed=worst < _DEVIATIONS, detail=detail)


def _uniformity_finding(table: Tensor) -> Finding:
    """All numbers together fill 64 bins evenly."""
    bins = 64
    index = (table.flatten().to(torch.float64) * bins).to(torch.int64).clamp(0, bins - 1)
    test = g_test(torch.bincount(index, minlength=bins), torch.full((bins,), 1 / bins), false_alarm=_FALSE_ALARM)
    detail = f"p-value {test.p_value:.2g}, false-alarm rate {_FALSE_ALARM}"
    return Finding(check="uniformity", passed=test.passed, detail=detail)


def _counter_finding(counters: Counters, seeds: list[int], num_rounds: int, block_size: int) -> Finding:
    """No counter (with its key) occurs twice, over streams, positions, rounds and seeds."""
    where: dict[tuple[int, ...], str] = {}
    for t in range(num_rounds):
        for stream, words in counters(seeds, [t] * len(seeds), block_size).items():
            if (
                not isinstance(words, Tensor)
                or words.dim() != 3
                or len(words) != len(seeds)
                or words.is_floating_point()
            ):
                raise ValueError(
                    f"counters: returned {stream!r}: {words!r}, expected integers [{len(seeds)}, n, words]"
                )
            for seed, row in zip(seeds, words.tolist(), strict=True):
                for k, counter in enumerate(row):
                    here = f"{stream}[{k}] of seed {seed}, round {t}"
                    before = where.setdefault(tuple(counter), here)
                    if before != here:
                        case = NoiseCase(first=before, second=here, seeds=(seed,))
                        detail = f"counter {counter} is used twice"
                        return Finding(check="counters", passed=False, detail=detail, counterexample=case)
    return Finding(check="counters", passed=True, detail=f"{len(where)} counters, none used twice")

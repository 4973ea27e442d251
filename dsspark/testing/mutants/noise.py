"""Faults of randomness: shared, repeated, frozen noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsspark.randomness import Uniforms
from dsspark.testing.mutants.mutant import Mutant


def _changed(uniforms: Uniforms, **parts: Tensor) -> Uniforms:
    whole = {"draft": uniforms.draft, "accept": uniforms.accept, "final": uniforms.final}
    return Uniforms(**{**whole, **parts})


def accept_zero(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Test acceptance with u = 0."""
    return _changed(rounds[-1], accept=torch.zeros_like(rounds[-1].accept))


def accept_is_draft(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Test acceptance with the number that drew the token."""
    return _changed(rounds[-1], accept=rounds[-1].draft[..., 1])


def final_is_draft(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Draw the correction with the noise that drew the first draft."""
    return _changed(rounds[-1], final=rounds[-1].draft[:, 0])


def final_is_accept(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Draw the correction with the number that rejected the first draft."""
    return _changed(rounds[-1], final=torch.stack((rounds[-1].final[:, 0], rounds[-1].accept[:, 0]), dim=1))


def frozen(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Use the first round's numbers for ever."""
    return rounds[0]


def one_stream(rounds: Sequence[Uniforms], positions: Sequence[Tensor]) -> Uniforms:
    """Give every request the numbers of the first."""
    num_requests = positions[-1].shape[1]
    first = torch.arange(len(rounds[-1].accept)) // num_requests * num_requests
    return Uniforms(draft=rounds[-1].draft[first], accept=rounds[-1].accept[first], final=rounds[-1].final[first])


def keyed_by_position(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
    """Key the noise of a draft by the token's position: a position drafted again draws the same numbers again."""
    each = [Uniforms.from_seeds(seeds, [start + k for start in rounds], 1) for k in range(block_size)]
    return Uniforms(
        draft=torch.cat([u.draft for u in each], dim=1),
        accept=torch.cat([u.accept for u in each], dim=1),
        final=each[0].final,
    )


def keyed_by_row(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
    """Key the noise by the row in the batch."""
    return Uniforms.from_seeds([s ^ row for row, s in enumerate(seeds)], rounds, block_size)


def one_seed(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
    """Forget the request's seed."""
    return Uniforms.from_seeds([0] * len(seeds), rounds, block_size)


def overlapping_streams(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
    """Start the acceptance stream one position into the draft stream."""
    longer = Uniforms.from_seeds(seeds, rounds, block_size + 1)
    honest = Uniforms.from_seeds(seeds, rounds, block_size)
    return _changed(honest, accept=longer.draft[:, 1:, 0])


def same_every_round(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
    """Forget the round, as a captured graph that holds its random offset."""
    return Uniforms.from_seeds(seeds, [0] * len(rounds), block_size)


def mirrored(seeds: list[int], rounds: list[int], block_size: int) -> Uniforms:
    """Test acceptance with one minus the number that drew the token."""
    uniforms = Uniforms.from_seeds(seeds, rounds, block_size)
    return _changed(uniforms, accept=1 - 2.0**-24 - uniforms.draft[..., 1])


NOISE_MUTANTS = (
    Mutant(
        name="u fixed at 0",
        fault="acceptance without a random number: everything of p > 0 is accepted",
        check="law",
        parts={"noise": accept_zero},
    ),
    Mutant(
        name="accept noise = draft noise",
        fault="the acceptance test reuses the number that drew the draft",
        check="law",
        parts={"noise": accept_is_draft},
    ),
    Mutant(
        name="residual noise = draft noise",
        fault="the correction is drawn with the noise that drew the rejected draft",
        check="law",
        parts={"noise": final_is_draft},
    ),
    Mutant(
        name="residual noise = accept noise",
        fault="the correction is drawn with the number that rejected",
        check="law",
        parts={"noise": final_is_accept},
    ),
    Mutant(
        name="noise frozen across rounds",
        fault="a graph replay that repeats its random numbers",
        check="joint law",
        parts={"noise": frozen},
    ),
    Mutant(
        name="one stream for all requests",
        fault="every request of a batch reads the same random numbers: marginals exact, jointly wrong",
        check="joint law",
        parts={"noise": one_stream},
    ),
    Mutant(
        name="noise keyed by position",
        fault="a position drafted again in a later round, after a scheduler has seen its noise",
        check="RNG account",
        parts={"from_seeds": keyed_by_position},
    ),
    Mutant(
        name="noise keyed by the row in the batch",
        fault="a request's draws change with its neighbours",
        check="RNG account",
        parts={"from_seeds": keyed_by_row},
    ),
    Mutant(
        name="seed ignored",
        fault="per-request seeds that never reach the generator",
        check="RNG account",
        parts={"from_seeds": one_seed},
    ),
    Mutant(
        name="accept stream overlaps the draft stream",
        fault="counter ranges of two streams overlap by an offset",
        check="RNG account",
        parts={"from_seeds": overlapping_streams},
    ),
    Mutant(
        name="round number ignored",
        fault="noise keyed by the request alone",
        check="RNG account",
        parts={"from_seeds": same_every_round},
    ),
    Mutant(
        name="accept noise mirrors the draft noise",
        fault="antithetic numbers: no value is used twice, and yet they are one",
        check="RNG account",
        parts={"from_seeds": mirrored},
    ),
)

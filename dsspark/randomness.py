"""Randomness is an argument: the uniforms of a round, and the counter-based generator that draws them per request.

Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3") in plain torch integer arithmetic; the same words
as Triton's `tl.philox`. A request's numbers depend on its seed and its round number only: never on its batch, and never on the
position of a token, which may be drafted again in a later round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsspark._checks import check_block_size, check_device, check_dtype, check_shape

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

STREAM_DRAFT, STREAM_ACCEPT, STREAM_FINAL = 0, 1, 2
"""Third counter word: the three streams of a round never share a counter."""


def _multiply_wide(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of constant * word for 32-bit words held in int64."""
    low_part = constant * (word & 0xFFFF)
    high_part = constant * (word >> 16)
    middle = high_part + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of Philox4x32-10.

    Args:
        counter: four int64 tensors holding 32-bit words, any shapes that broadcast together.
        key: two int64 tensors holding 32-bit words, likewise.

    Returns:
        Four int64 tensors of the broadcast shape, each holding words in [0, 2**32).

    Source: Salmon et al. 2011, Philox4x32 with 10 rounds; equals `tl.philox` bit for bit.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_wide(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_wide(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _to_unit(word: Tensor) -> Tensor:
    """Return a float32 in [0, 1) from the top 24 bits of a 32-bit word."""
    return (word >> 8).to(torch.float32) * 2.0**-24


def _as_words(name: str, values: Tensor | Sequence[int], device: torch.device | str | None) -> Tensor:
    tensor = torch.as_tensor(values, device=device)
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)
    check_dtype(name, tensor, (torch.int64, torch.int32))
    check_shape(name, tensor, ("R",))
    return tensor.to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class Uniforms:
    """The random numbers of one round, float32 in [0, 1).

    Attributes:
        draft: [R, gamma, 2], the cell and the token of each drafted position.
        accept: [R, gamma], the acceptance tests.
        final: [R, 2], the residual or the bonus draw; a round uses exactly one of them.

    Raises:
        ValueError: for shapes that do not belong together or different devices.
        TypeError: for dtypes other than float32 (or float64, for oracles).
    """

    draft: Tensor
    accept: Tensor
    final: Tensor

    def __post_init__(self) -> None:
        check_shape("draft", self.draft, ("R", "gamma", 2))
        num_requests, block_size = self.draft.shape[:2]
        check_block_size("draft: gamma", block_size)
        check_shape("accept", self.accept, (num_requests, block_size))
        check_shape("final", self.final, (num_requests, 2))
        for name in ("draft", "accept", "final"):
            check_dtype(name, getattr(self, name), (torch.float32, torch.float64))
            check_device(name, getattr(self, name), "draft", self.draft)

    @classmethod
    def draw(
        cls,
        num_requests: int,
        block_size: int,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Uniforms:
        """Draw the uniforms of one round for R requests from a torch generator.

        Args:
            num_requests: R, 0 or more.
            block_size: gamma, 1 to 32.
            generator: the torch generator; torch's default one if None.
            device: where the tensors live; the generator must be on the same device.

        Raises:
            ValueError: for a size out of range.
        """
        if num_requests < 0:
            raise ValueError(f"num_requests: got {num_requests}, expected 0 or more")
        check_block_size("block_size", block_size)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)

        return cls(
            draft=uniform(num_requests, block_size, 2),
            accept=uniform(num_requests, block_size),
            final=uniform(num_requests, 2),
        )

    @classmethod
    def from_seeds(
        cls,
        seeds: Tensor | Sequence[int],
        rounds: Tensor | Sequence[int],
        block_size: int,
        device: torch.device | str | None = None,
    ) -> Uniforms:
        """Return the uniforms of a request's round, a pure function of (seed, round).

        Key = the 64 bits of the seed; counter = (round low, round high, stream, position), so streams, rounds and positions
        never share a counter, and a request draws the same numbers whatever batch it is in.

        Args:
            seeds: [R] integers, one a request.
            rounds: [R] integers >= 0: how many rounds the request has run before this one.
            block_size: gamma, 1 to 32. A larger gamma extends the draws and changes none of them.
            device: where the tensors live.

        Raises:
            ValueError: for shapes that differ or a size out of range.
            TypeError: for values that are no integers.
        """
        check_block_size("block_size", block_size)
        seed = _as_words("seeds", seeds, device)
        round_ = _as_words("rounds", rounds, device)
        check_shape("rounds", round_, (seed.shape[0],))
        check_device("rounds", round_, "seeds", seed)
        # All counters of a round in one go: on a processor the words cost their number of operations, not their size.
        streams = [STREAM_DRAFT] * block_size + [STREAM_ACCEPT] * block_size + [STREAM_FINAL]
        stream = torch.tensor(streams, device=seed.device)[None, :]
        position = torch.tensor([*range(block_size), *range(block_size), 0], device=seed.device)[None, :]
        key = (seed[:, None] & _MASK, (seed[:, None] >> 32) & _MASK)
        low, high = round_[:, None] & _MASK, (round_[:, None] >> 32) & _MASK
        first, second, _, _ = philox4x32((low, high, stream, position), key)
        pairs = torch.stack((_to_unit(first), _to_unit(second)), dim=-1)
        return cls(
            draft=pairs[:, :block_size].contiguous(),
            accept=pairs[:, block_size:-1, 0].contiguous(),
            final=pairs[:, -1].contiguous(),
        )

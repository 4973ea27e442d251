"""What arrives: requests with a domain, a prompt, an output length and, in an open system, a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in the order in which they arrive.

    Attributes:
        arrival: [M] float64, seconds, non-decreasing; None for a closed loop, in which every user asks again at once.
        domain: [M] int64, index into the pool's domains.
        prompt: [M] int64, cached tokens when decoding begins; prefill runs elsewhere.
        output: [M] int64, tokens to emit, 1 or more.
        start, stride: [M] int64, where a request's rounds stand in the pool.
    """

    arrival: NDArray[np.float64] | None
    domain: NDArray[np.int64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    start: NDArray[np.int64]
    stride: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.output)


def draw_workload(
    num_requests: int,
    *,
    domains: Sequence[str],
    mix: Mapping[str, float],
    prompt_tokens: float,
    output_tokens: float,
    output_spread: str = "exponential",
    rate: float | None = None,
    seed: int = 0,
) -> Workload:
    """Draw requests.

    Args:
        num_requests: M.
        domains: names, in the order of the pool.
        mix: share of each domain; shares of domains that the pool lacks are an error.
        prompt_tokens: mean prompt, drawn exponentially.
        output_tokens: mean output.
        output_spread: "exponential" or "fixed".
        rate: requests a second of a Poisson process; None for a closed loop.
        seed: of everything, whatever the policy.

    Raises:
        ValueError: for numbers that are no workload.
    """
    if num_requests < 1 or output_tokens < 1 or prompt_tokens < 0:
        raise ValueError(
            f"requests, output and prompt tokens: got {num_requests}, {output_tokens}, {prompt_tokens}, expected 1 or more of the "
            "first two and 0 or more of the last"
        )
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(
            f"--rate: got {rate}, expected a positive number of requests a second; leave it out for a closed loop"
        )
    unknown = sorted(set(mix) - set(domains))
    shares = np.asarray([mix.get(name, 0.0) for name in domains])
    if unknown or not (shares >= 0).all() or not 0 < shares.sum() < float("inf"):
        raise ValueError(
            f"--mix: got {dict(mix)}, expected shares of {', '.join(domains)} that are 0 or more and not all 0"
        )
    if output_spread not in ("exponential", "fixed"):
        raise ValueError(f"--output-spread: got {output_spread!r}, expected 'exponential' or 'fixed'")
    rng = np.random.Generator(np.random.PCG64([seed, 20260707]))
    domain = rng.choice(len(shares), size=num_requests, p=shares / shares.sum())
    prompt = np.floor(rng.exponential(1.0, num_requests) * prompt_tokens + 0.5)
    spread = rng.exponential(1.0, num_requests)
    output = np.maximum(1, np.floor(spread * output_tokens + 0.5)) if output_spread == "exponential" else None
    gaps = rng.exponential(1.0, num_requests)
    start, stride = rng.integers(0, 1 << 40, num_requests), rng.integers(0, 1 << 20, num_requests) * 2 + 1
    return Workload(
        arrival=None if rate is None else np.cumsum(gaps / rate),
        domain=domain.astype(np.int64),
        prompt=prompt.astype(np.int64),
        output=np.full(num_requests, round(output_tokens)) if output is None else output.astype(np.int64),
        start=start.astype(np.int64),
        stride=stride.astype(np.int64),
    )

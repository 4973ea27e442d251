r"""Counts of rounds by prompt, and what is estimated from them with bootstrap intervals over prompts.

Rounds of one prompt share a text and are not independent, so what is drawn again is prompts. An estimate is a ratio of sums over
prompts, $\sum_i w_i n_i / \sum_i w_i d_i$, with w_i how often prompt i was drawn: all bootstrap samples are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsspark.training.evaluate import RoundRecord

Counts = NDArray[np.int64]
Values = NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 1000


def weights(num_prompts: int, resamples: int = RESAMPLES, seed: int = 0) -> Values:
    """Return how often each bootstrap sample draws each prompt, [resamples + 1, P]; the first row is the sample itself, all ones."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=resamples)
    return np.concatenate((np.ones((1, num_prompts)), drawn)).astype(np.float64)


def summarise(values: Values, *, pivotal: bool = False) -> dict[str, Any]:
    """Return {"value", "low", "high"} of bootstrap estimates [resamples + 1, ...], the first of which is the estimate itself.

    Each is a float, or a list by position; an estimate that no sample has (0 / 0) is None.

    Args:
        values: the estimates.
        pivotal: mirror the interval about the estimate, for one that noise only makes larger, such as an ECE: it is larger in the
            bootstrap samples than in the sample by about as much as it is larger there than in truth. Not below 0. The corrected
            interval may lie below the estimate.
    """
    low, high = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
    with np.errstate(invalid="ignore"):
        seen = np.where(np.isfinite(values).any(axis=0), values, 0.0)
        bounds = np.nanquantile(seen, (low, high), axis=0)
        bounds = np.where(np.isfinite(values).any(axis=0), bounds, np.nan)
    if pivotal:
        bounds = np.maximum(2 * values[0] - bounds[::-1], 0.0)
    return {"value": as_json(values[0]), "low": as_json(bounds[0]), "high": as_json(bounds[1])}


def as_json(values: Any) -> Any:
    """Return floats rounded to 5 digits as JSON holds them, NaN as None."""
    listed = np.round(np.asarray(values, dtype=np.float64), 5).tolist()

    def clean(item: Any) -> Any:
        if isinstance(item, list):
            return [clean(part) for part in item]
        return None if item != item else item

    return clean(listed)


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """What the rounds of each of P prompts did.

    Attributes:
        rounds: [P].
        verified: [P, gamma], rounds that verified position k.
        reached: [P, gamma], of those, rounds that had accepted every earlier position.
        accepted: [P, gamma], rounds that accepted positions 1..k.
    """

    rounds: Counts
    verified: Counts
    reached: Counts
    accepted: Counts

    @classmethod
    def of(cls, record: RoundRecord, num_prompts: int) -> PromptCounts:
        """Count a record of `num_prompts` prompts."""
        prompt, accepted = record.prompt_ids.numpy(), record.accepted.numpy()
        position = np.arange(accepted.shape[1])
        verified = position < record.lengths.numpy()[:, None]
        reached = verified & (position <= accepted.sum(axis=1, keepdims=True))

        def by_prompt(events: NDArray[np.bool_]) -> Counts:
            totals = np.zeros((num_prompts, *events.shape[1:]), dtype=np.int64)
            np.add.at(totals, prompt, events)
            return totals

        return cls(
            rounds=by_prompt(np.ones(len(prompt), dtype=np.bool_)),
            verified=by_prompt(verified),
            reached=by_prompt(reached),
            accepted=by_prompt(accepted),
        )

    @classmethod
    def joined(cls, parts: Sequence[PromptCounts]) -> PromptCounts:
        """Return the counts of all prompts of several records, such as those of several seeds."""
        names = ("rounds", "verified", "reached", "accepted")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> PromptCounts:
        """Read what `as_dict` wrote."""
        return cls(**{name: np.asarray(values, dtype=np.int64) for name, values in content.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON holds them."""
        return {name: getattr(self, name).tolist() for name in ("rounds", "verified", "reached", "accepted")}

    def first(self, count: int) -> PromptCounts:
        """Return the counts of the first `count` prompts."""
        return PromptCounts(
            rounds=self.rounds[:count],
            verified=self.verified[:count],
            reached=self.reached[:count],
            accepted=self.accepted[:count],
        )

    def tokens_per_round(self, drawn: Values) -> Values:
        """Return the accepted length, correction or bonus included, of each bootstrap sample [B, P]: [B]."""
        return np.asarray(1 + (drawn @ self.accepted.sum(axis=1)) / (drawn @ self.rounds))

    def conditional(self, drawn: Values) -> Values:
        """Return P(x_k accepted | x_1..x_{k-1} accepted, x_k verified) of each bootstrap sample, [B, gamma]."""
        with np.errstate(invalid="ignore"):
            return np.asarray((drawn @ self.accepted) / (drawn @ self.reached))

    def acceptance_rate(self, drawn: Values) -> Values:
        """Return the share of the verified drafts that were accepted, of each bootstrap sample, [B]; NaN if none was verified."""
        with np.errstate(invalid="ignore"):
            return np.asarray((drawn @ self.accepted.sum(axis=1)) / (drawn @ self.verified.sum(axis=1)))

    def summary(self, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Return the estimates with their intervals, and how many rounds and prompts they are from."""
        drawn = weights(len(self.rounds), resamples)
        return {
            "tokens_per_round": summarise(self.tokens_per_round(drawn)),
            "conditional_acceptance": summarise(self.conditional(drawn)),
            "acceptance_rate": summarise(self.acceptance_rate(drawn)),
            "rounds": int(self.rounds.sum()),
            "prompts": len(self.rounds),
        }

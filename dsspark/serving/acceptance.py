r"""What a simulated round drafts: pools of rounds, from a stated parametric model or from measured traces.

The parametric model: a draft's conditional confidence is $c_k = \sigma(z_k)$ with
$z_k = \mu + \sigma (\sqrt{\rho}\, e + \sqrt{1 - \rho}\, e_k)$, e standard normal, one for the round and one for the position, and the
draft is accepted with probability exactly c_k: the confidence is calibrated, as the paper's is to about 1 % after STS. A domain's
mu and sigma follow from two facts of the paper, its accepted length and the AUC of the confidence.

A pool is drawn once. Round t of request i reads the pool at (start_i + t step_i) mod P, so it depends on neither policy nor batch:
policies are compared with common random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsspark.serving import assumptions

POOL_SIZE = 1 << 16
"""Rounds drawn a domain; the accepted length of a pool is off by about 0.01 tokens."""
_FIT_SIZE, _FIT_STEPS = 4096, 22


@dataclass(frozen=True, kw_only=True)
class RoundPool:
    """Rounds that verified whole blocks.

    Attributes:
        domains: names, D of them.
        survival: [D, P, gamma] float32, non-increasing along gamma, in [0, 1].
        accepted: [D, P] int64, leading drafts accepted, 0..gamma.
        origin: where it comes from.

    Raises:
        ValueError: for shapes that do not belong together, or values out of range.
    """

    domains: Sequence[str]
    survival: NDArray[np.float32]
    accepted: NDArray[np.int64]
    origin: str

    def __post_init__(self) -> None:
        shape, block_size = self.survival.shape, self.survival.shape[-1]
        if len(shape) != 3 or self.accepted.shape != shape[:2] or len(self.domains) != shape[0] or 0 in shape:
            raise ValueError(
                f"rounds: got survival {list(shape)}, accepted {list(self.accepted.shape)} and {len(self.domains)} domains, "
                "expected [D, P, gamma], [D, P] and D, all at least 1"
            )
        in_range = bool(((self.survival >= 0) & (self.survival <= 1)).all()) and bool(
            ((self.accepted >= 0) & (self.accepted <= block_size)).all()
        )
        if not in_range or bool((np.diff(self.survival, axis=2) > 0).any()):
            raise ValueError(
                f"rounds ({self.origin}): got values out of range, expected survivals in [0, 1] that never rise along a round and "
                f"accepted in 0..{block_size}"
            )

    @property
    def block_size(self) -> int:
        """Drafts a round."""
        return int(self.survival.shape[2])

    def first(self, block_size: int) -> RoundPool:
        """Return the same rounds with the first `block_size` drafts only.

        Raises:
            ValueError: if the rounds are shorter.
        """
        if not 1 <= block_size <= self.block_size:
            raise ValueError(
                f"block_size: got {block_size}, expected 1 to {self.block_size}, what the rounds ({self.origin}) have"
            )
        return RoundPool(
            domains=self.domains,
            survival=np.ascontiguousarray(self.survival[:, :, :block_size]),
            accepted=np.minimum(self.accepted, block_size),
            origin=self.origin,
        )

    def accepted_length(self) -> dict[str, float]:
        """Return tokens a round by domain if whole blocks are verified."""
        return {name: 1 + float(row.mean()) for name, row in zip(self.domains, self.accepted, strict=True)}


def _logits(mu: float, sigma: float, shared: float, size: int, block_size: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.Generator(np.random.PCG64(seed))
    common, own = rng.standard_normal((size, 1)), rng.standard_normal((size, block_size))
    return np.asarray(mu + sigma * (np.sqrt(shared) * common + np.sqrt(1 - shared) * own))


def _sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-z)))


def auc_of_calibrated(confidence: NDArray[np.float64]) -> float:
    """Return the AUC of confidences [N] that are right on average: each is a success with exactly its own probability."""
    c = np.sort(confidence)
    failures = np.cumsum(1 - c)
    return float((c * (failures - 0.5 * (1 - c))).sum() / (c.sum() * failures[-1]))


@lru_cache(maxsize=64)
def fit_domain(accepted_length: float, auc: float, shared: float, block_size: int) -> tuple[float, float]:
    """Return mu and sigma at which whole blocks give this accepted length and the first confidence this AUC.

    Raises:
        ValueError: for an accepted length or AUC that no such drafter has.
    """
    if not 1 < accepted_length < 1 + block_size or not 0.5 < auc < 0.995 or not 0 <= shared <= 1:
        raise ValueError(
            f"accepted_length, auc, shared: got {accepted_length}, {auc}, {shared}, expected more than 1 and less than "
            f"{1 + block_size} tokens a round, 0.5 < auc < 0.995 and 0 <= shared <= 1"
        )
    noise = _logits(0.0, 1.0, shared, _FIT_SIZE, block_size, seed=1)
    noise = np.concatenate((noise, -noise))  # both signs, so that the sample's mean is exactly 0

    def mu_at(sigma: float) -> float:
        low, high = -12.0 - 4 * sigma, 12.0 + 4 * sigma
        for _ in range(_FIT_STEPS):
            mu = (low + high) / 2
            length = 1 + np.cumprod(_sigmoid(mu + sigma * noise), axis=1).sum(axis=1).mean()
            low, high = (mu, high) if length < accepted_length else (low, mu)
        return (low + high) / 2

    low, high = 1e-3, 12.0
    for _ in range(_FIT_STEPS // 2):
        sigma = (low + high) / 2
        found = auc_of_calibrated(_sigmoid(mu_at(sigma) + sigma * noise[:, 0]))
        low, high = (sigma, high) if found < auc else (low, sigma)
    sigma = (low + high) / 2
    return mu_at(sigma), sigma


@dataclass(frozen=True, kw_only=True)
class Parametric:
    """The parameters of the stated model; the defaults are the assumptions.

    Attributes:
        accepted_length: (domain, tokens a round) pairs, at blocks of 7.
        auc: of the confidence.
        shared: share of the logit's variance that the drafts of a round have in common.
        mtp_acceptance: of the baseline's only draft, in every domain.
        overconfidence: the logit shown to the scheduler is this times the true one; 1 is calibrated.
    """

    accepted_length: tuple[tuple[str, float], ...]
    auc: float = assumptions.CONFIDENCE_AUC.value
    shared: float = assumptions.SHARED_VARIANCE.value
    mtp_acceptance: float = assumptions.MTP_ACCEPTANCE.value
    overconfidence: float = 1.0

    @classmethod
    def stated(cls, **changes: float) -> Parametric:
        """Return the model of the assumptions, with changes."""
        return cls(accepted_length=tuple((k, v.value) for k, v in assumptions.ACCEPTED_LENGTH.items()), **changes)


def parametric_pools(
    model: Parametric, block_size: int, *, seed: int = 0, pool_size: int = POOL_SIZE
) -> tuple[RoundPool, RoundPool]:
    """Draw the rounds of the DSpark-like drafter and of MTP-1; a context that is hard for one is so for the other.

    Args:
        model: the parameters.
        block_size: gamma of the DSpark-like drafter.
        seed: of the pool.
        pool_size: rounds a domain.

    Returns:
        (drafter [D, P, gamma], MTP-1 [D, P, 1]).
    """
    survivals, counts, mtp_counts = [], [], []
    for number, (_, length) in enumerate(model.accepted_length):
        fitted_at = int(assumptions.TABLE_1_BLOCK_SIZE.value)
        mu, sigma = fit_domain(length, model.auc, model.shared, fitted_at)
        z = _logits(mu, sigma, model.shared, pool_size, block_size, seed=1000 * seed + number + 17)
        uniform = np.random.Generator(np.random.PCG64(1000 * seed + number + 511)).random((pool_size, block_size))
        counts.append(np.logical_and.accumulate(uniform < _sigmoid(z), axis=1).sum(axis=1))
        mtp_counts.append((uniform[:, 0] < model.mtp_acceptance).astype(np.int64))
        survivals.append(np.cumprod(_sigmoid(model.overconfidence * z), axis=1))
    domains = tuple(name for name, _ in model.accepted_length)
    survival = np.minimum.accumulate(np.stack(survivals).astype(np.float32), axis=2)
    mtp = np.full((len(domains), pool_size, 1), model.mtp_acceptance, dtype=np.float32)
    drafter = RoundPool(domains=domains, survival=survival, accepted=np.stack(counts), origin="parametric")
    return drafter, RoundPool(domains=domains, survival=mtp, accepted=np.stack(mtp_counts), origin="parametric MTP-1")


def load_traces(path: str | Path) -> RoundPool:
    """Read measured rounds: {"rounds": {domain: {"survival": [[a_1, ...], ...], "accepted": [...]}}}.

    Domains of different size are repeated up to the largest, so that every measured round of a domain counts about equally.

    Raises:
        ValueError: for a file that is no such JSON, or values that are out of range.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        parts = {
            str(name): (
                np.asarray(part["survival"], dtype=np.float32),
                np.asarray(part["accepted"], dtype=np.int64),
            )
            for name, part in content["rounds"].items()
        }
        most = max(len(accepted) for _, accepted in parts.values())
        survival = np.stack([np.resize(a, (most, a.shape[1])) for a, _ in parts.values()])
        accepted = np.stack([np.resize(counts, most) for _, counts in parts.values()])
        for name, (a, counts) in parts.items():
            if len(a) != len(counts) or not len(a):
                raise ValueError(f"{name} has {len(a)} survivals and {len(counts)} counts")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"--traces: got {str(path)!r}, which holds no rounds ({error}), expected JSON with "
            '{"rounds": {domain: {"survival": [[...]], "accepted": [...]}}}; benchmarks/record_traces.py writes one'
        ) from error
    return RoundPool(domains=tuple(parts), survival=survival, accepted=accepted, origin=Path(path).name)

"""Times of the `markov` component; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("markov"))
def test_markov(benchmark, size, contender):
    measure(benchmark, "markov", size, contender)


@pytest.mark.parametrize(("size", "contender"), points("markov, recomputed"))
def test_markov_without_kept_logits(benchmark, size, contender):
    measure(benchmark, "markov, recomputed", size, contender)

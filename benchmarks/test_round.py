"""Times of a whole round, the models left out; on a GPU also as one captured graph. See `benchmarks.tasks_round`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("round"))
def test_round(benchmark, size, contender):
    measure(benchmark, "round", size, contender)

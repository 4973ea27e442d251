"""Times of the `scheduler` component; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("scheduler"))
def test_scheduler(benchmark, size, contender):
    measure(benchmark, "scheduler", size, contender)

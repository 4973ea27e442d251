"""Times of the `rejection` component; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("rejection"))
def test_rejection(benchmark, size, contender):
    measure(benchmark, "rejection", size, contender)

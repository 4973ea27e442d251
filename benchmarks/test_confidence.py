"""Times of the `confidence` component; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("confidence"))
def test_confidence(benchmark, size, contender):
    measure(benchmark, "confidence", size, contender)

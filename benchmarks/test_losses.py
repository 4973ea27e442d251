"""Times of the `losses` component; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("losses"))
def test_losses(benchmark, size, contender):
    measure(benchmark, "losses", size, contender)

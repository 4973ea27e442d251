"""Times of the `calibration` component; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("calibration"))
def test_calibration(benchmark, size, contender):
    measure(benchmark, "calibration", size, contender)

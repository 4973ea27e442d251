"""Times of the `verification` component, ragged packing and attention; see `benchmarks.harness`."""

from __future__ import annotations

import pytest

from benchmarks.harness import measure, points


@pytest.mark.parametrize(("size", "contender"), points("verification, pack"))
def test_pack(benchmark, size, contender):
    measure(benchmark, "verification, pack", size, contender)


@pytest.mark.parametrize(("size", "contender"), points("verification, attention"))
def test_attention(benchmark, size, contender):
    measure(benchmark, "verification, attention", size, contender)

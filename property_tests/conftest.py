"""The backends that every law is checked on."""

from __future__ import annotations

import importlib.util

import hypothesis
import pytest

from dsspark.testing import strategies

HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ["reference", *(["triton"] if HAS_TRITON else [])]

INTERPRETED_EXAMPLES = 2
"""Examples a law gets on the interpreted kernels, where each launch costs tens of milliseconds; all of them on a GPU."""


INTERPRETED_POINTS = 1 << 8
"""Points of a lattice there, each a row of several launches."""


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    """Return the body under test; a law is the same for all of them."""
    return request.param


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter(request, monkeypatch):
    """Check a law on fewer examples and in small blocks, several of each, where the kernels are interpreted."""
    if "backend" not in request.fixturenames or request.getfixturevalue("backend") != "triton":
        return
    from dsspark.kernels import scheduler
    from dsspark.kernels.launch import interpreted
    from dsspark.kernels.ranking import rank_kernel

    if not interpreted(rank_kernel):
        return
    ranking = scheduler.Config(block_sort=0, own_r=2, other_r=2, block_n=4, block_r=2)
    monkeypatch.setattr(scheduler, "choose_config", lambda *sizes: ranking)
    monkeypatch.setattr(strategies, "MOST_POINTS", INTERPRETED_POINTS)
    name = "_hypothesis_internal_use_settings"
    current = getattr(request.function, name, None)
    if current is not None:
        fewer = min(current.max_examples, INTERPRETED_EXAMPLES)
        rare = [hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow]  # small lattices are rare
        settings = hypothesis.settings(current, max_examples=fewer, suppress_health_check=rare)
        monkeypatch.setattr(request.function, name, settings)

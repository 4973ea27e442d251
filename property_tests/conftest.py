"""The backends that every law is checked on."""

from __future__ import annotations

import importlib.util

import hypothesis
import pytest
import torch

from dsspark.testing import strategies

HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ["reference", *(["triton"] if HAS_TRITON else [])]

INTERPRETED_EXAMPLES = 2
"""Examples a law gets on the interpreted kernels, where each launch costs tens of milliseconds; all of them on a GPU."""

INTERPRETED_POINTS = 1 << 8
"""Points of a lattice there, each a row of several launches."""

_ROWS = 256
"""Rows of an interpreted tile: they cost next to nothing, and a tile of a few tokens costs milliseconds."""


MINUTES_IN_THE_INTERPRETER = {"test_every_threshold_is_min_one_p_over_q_to_the_last_bits"}
"""Laws that take hundreds of rounds an example: exhaustive there, that is, left to `.ci/run`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what takes minutes on interpreted kernels."""
    for item in items:
        on_kernels = getattr(item, "callspec", None) is not None and item.callspec.params.get("backend") == "triton"
        if on_kernels and item.originalname in MINUTES_IN_THE_INTERPRETER and not torch.cuda.is_available():
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    """Return the body under test; a law is the same for all of them."""
    return request.param


def force_small_blocks(monkeypatch) -> None:
    """Make every launcher cut its work so that a few tokens, requests or samples have several tiles and a tail."""
    from dsspark.kernels import (
        calibration,
        confidence,
        draft_plan,
        filters,
        packing,
        rejection_plan,
        scheduler,
        verification,
    )

    def drafting(num_rows, vocab_size, product, cell=0, *, keep_logits=True, **rest):
        if product is None:
            return draft_plan.Config(block_v=4, block_r=_ROWS, pick_rows=_ROWS)
        return draft_plan.Config(block_v=16, block_r=32, pick_rows=_ROWS if keep_logits else 16)

    forced = {
        calibration: lambda: calibration.Config(block_s=8, num_warps=4),
        confidence: lambda *sizes: confidence.Config(block_r=2, block_d=16, block_e=4, block_s=2),
        draft_plan: drafting,
        filters: lambda *sizes: filters.Config(block_r=64, block_v=16, block_s=64),
        packing: lambda: packing.Config(block_n=4, block_r=2, block_u=4, block_d=4),
        rejection_plan: lambda *sizes, **rest: rejection_plan.Config(block_v=4, block_w=16),
        scheduler: lambda *sizes: scheduler.Config(block_sort=0, own_r=2, other_r=2, block_n=4, block_r=2),
        verification: lambda *sizes, **rest: verification.Config(block_m=16, block_n=16, num_shares=2),
    }
    for module, choose_config in forced.items():
        monkeypatch.setattr(module, "choose_config", choose_config)
    monkeypatch.setattr(rejection_plan, "rows_a_program", lambda lanes: _ROWS)
    monkeypatch.setattr(rejection_plan, "_ACCEPT_LANES", 8 * _ROWS)


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter(request, monkeypatch):
    """Check a law on fewer examples and in small blocks, several of each, where the kernels are interpreted."""
    if "backend" not in request.fixturenames or request.getfixturevalue("backend") != "triton":
        return
    from dsspark.kernels.launch import interpreted
    from dsspark.kernels.ranking import rank_kernel

    if not interpreted(rank_kernel):
        return
    force_small_blocks(monkeypatch)
    monkeypatch.setattr(strategies, "MOST_POINTS", INTERPRETED_POINTS)
    name = "_hypothesis_internal_use_settings"
    current = getattr(request.function, name, None)
    if current is not None:
        fewer = min(current.max_examples, INTERPRETED_EXAMPLES)
        rare = [hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow]  # small lattices are rare
        settings = hypothesis.settings(current, max_examples=fewer, suppress_health_check=rare)
        monkeypatch.setattr(request.function, name, settings)

"""Bytes that drafting moves, counted in the interpreter, against the fewest possible (the plan's floors)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks.traffic import OTHER, count_traffic
from dsspark import MarkovHead, Uniforms
from dsspark.kernels.drafting import statistics_kernel
from dsspark.kernels.launch import interpreted
from dsspark.kernels.markov import choose_config, draft_block
from dsspark.kernels.product import product_shape
from dsspark.numerics import CELL

pytestmark = pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter moves")

VOCAB_SIZE, RANK, HALF = 32_768, 256, 2
# Of the plan's 7 positions one or two are drafted: each moves the same bytes, and the floor is taken for as many.


def count(num_requests, gamma, keep_logits, generator, kind="vanilla", **changed):
    """Draft a block with real sizes; return the traffic by tensor and the result."""
    base = torch.randn(num_requests, gamma, VOCAB_SIZE, generator=generator).to(torch.bfloat16)
    head = None
    named = {"u": base}
    if kind is not None:
        head = MarkovHead(VOCAB_SIZE, RANK, kind).to(torch.bfloat16)
        named |= {"w1": head.markov_w1.weight, "w2": head.markov_w2.weight}
    config = choose_config(
        num_requests * (1 if head else gamma),
        VOCAB_SIZE,
        product_shape(RANK, torch.bfloat16, torch.bfloat16) if head else None,
        keep_logits=keep_logits,
    )
    config = dataclasses.replace(config, **changed)
    anchors, uniforms = torch.arange(num_requests), Uniforms.draw(num_requests, gamma, generator=generator)
    with count_traffic(**named) as traffic:
        draft_block(base, anchors, head, uniforms, keep_logits=keep_logits, config=config)
    return traffic


def statistics_bytes(num_requests, block_v):
    """Return the bytes of one position's statistics, written once and read once."""
    return 2 * 8 * num_requests * (VOCAB_SIZE // min(CELL, block_v))


@pytest.mark.parametrize(("keep_logits", "gamma"), [(False, 2), (True, 1)], ids=["recomputed", "kept"])
def test_a_draft_step_moves_no_more_than_w2_and_the_rows(keep_logits, gamma, generator):
    num_requests, block_v = 4, 128
    traffic = count(num_requests, gamma, keep_logits, generator)
    rows = num_requests * VOCAB_SIZE * HALF
    w2 = VOCAB_SIZE * RANK * HALF
    cells = num_requests * CELL * (1 if keep_logits else RANK + 1) * HALF
    floor = gamma * (w2 + rows + cells + statistics_bytes(num_requests, block_v) + (rows if keep_logits else 0))
    assert traffic.total <= 1.05 * floor
    assert traffic.written["u"] == traffic.written["w2"] == 0
    # To the byte: what is V-sized is moved once, a picked chunk once more.
    picked = gamma * num_requests * block_v * HALF
    assert traffic.read["u"] == gamma * rows + (0 if keep_logits else picked)
    assert traffic.read["w2"] == gamma * w2 + (0 if keep_logits else picked * RANK)
    assert traffic.read["w1"] == gamma * num_requests * RANK * HALF
    written = gamma * (statistics_bytes(num_requests, block_v) // 2 + (rows if keep_logits else 0))
    small = 2 * gamma * num_requests * (RANK * HALF + 32)
    assert written <= traffic.written[OTHER] <= written + small


def test_w2_is_read_once_a_position_when_requests_need_several_tiles(generator):
    num_requests = 64
    traffic = count(num_requests, 1, True, generator, block_r=16, block_v=512, pick_rows=8)
    assert traffic.read["w2"] == VOCAB_SIZE * RANK * HALF
    assert traffic.read["u"] == num_requests * VOCAB_SIZE * HALF


@pytest.mark.parametrize("keep_logits", [False, True], ids=["recomputed", "kept"])
def test_a_parallel_draft_reads_its_logits_once(keep_logits, generator):
    gamma = 2
    traffic = count(4, gamma, keep_logits, generator, kind=None)
    rows = 4 * gamma * VOCAB_SIZE * HALF
    picked = 4 * gamma * CELL * HALF
    assert traffic.read["u"] == rows + (0 if keep_logits else picked)
    floor = rows * (2 if keep_logits else 1) + picked + gamma * statistics_bytes(4, CELL)
    assert traffic.total <= 1.05 * floor

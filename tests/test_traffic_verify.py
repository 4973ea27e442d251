"""What `verify` moves, counted in rows of logits a request: the floor is 9 at gamma = 7, and peers move 15.6 or more."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks.traffic import count_traffic
from dsspark import DraftBlock, MarkovHead, Uniforms
from dsspark.kernels.acceptance import statistics_kernel
from dsspark.kernels.launch import interpreted
from dsspark.kernels.rejection import verify
from dsspark.reference.markov import draft_block
from dsspark.reference.verification import pack

pytestmark = pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter touches")

V, GAMMA, R = 32_768, 7, 4
ROW = 2 * V


def rejected_at(positions, generator, head=None):
    """Return arguments of `verify` in which request r rejects its draft at positions[r], or accepts all GAMMA."""
    base = torch.randn(len(positions), GAMMA, V, generator=generator).bfloat16()
    uniforms = Uniforms.draw(len(positions), GAMMA, generator)
    anchors = torch.zeros(len(positions), dtype=torch.int64)
    draft = draft_block(base, anchors, head, uniforms, keep_logits=head is None)
    batch = pack(anchors, draft.tokens, anchors + GAMMA, anchors)
    rows = torch.randn(len(batch.tokens), V, generator=generator).bfloat16()
    for r, position in enumerate(positions):
        for k in range(GAMMA):
            likely = 20.0 if k != position else -20.0
            rows[int(batch.cu_seqlens[r]) + k, draft.tokens[r, k]] = likely
    return rows, batch, draft, uniforms


def test_stored_q(generator):
    positions = [0, 3, 6, GAMMA]
    rows, batch, draft, uniforms = rejected_at(positions, generator)
    with count_traffic(rows=rows, draft=draft.logits) as traffic:
        result = verify(rows, batch, draft, uniforms)
    assert result.num_accepted.tolist() == positions
    # Each drafted row, then the rejected row of p or the bonus row; the rest are the chunk that is drawn from, and single logits.
    assert 8 * R <= traffic.read["rows"] / ROW <= 8 * R + 0.1
    assert 3 <= traffic.read["draft"] / ROW <= 3.1
    assert traffic.total / ROW / R <= 9.6 - 0.25  # one of four requests has no row of q to read
    assert traffic.written["rows"] == traffic.written["draft"] == 0


def test_the_worst_case_is_a_rejection_in_every_request(generator):
    rows, batch, draft, uniforms = rejected_at([0, 2, 4, 6], generator)
    with count_traffic(rows=rows, draft=draft.logits) as traffic:
        verify(rows, batch, draft, uniforms)
    assert traffic.total / ROW / R <= 9.4


def test_requests_that_are_short_greedy_or_absent_read_less(generator):
    rows, batch, draft, uniforms = rejected_at([0, 3], generator)
    point = DraftBlock.point(draft.tokens)
    with count_traffic(rows=rows) as traffic:  # a greedy rejection has its argmax already
        verify(rows, batch, point, uniforms, temperature=0.0)
    assert 7 * 2 <= traffic.read["rows"] / ROW <= 7 * 2 + 0.2
    zeros = torch.zeros(2, dtype=torch.int64)
    short = pack(zeros, draft.tokens, torch.tensor([2, 0]), zeros, capacity=len(rows))
    with count_traffic(rows=rows, draft=draft.logits) as traffic:
        verify(rows, short, draft, uniforms)
    assert 2 + 2 <= traffic.read["rows"] / ROW <= 2 + 2 + 0.1


def test_recomputed_q_reads_w2_once_for_all_requests(generator):
    head = MarkovHead(V, 16).bfloat16()
    rows, batch, draft, uniforms = rejected_at([0, 3, 6, 1], generator, head)
    with count_traffic(rows=rows, w2=draft.markov_w2, base=draft.base_logits) as traffic:
        verify(rows, batch, draft, uniforms)
    w2 = draft.markov_w2.nbytes
    assert w2 <= traffic.read["w2"] <= w2 * 1.05
    assert 4 <= traffic.read["base"] / ROW <= 4.1

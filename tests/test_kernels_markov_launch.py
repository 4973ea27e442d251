"""How the drafting kernels are launched: counts, specialisations, offsets beyond 31 bits, ahead-of-time compilation, graphs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from specialise import specialise
from test_kernels_verification_launch import addresses_of, needs_interpreter

from dsspark import MarkovHead, Uniforms
from dsspark.kernels import markov
from dsspark.kernels.compile import compile_variants
from dsspark.kernels.draft_plan import choose_config
from dsspark.kernels.drafting import PICK_VALUES, STATISTICS_VALUES, pick_kernel, statistics_kernel
from dsspark.kernels.latent import latent_kernel
from dsspark.kernels.product import MOST_PRODUCT_ROWS, product_shape

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FAR = 2**33
"""A stride in entries that no 32-bit offset holds."""


@pytest.fixture
def launched(monkeypatch):
    """Return a list that fills with the launches, described; nothing runs."""
    found = []
    monkeypatch.setattr(
        markov, "launch", lambda kernel, _, *given, **named: found.append(specialise(kernel, *given, **named))
    )
    return found


def draft(kind, num_requests=4, gamma=7, vocab_size=32_768, base=BF16, weights=BF16, ids=None, **options):
    """Call `draft_block` with a real head on zeros, which take no memory until they are touched."""
    head = None
    if kind is not None:
        with torch.device("meta"):
            head = MarkovHead(vocab_size, 256, kind, 4096)
        head.to(weights).to_empty(device="cpu")
    return markov.draft_block(
        torch.zeros(num_requests, gamma, vocab_size, dtype=base),
        torch.zeros(num_requests, dtype=torch.int64),
        head,
        Uniforms.draw(num_requests, gamma),
        hidden=torch.zeros(num_requests, gamma, 4096, dtype=base),
        draft_to_target=ids,
        **options,
    )


@pytest.mark.parametrize("keep_logits", [True, False])
def test_every_launch_is_one_of_the_variants(keep_logits, launched):
    for kind in ("vanilla", "gated", "rnn"):
        for base, weights in ((BF16, BF16), (F32, F32), (F32, BF16)):
            draft(kind, gamma=4, vocab_size=32_768, base=base, weights=weights, keep_logits=keep_logits)
    draft("vanilla", base=F16, weights=F16, keep_logits=keep_logits)
    draft("vanilla", num_requests=64, gamma=2, base=F32, weights=F32, keep_logits=keep_logits)
    draft("vanilla", vocab_size=32_003, keep_logits=keep_logits)
    draft("vanilla", ids=torch.arange(32_768), keep_logits=keep_logits)
    draft(None, keep_logits=keep_logits)
    variants = markov.variants()
    for launch in launched:
        assert any(launch.is_described_by(variant) for variant in variants), launch
    assert {launch.kernel for launch in launched} == {variant.kernel for variant in variants}


@pytest.mark.parametrize(("kind", "expected"), [(None, 2), ("vanilla", 1 + 2 * 7), ("gated", 3 * 7), ("rnn", 3 * 7)])
def test_launches_a_block(kind, expected, launched):
    draft(kind, vocab_size=512)
    assert len(launched) == expected


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_later_positions_need_no_specialisation_of_their_own(kind, launched):
    draft(kind, vocab_size=512)
    kinds = {str(launch) for launch in launched}
    assert len(kinds) == (3 if kind == "vanilla" else 4)  # the first latent, the later ones, statistics, pick


def test_configurations_keep_within_a_product():
    for vocab_size in (1, 37, 8193, 151_936):
        for num_rows in (0, 1, 17, 256, 4096):
            for rank in (1, 16, 256, 1024):
                for dtype in (F32, BF16):
                    shape = product_shape(rank, dtype, dtype)
                    for cell in (1, 8, 256):
                        config = choose_config(num_rows, vocab_size, shape, cell, keep_logits=False)
                        assert 16 <= config.block_r <= MOST_PRODUCT_ROWS
                        assert 1 <= config.pick_rows <= MOST_PRODUCT_ROWS
                        assert config.block_v >= 16


def blocks(**more):
    """Return the constexprs of a tile of 16 tokens and 16 rows."""
    return {"BLOCK_R": 16, "RANK": 16, "BLOCK_K": 16, "CELL": 16, "CHUNK": 16, "LANES": 16, "INTERPRETED": True, **more}


@needs_interpreter
@pytest.mark.parametrize("step", ["held", "streamed"])
def test_statistics_offsets_do_not_overflow(step):
    base, latent, w2, logits, tops, totals = (torch.zeros(4) for _ in range(6))
    touched = addresses_of(
        statistics_kernel,
        (1, 1),
        base_ptr=base,
        latent_ptr=latent,
        w2_ptr=w2,
        temperature_ptr=torch.ones(2),
        logits_ptr=logits,
        tops_ptr=tops,
        totals_ptr=totals,
        stride_br=FAR,
        stride_bk=FAR,
        stride_bv=2**30,
        stride_wv=2**30,
        stride_we=2**29,
        stride_t=1,
        num_rows=2,
        positions=1,
        first_position=1,
        block_size=2**20,
        vocab_size=2**30,
        rank=32,
        num_chunks=2**26,
        **blocks(PER=1, RANK=32, BLOCK_K=32 if step == "held" else 16),
    )
    assert base.data_ptr() + 4 * (FAR + FAR + 15 * 2**30) in touched
    assert w2.data_ptr() + 4 * (15 * 2**30 + 31 * 2**29) in touched
    assert latent.data_ptr() + 4 * ((2**20 + 1) * 32 + 31) in touched
    assert logits.data_ptr() + 4 * ((2**20 + 1) * 2**30 + 15) in touched
    assert tops.data_ptr() + 4 * 2**26 in touched


@needs_interpreter
@np.errstate(all="ignore")  # as in `launch`: these statistics sum to zero
def test_pick_offsets_do_not_overflow():
    base, latent, w2, w1, uniforms, tops, totals = (torch.zeros(4) for _ in range(7))
    ids, tokens = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    results = {name: torch.zeros(4) for name in ("probs_ptr", "max_ptr", "sum_ptr")}
    touched = addresses_of(
        pick_kernel,
        (1,),
        base_ptr=base,
        latent_ptr=latent,
        w2_ptr=w2,
        w1_ptr=w1,
        temperature_ptr=torch.ones(2),
        uniforms_ptr=uniforms,
        map_ptr=ids,
        tops_ptr=tops,
        totals_ptr=totals,
        tokens_ptr=tokens,
        **results,
        stride_br=FAR,
        stride_bk=FAR,
        stride_bv=2**30,
        stride_wv=2**30,
        stride_we=2**29,
        stride_ev=FAR,
        stride_ee=2**29,
        stride_t=1,
        stride_ur=FAR,
        stride_uk=FAR,
        stride_ui=1,
        stride_m=1,
        num_rows=2,
        positions=1,
        first_position=1,
        block_size=2**28,
        vocab_size=2**30,
        rank=16,
        num_chunks=2**26,
        num_ids=1,
        **blocks(CELLS=1, SUBS=1, PRODUCT_ROWS=16),
    )
    assert base.data_ptr() + 4 * (FAR + FAR + 15 * 2**30) in touched
    assert w2.data_ptr() + 4 * (15 * 2**30 + 15 * 2**29) in touched
    assert latent.data_ptr() + 4 * ((2**28 + 1) * 16 + 15) in touched
    assert uniforms.data_ptr() + 4 * 2 * FAR in touched
    assert w1.data_ptr() + 4 * 15 * 2**29 in touched
    assert latent.data_ptr() + 4 * ((2**28 + 2) * 16 + 15) in touched
    assert {result.data_ptr() + 4 * (2**28 + 1) for result in results.values()} <= touched


@needs_interpreter
def test_latent_offsets_do_not_overflow():
    w1, hidden, matrix, state, out = (torch.zeros(4) for _ in range(5))
    touched = addresses_of(
        latent_kernel,
        (1, 1),
        previous_ptr=torch.ones(2, dtype=torch.int64),
        w1_ptr=w1,
        hidden_ptr=hidden,
        matrix_ptr=matrix,
        bias_ptr=None,
        state_ptr=state,
        next_state_ptr=torch.zeros(4),
        latent_ptr=out,
        stride_p=1,
        stride_ev=FAR,
        stride_ee=1,
        stride_hr=FAR,
        stride_hk=FAR,
        stride_hd=2**30,
        stride_mj=2**29,
        stride_mk=2**29,
        stride_bias=1,
        num_requests=2,
        position=3,
        block_size=2**28,
        num_ids=2,
        hidden_size=16,
        rank=16,
        BLOCK_R=16,
        BLOCK_J=16,
        BLOCK_K=16,
        STATE_K=16,
        INTERPRETED=True,
    )
    assert w1.data_ptr() + 4 * (FAR + 15) in touched
    assert hidden.data_ptr() + 4 * (4 * FAR + 15 * 2**30) in touched
    assert matrix.data_ptr() + 4 * ((2 * 16 + 15) * 2**29 + (32 + 15) * 2**29) in touched
    assert out.data_ptr() + 4 * ((2**28 + 3) * 16 + 15) in touched


def test_integers_that_change_from_step_to_step_are_not_compiled_in():
    for kernel, values in ((statistics_kernel, STATISTICS_VALUES), (pick_kernel, PICK_VALUES)):
        assert {"num_rows", "first_position"} <= set(values) <= set(kernel.arg_names)


COMPILED = [
    *("statistics/head-kept-bf16-bf16-V32768-R4-r256", "statistics/head-fp32-fp32-V32768-R4-r256"),
    *("statistics/head-bf16-bf16-V32003-R4-r256", "statistics/parallel-bf16-bf16-V32768-R4-r256"),
    *("pick/vanilla-bf16-bf16-V32768-R4-r256", "pick/vanilla-kept-bf16-bf16-V151936-R4-r256"),
    *("latent/vanilla-first-bf16-bf16-V32768-R4-r256", "latent/gated-bf16-bf16-V32768-R4-r256"),
]


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_kernels_compile_for_a_gpu_that_is_not_here_without_spills_or_narrow_loads():
    chosen = [variant for variant in markov.variants() if variant.name.removeprefix("markov/") in COMPILED]
    assert len(chosen) == len(COMPILED)
    for report in compile_variants(chosen, "sm_90"):
        assert report.problems == ()
        if "statistics" in report.variant and "32003" not in report.variant:
            assert set(report.loads["base_ptr"]) == {16}
            assert "head" not in report.variant or set(report.loads["w2_ptr"]) == {16}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_a_block_is_captured_in_one_graph(kind):
    head = None if kind is None else MarkovHead(4096, 64, kind, 128).cuda()
    base, hidden = torch.randn(4, 7, 4096, device="cuda"), torch.randn(4, 7, 128, device="cuda")
    anchors, uniforms = torch.arange(4, device="cuda"), Uniforms.draw(4, 7, device="cuda")
    markov.draft_block(base, anchors, head, uniforms, hidden=hidden)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = markov.draft_block(base, anchors, head, uniforms, hidden=hidden)
    base.copy_(torch.randn_like(base))
    graph.replay()
    expected = markov.draft_block(base, anchors, head, uniforms, hidden=hidden)
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        assert value is None or torch.equal(getattr(captured, field.name), value), field.name

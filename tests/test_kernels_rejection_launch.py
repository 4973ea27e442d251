"""How the verification kernels are launched: how often, in which specialisations, with offsets beyond 31 bits, compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from specialise import specialise
from test_kernels_verification_launch import addresses_of
from verification_rounds import make_round

from dsspark import DraftBlock, Filters, Uniforms
from dsspark.kernels import rejection
from dsspark.kernels.acceptance import accept_kernel, rows_kernel, statistics_kernel
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.kernels.draft_law import RECOMPUTED
from dsspark.kernels.handover import RESIDUAL
from dsspark.kernels.launch import interpreted
from dsspark.kernels.rejection import Config, choose_config, variants, verify
from dsspark.kernels.rejection_plan import Source
from dsspark.kernels.resampling import pick_kernel, resample_kernel
from dsspark.reference.verification import pack

LARGE = 151_936


@pytest.fixture
def launches(monkeypatch):
    """Return what `verify` launches, described; nothing is launched."""
    found = []
    monkeypatch.setattr(
        rejection, "launch", lambda kernel, _, *given, **named: found.append(specialise(kernel, *given, **named))
    )
    return found


def large_round(dtype, kind, vocab, gamma=7):
    """Return arguments of `verify` with real sizes."""
    tokens = torch.zeros(2, gamma, dtype=torch.int64)
    numbers, temperature = torch.zeros(2, gamma), torch.ones(2)
    fields = {"row_max": numbers, "row_sum": numbers, "temperature": temperature, "token_probs": numbers}
    logits = torch.zeros(2, gamma, vocab, dtype=dtype)
    mapped = {"draft_to_target": torch.arange(vocab)} if "mapped" in kind else {}
    if kind in ("stored", "mapped"):
        draft = DraftBlock(tokens=tokens, logits=logits, **fields, **mapped)
    elif kind.startswith("recomputed"):
        head = torch.float32 if "float32" in kind else dtype
        w2 = torch.zeros(vocab, 256, dtype=head)
        latent = torch.zeros(2, gamma, 256, dtype=head)
        draft = DraftBlock(tokens=tokens, base_logits=logits, latent=latent, markov_w2=w2, **fields, **mapped)
    else:
        draft = DraftBlock.point(tokens)
    zeros = torch.zeros(2, dtype=torch.int64)
    batch = pack(zeros, tokens, zeros + gamma, zeros)
    rows = torch.zeros(len(batch.tokens), vocab, dtype=dtype)
    return rows, batch, draft, Uniforms.draw(2, gamma)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_launch_is_one_of_the_variants(dtype, launches, monkeypatch):
    class Found:
        def __init__(self, rows):
            self.kept_sum, self.threshold, self.min_weight = (torch.zeros(rows) for _ in range(3))
            self.last_id = torch.zeros(rows, dtype=torch.int32)

    monkeypatch.setattr(rejection, "cutoffs", lambda logits, *_, **__: Found(len(logits)))
    for kind in ("stored", "mapped", "recomputed", "point"):
        verify(*large_round(dtype, kind, LARGE))
    if dtype == torch.bfloat16:
        for kind in ("stored", "mapped", "recomputed", "recomputed float32", "recomputed mapped", "point"):
            verify(*large_round(dtype, kind, LARGE), filters=Filters(top_k=2))
        for vocab in (128_256, 32_000, 50_257):
            verify(*large_round(dtype, "stored", vocab))
        verify(*large_round(dtype, "stored", LARGE, gamma=32))
    listed = variants()
    for launch in launches:
        assert any(launch.is_described_by(variant) for variant in listed), launch
    assert {launch.kernel for launch in launches} == {variant.kernel for variant in listed}


def test_five_launches_without_filters(launches, generator):
    made = make_round(generator=generator, settle=False)
    made.run(verify)
    assert len(launches) == 5
    launches.clear()
    made = make_round(lengths=[], temperature=1.0, draft_temperature=1.0, generator=generator, settle=False)
    made.run(verify)
    assert launches == []


@pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter touches")
def test_row_offsets_do_not_overflow():
    far = 2**29  # a row stride at which row 5 lies beyond 31 bits
    logits = torch.zeros(4)
    sizes = {"num_requests": 1, "block_size": 5, "num_rows": 6, "vocab_size": 2, "num_chunks": 2**30}
    strides = {"stride_tn": far, "stride_tv": 1, "stride_temperature": 1, "stride_cu": 1}
    tops, totals = torch.zeros(4), torch.zeros(4)
    touched = addresses_of(
        statistics_kernel,
        (1, 1),
        logits_ptr=logits,
        temperature_ptr=torch.ones(1),
        cu_ptr=torch.tensor([0, 6], dtype=torch.int32),
        num_tokens_ptr=torch.tensor(6, dtype=torch.int32),
        tops_ptr=tops,
        totals_ptr=totals,
        **sizes,
        **strides,
        FILTERED=False,
        ROWS=8,
        CELL=2,
        CHUNK=2,
        LANES=2,
        PER=1,
    )
    assert {logits.data_ptr() + 4 * (far * row + token) for row in range(5) for token in range(2)} <= touched
    assert {pointer.data_ptr() + 4 * 2**30 * row for pointer in (tops, totals) for row in range(5)} <= touched


FAR = 2**33
"""A stride in entries that no 32-bit offset holds."""


@pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter touches")
def test_offsets_of_the_acceptance_test_do_not_overflow():
    """Rows 1 and 2 of the target, request 1's row 2 of the draft's statistics, and results beyond 2 ** 31 entries."""
    logits, results, facts = torch.zeros(4), torch.zeros(4), torch.zeros(16)
    ids = torch.zeros(16, dtype=torch.int64)
    numbers = {name: torch.ones(1) for name in ("draft_probs_ptr", "draft_max_ptr", "draft_sum_ptr", "uniforms_ptr")}
    whole = dict.fromkeys(("num_accepted_ptr", "num_emitted_ptr", "valid_ptr", "logprobs_ptr"), results)
    strides = {f"stride_{name}": FAR for name in ("tn", "qr", "mr", "sr", "ur")} | {"stride_xr": 1}
    strides |= {
        f"stride_{name}": 1 for name in ("tv", "temperature", "cu", "xk", "qk", "draft_temperature", "mk", "sk", "uk")
    }
    touched = addresses_of(
        accept_kernel,
        (1,),
        logits_ptr=logits,
        temperature_ptr=torch.ones(2),
        cu_ptr=torch.tensor([0, 1, 3], dtype=torch.int32),
        num_tokens_ptr=torch.tensor(3, dtype=torch.int32),
        drafted_ptr=torch.zeros(4, dtype=torch.int64),
        draft_temperature_ptr=torch.ones(2),
        **numbers,
        row_max_ptr=torch.zeros(3),
        row_sum_ptr=torch.ones(3),
        best_ptr=torch.full((3,), -1, dtype=torch.int32),
        **dict.fromkeys(("threshold_ptr", "last_id_ptr", "min_weight_ptr")),
        **whole,
        tokens_ptr=ids,
        ids_ptr=ids,
        numbers_ptr=facts,
        num_requests=2,
        block_size=2**31 - 2,
        num_rows=3,
        vocab_size=2,
        **strides,
        FILTERED=False,
        BLOCK_R=2,
        BLOCK_K=2,
    )
    assert logits.data_ptr() + 4 * FAR in touched  # the row of request 1's only draft
    assert {numbers[name].data_ptr() + 4 * FAR for name in numbers} <= touched
    assert results.data_ptr() + 4 * (2**31 - 1) in touched
    assert ids.data_ptr() + 8 * (2**31 - 1) in touched


def facts_of_a_rejection(row, position):
    """Return what `accept_kernel` leaves of two requests, the second rejected at a position that its row of the target decides."""
    ids, numbers = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8)
    ids[1, :4] = torch.tensor([RESIDUAL.value, row, position, 1])
    return {"ids_ptr": ids, "numbers_ptr": numbers}


DRAW = {
    "num_requests": 2,
    "vocab_size": 2**30,
    "draft_vocab": 2**30,
    "rank": 16,
    "num_chunks": 2**30,
    "stride_tn": FAR,
    "stride_tv": 2**28,
    "stride_dr": FAR,
    "stride_dk": FAR,
    "stride_dv": 2**28,
    "stride_lr": FAR,
    "stride_lk": FAR,
    "stride_le": 1,
    "stride_wv": 2**28,
    "stride_we": 1,
    "stride_map": 1,
    "SOURCE": RECOMPUTED.value,
    "FILTERED": False,
    "INTERPRETED": True,
    "RANK": 16,
    "BLOCK_K": 16,
    "CELL": 16,
    "CHUNK": 16,
    "LANES": 16,
}


@pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter touches")
@np.errstate(all="ignore")  # as in `launch`: what lies nowhere reads as 0
def test_offsets_of_the_draw_do_not_overflow():
    logits, draft, latent, w2, first, second = (torch.zeros(4) for _ in range(6))
    pointers = {"logits_ptr": logits, "draft_logits_ptr": draft, "latent_ptr": latent, "w2_ptr": w2, "map_ptr": None}
    pointers |= {"first_ptr": first, "second_ptr": second, **facts_of_a_rejection(row=3, position=2)}
    expected = {logits.data_ptr() + 4 * (3 * FAR + 15 * 2**28), draft.data_ptr() + 4 * (3 * FAR + 15 * 2**28)}
    expected |= {latent.data_ptr() + 4 * (3 * FAR + 15), w2.data_ptr() + 4 * (15 * 2**28 + 15)}
    touched = addresses_of(resample_kernel, (1, 1), **pointers, **DRAW, ROWS=16, PER=1)
    assert expected <= touched
    assert {pointer.data_ptr() + 4 * 2**30 for pointer in (first, second)} <= touched
    results = dict.fromkeys(("num_accepted_ptr", "num_emitted_ptr", "valid_ptr", "logprobs_ptr"), torch.zeros(4))
    tokens, uniforms = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    touched = addresses_of(
        pick_kernel,
        (2,),
        **pointers,
        **results,
        tokens_ptr=tokens,
        uniforms_ptr=uniforms,
        block_size=2**31 - 2,
        stride_ur=FAR,
        stride_uk=FAR,
        **DRAW,
        ROWS=1,
        POSITIONS=2,
        CELLS=1,
        SUBS=1,
    )
    assert expected <= touched
    assert {uniforms.data_ptr() + 4 * FAR * n for n in (1, 2)} <= touched
    assert tokens.data_ptr() + 8 * (2**31 - 1 + 2) in touched


@pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter touches")
def test_offsets_of_the_row_terms_do_not_overflow():
    far = 2**30
    for stride_tn, num_chunks in ((far, 1), (1, far)):
        logits, tops, totals = torch.zeros(4), torch.zeros(4), torch.ones(4)
        touched = addresses_of(
            rows_kernel,
            (1,),
            logits_ptr=logits,
            temperature_ptr=torch.zeros(1),  # greedy, so that the row itself is read
            cu_ptr=torch.tensor([0, 4], dtype=torch.int32),
            num_tokens_ptr=torch.tensor(4, dtype=torch.int32),
            tops_ptr=tops,
            totals_ptr=totals,
            row_max_ptr=torch.zeros(4),
            row_sum_ptr=torch.zeros(4),
            best_ptr=torch.zeros(4, dtype=torch.int32),
            num_requests=1,
            block_size=3,
            num_rows=4,
            vocab_size=2,
            num_chunks=num_chunks,
            stride_tn=stride_tn,
            stride_tv=1,
            stride_temperature=1,
            stride_cu=1,
            FILTERED=False,
            ROWS=4,
            CELL=2,
            CHUNK=2,
            LANES=2,
            CELLS=1,
            SUBS=1,
        )
        assert {pointer.data_ptr() + 4 * num_chunks * row for pointer in (tops, totals) for row in range(3)} <= touched
        if num_chunks == 1:  # a row that is not read has no maximum, and its logits are not looked at
            assert {logits.data_ptr() + 4 * (far * row + token) for row in range(3) for token in range(2)} <= touched


def test_the_configuration_is_a_plain_function_of_sizes():
    assert choose_config(LARGE) == Config(block_v=2048, block_w=128)
    assert choose_config(37) == Config(block_v=64, block_w=64)
    assert choose_config(3).block_w == 16  # a matrix instruction takes no less
    assert choose_config(LARGE, step=512).block_w == 64
    draft = large_round(torch.bfloat16, "recomputed", LARGE)[2]
    assert Source.of(draft).product["RANK"] == 256
    assert Source.of(replace(draft, latent=None)).kind == Source.of(large_round(torch.bfloat16, "stored", 64)[2]).kind


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_one_variant_of_each_kernel_and_source_compiles_for_a_gpu_that_is_not_here():
    chosen = one_per_kernel(variants())
    chosen += [v for v in variants() if "/bf16-recomputed-bf16-bf16-" in v.name or "/bf16-stored-bf16-mapped" in v.name]
    chosen += [v for v in variants() if "resample/bf16-stored-bf16-v151936" in v.name]
    for report in compile_variants(chosen, "sm_90"):
        assert report.problems == (), report.variant

"""How the verification kernels are launched: how often, in which specialisations, with offsets beyond 31 bits, compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from specialise import specialise
from test_kernels_verification_launch import addresses_of
from verification_rounds import make_round

from dsspark import DraftBlock, Filters, Uniforms
from dsspark.kernels import rejection
from dsspark.kernels.acceptance import statistics_kernel
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.kernels.launch import interpreted
from dsspark.kernels.rejection import Config, choose_config, variants, verify
from dsspark.kernels.rejection_plan import Source
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
    mapped = {"draft_to_target": torch.arange(vocab)} if kind == "mapped" else {}
    if kind in ("stored", "mapped"):
        draft = DraftBlock(tokens=tokens, logits=logits, **fields, **mapped)
    elif kind == "recomputed":
        w2 = torch.zeros(vocab, 256, dtype=dtype)
        latent = torch.zeros(2, gamma, 256, dtype=dtype)
        draft = DraftBlock(tokens=tokens, base_logits=logits, latent=latent, markov_w2=w2, **fields)
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
        for kind in ("stored", "mapped", "recomputed", "point"):
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


def test_the_configuration_is_a_plain_function_of_sizes():
    assert choose_config(LARGE) == Config(block_v=2048, block_w=128)
    assert choose_config(37) == Config(block_v=64, block_w=64)
    assert choose_config(3).block_w == 16  # a matrix instruction takes no less
    assert choose_config(LARGE, step=512).block_w == 64
    draft = large_round(torch.bfloat16, "recomputed", LARGE)[2]
    assert Source.of(draft).product["RANK"] == 256
    assert Source.of(replace(draft, latent=None)).kind == Source.of(large_round(torch.bfloat16, "stored", 64)[2]).kind


def test_one_variant_of_each_kernel_and_source_compiles_for_a_gpu_that_is_not_here():
    chosen = one_per_kernel(variants())
    chosen += [v for v in variants() if "/bf16-recomputed-bf16-bf16-" in v.name or "/bf16-stored-bf16-mapped" in v.name]
    chosen += [v for v in variants() if "resample/bf16-stored-bf16-v151936" in v.name]
    for report in compile_variants(chosen, "sm_90"):
        assert report.problems == (), report.variant

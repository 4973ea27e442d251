"""How the filter kernels are launched: bytes moved, group maxima, specialisations, offsets beyond 31 bits, errors, compilation."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from specialise import specialise
from test_kernels_filters import DTYPES, HALVES, find, grid, keeps, mixed
from test_kernels_verification_launch import addresses_of, needs_interpreter

from benchmarks.traffic import OTHER, count_traffic
from dsspark import Filters
from dsspark.kernels import filters as kernels
from dsspark.kernels import selection
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.kernels.filters import Config, cutoffs
from dsspark.numerics import row_weights
from dsspark.reference.filters import target_weights

V = 8192
WIDE = Config(block_r=4, block_v=2048, block_s=8)
ONE = [Filters(top_k=50), Filters(top_k=4000), Filters(top_p=0.9), Filters(top_p=0.3, min_p=0.01)]
BOTH = [Filters(top_k=50, top_p=0.9), Filters(top_k=6000, top_p=0.97, min_p=0.001)]


def reads(logits, filters, **options):
    """Return how often each row is read, on the average over the rows."""
    temperature = torch.ones(len(logits))
    with count_traffic(logits=logits) as traffic:
        find(logits, temperature, filters, config=WIDE, **options)
    return traffic.read["logits"] / logits.nbytes


@needs_interpreter
@DTYPES
def test_two_reads_of_a_row_whatever_the_filters(dtype, generator):
    normal = torch.randn(4, V, generator=generator) * 3
    tied = grid(4, V, generator) * 0.5  # the last of hundreds of tied tokens is sought, by both filters
    for logits in (normal.to(dtype), tied.to(dtype)):
        for filters in (*ONE, *BOTH):
            assert reads(logits, filters) <= 2, filters
        assert reads(logits, Filters(min_p=0.1)) == 1


@needs_interpreter
@DTYPES
def test_thousands_of_tied_tokens_take_four_reads(dtype, generator):
    """More than can be collected: keys are told apart to the last bit, then parts of the row, one of which is read again."""
    most = {torch.bfloat16: (2 + 1 / 64, 3 + 1 / 64), torch.float16: (2.125, 3.125), torch.float32: (3.5, 4 + 1 / 512)}[
        dtype
    ]
    crowded = grid(2, V, generator, levels=2)
    crowded[0] = 1.5
    for limit, several in zip(most, (ONE[1:3], BOTH[1:]), strict=True):
        for filters in several:
            assert 2 < reads(crowded.to(dtype), filters) <= limit + 1e-3, filters


@needs_interpreter
def test_masked_tokens_crowd_no_search(generator):
    """Top-k beyond the hundred tokens that are not masked: the thousands of -inf are not told apart."""
    logits = torch.randn(2, V, generator=generator)
    logits[:, 100:] = -math.inf
    assert reads(logits, Filters(top_k=4000)) == 1
    assert reads(logits, Filters(top_k=4000, top_p=0.9)) <= 2


@needs_interpreter
def test_no_row_is_read_that_needs_no_search(generator):
    logits = torch.randn(4, V, generator=generator)
    keep_all = Filters(top_k=torch.tensor([0, V, V + 1, 0]), top_p=torch.ones(4), min_p=torch.zeros(4))
    assert reads(logits, keep_all) == 0
    assert reads(logits, Filters(top_k=0, top_p=1.0)) == 0
    assert reads(logits, BOTH[0], skip=torch.ones(4, dtype=torch.bool)) == 0
    assert reads(logits, BOTH[0], ids=torch.full((4,), -1)) == 0
    assert reads(torch.full((4, V), math.nan), BOTH[0]) == 0
    once = reads(logits[:1], ONE[0])
    assert reads(logits, ONE[0], skip=torch.tensor([True, False, True, True])) == once / 4


@needs_interpreter
def test_a_target_that_is_known_late_takes_three_reads():
    """A third of the mass on either side of a step that top-k cuts, at every scale: top-p's target is known after top-k's cut only."""
    scale = torch.linspace(0, 1, V).double()
    logits = torch.cat([16 + scale[: V // 2] * 2.0**-18, 32 * scale[V // 2 :]]).float()[None].repeat(2, 1)
    for top_k in (V // 2 + 1, V - 7):
        assert reads(logits, Filters(top_k=top_k, top_p=0.5)) <= 3


@DTYPES
def test_group_maxima_change_nothing_but_the_traffic(dtype, generator):
    logits = (torch.randn(6, V, generator=generator) * 3).to(dtype)
    logits[1] = grid(1, V, generator)[0].to(dtype)
    logits[2, 100:] = -math.inf
    filters = Filters(top_k=torch.tensor([3, 20, 31, 200, 32, 33]), top_p=torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.9]))
    temperature = torch.full((6,), HALVES)
    groups = logits.float().view(6, 32, 256).amax(dim=2)
    ones, bins = torch.ones(6, V), []
    for group_max in (None, groups, groups.t().contiguous().t(), groups[:, :3]):
        with count_traffic(logits=logits) as traffic:
            found = find(logits, temperature, filters, group_max=group_max, config=WIDE)
        bins.append(traffic.written[OTHER])
        if group_max is None:
            expected = found
        for name in ("min_weight", "kept_sum", "in_range"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        assert torch.equal(keeps(logits, ones, found), keeps(logits, ones, expected))
    assert bins[1] == bins[2] < bins[0]


def test_the_numbers_do_not_depend_on_the_tiling(generator):
    logits = torch.randn(16, 700, generator=generator) * 4
    filters = mixed(16, 700, generator)
    temperature = torch.rand(16, generator=generator) + 0.5
    one = find(logits, temperature, filters, config=Config(block_r=16, block_v=64, block_s=16))
    other = find(logits, temperature, filters, config=Config(block_r=2, block_v=1024, block_s=4))
    for name in vars(one):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_every_launch_is_one_of_the_variants(monkeypatch):
    launches = []
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, _, *given, **named: launches.append(specialise(kernel, *given, **named))
    )
    numbers = torch.ones(48)
    skip = torch.zeros(48, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for filters in (*ONE, *BOTH, Filters(min_p=0.5), Filters()):
            for chosen in (None, skip):
                ids = torch.zeros(48, dtype=torch.int32)
                logits, groups = torch.zeros(48, 4096, dtype=dtype), torch.zeros(48, 594)
                cutoffs(logits, numbers[:6], numbers, numbers, filters, ids, skip=chosen, group_max=groups)
        logits = torch.zeros(48, 4097, dtype=torch.bfloat16)
        cutoffs(logits, numbers[:6], numbers, numbers, BOTH[0], ids)
    variants = kernels.variants()
    for launch in launches:
        assert any(launch.is_described_by(variant) for variant in variants), launch
    assert {launch.kernel for launch in launches} == {variant.kernel for variant in variants}


@needs_interpreter
def test_offsets_do_not_overflow():
    far = 2**31 - 1
    logits, state = torch.zeros(1), torch.zeros(selection.FIELDS, 2, dtype=torch.int64)
    state[0], state[1] = 1, 0x3F800000  # searched, at a rate of 1
    touched = addresses_of(
        selection.count_kernel,
        (1,),
        logits_ptr=logits,
        row_max_ptr=torch.zeros(2),
        state_ptr=state,
        counts_ptr=torch.zeros(1, dtype=torch.int32),
        masses_ptr=torch.zeros(1, dtype=torch.int64),
        stride_ln=far,
        stride_lv=far,
        num_rows=2,
        vocab_size=4,
        STAGE=0,
        SLOTS=0,
        LOW=0,
        BLOCK_R=2,
        BLOCK_V=4,
    )
    assert {logits.data_ptr() + 4 * far * n for n in range(5)} <= touched


def test_errors_name_the_argument():
    logits, ids = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int32)
    good = {
        "logits": logits,
        "temperature": torch.ones(2),
        "row_max": torch.zeros(3),
        "row_sum": torch.ones(3),
        "filters": Filters(top_k=2),
        "request_ids": ids,
        "skip": torch.zeros(3, dtype=torch.bool),
        "group_max": torch.zeros(3, 2),
    }
    cutoffs(**good)
    for name, value, error in (
        ("logits", torch.zeros(5), ValueError),
        ("logits", torch.zeros(3, 0), ValueError),
        ("logits", logits.double(), TypeError),
        ("temperature", torch.ones(2, 1), ValueError),
        ("temperature", torch.ones(2, dtype=torch.float64), TypeError),
        ("row_max", torch.zeros(4), ValueError),
        ("row_max", torch.zeros(3, 2)[:, 0], ValueError),
        ("row_sum", torch.zeros(3).half(), TypeError),
        ("filters.top_k", Filters(top_k=torch.ones(3).long()), ValueError),
        ("request_ids", ids.float(), TypeError),
        ("request_ids", ids[:2], ValueError),
        ("skip", torch.zeros(3), TypeError),
        ("group_max", torch.zeros(2, 3), ValueError),
        ("group_max", torch.zeros(3, 3).half(), TypeError),
        ("row_max", torch.zeros(3, device="meta"), ValueError),
    ):
        with pytest.raises(error, match=f"^{name}"):
            cutoffs(**good | {name.split(".")[0]: value})


def test_the_sum_of_what_is_kept_is_as_accurate_as_the_references(generator):
    logits = torch.randn(8, V, generator=generator) * 2
    temperature = torch.full((8,), 3.0)
    for filters in (Filters(min_p=0.01), Filters(top_k=4000), Filters(top_p=0.9)):
        weights, _ = target_weights(logits.double(), temperature.double(), filters)
        found = find(logits, temperature, filters, config=WIDE)
        assert row_weights(logits, temperature)[0].isfinite().all()
        torch.testing.assert_close(found.kept_sum.double(), weights.sum(dim=1), rtol=3e-6, atol=0)


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_one_variant_of_each_kernel_compiles_for_sm_90():
    for report in compile_variants(one_per_kernel(kernels.variants()), "sm_90", jobs=1):
        assert report.problems == (), report

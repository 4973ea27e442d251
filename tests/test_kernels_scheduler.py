"""The scheduler kernels against the reference, bit for bit where only the last bit decides; the same tests run on a GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")

import triton
import triton.language as tl
from specialise import specialise
from test_kernels_verification_launch import addresses_of, needs_interpreter
from test_scheduler import GENTLE, TABLES, anticipates, survivals, tensor

from dsspark import CostTable
from dsspark.kernels import scheduler as kernels
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.kernels.ranking import _in_range, rank_kernel
from dsspark.reference import scheduler as reference
from dsspark.testing.audit import audit_scheduler

SMALL = kernels.Config(block_sort=0, own_r=2, other_r=4, block_n=8, block_r=4)
LARGE = kernels.Config(block_sort=0, own_r=32, other_r=256)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CONFIGS = pytest.mark.parametrize("config", [None, SMALL], ids=["chosen", "small"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


def assert_same(survival, table, device, max_tokens=None, configs=(None, SMALL)):
    """Compare all three functions with the reference on the CPU, whose sums are made one after another."""
    lengths = reference.schedule(survival, table, max_tokens=max_tokens)
    planned = reference.plan_budget(survival, table, max_tokens=max_tokens)
    there, table_there = survival.to(device), table.to(device)
    for config in configs:
        found = kernels.schedule(there, table_there, max_tokens=max_tokens, config=config)
        assert (found.dtype, found.tolist()) == (torch.int32, lengths.tolist())
        budget = kernels.plan_budget(there, table_there, max_tokens=max_tokens, config=config)
        assert (budget.dtype, budget.shape, budget.item()) == (torch.int32, (), planned.item())
        admitted = kernels.admit(there, budget, config=config)
        assert (admitted.dtype, admitted.tolist()) == (torch.int32, reference.admit(survival, planned).tolist())


# --- the same decisions ----------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(survivals(), st.sampled_from(TABLES), st.integers(0, 21), st.sampled_from(DTYPES))
def test_every_decision_is_the_references(device, rows, sps, slack, dtype):
    assert_same(tensor(rows, dtype), CostTable(sps), device, max_tokens=len(rows) + slack, configs=(SMALL,))


@settings(max_examples=15)
@given(survivals(), st.sampled_from(TABLES), st.integers(0, 21))
def test_every_decision_is_the_references_in_one_launch(device, rows, sps, slack):
    assert_same(tensor(rows, torch.float32), CostTable(sps), device, max_tokens=len(rows) + slack, configs=(None,))


@settings(max_examples=40)
@given(survivals(), st.integers(0, 25), st.sampled_from(DTYPES), st.sampled_from([None, torch.int32, torch.int64]))
def test_admit_is_the_references_for_every_budget(device, rows, budget, dtype, integer):
    survival = tensor(rows, dtype)
    expected = reference.admit(survival, budget).tolist()
    given_budget = budget if integer is None else torch.tensor(budget, dtype=integer, device=device)
    for config in (None, SMALL):
        assert kernels.admit(survival.to(device), given_budget, config=config).tolist() == expected


def products(shape, generator):
    return torch.rand(shape, generator=generator).pow(0.3).cumprod(dim=1)


MAKERS = {
    "random": products,
    "tied": lambda shape, generator: (products(shape, generator) * 8).round() / 8,
    "saturated": lambda shape, generator: torch.ones(shape),
    "equal": lambda shape, generator: torch.full(shape, 0.3),
    "zero": lambda shape, generator: torch.zeros(shape),
    "invalid": lambda shape, generator: torch.where(
        torch.rand(shape, generator=generator) < 0.1, math.nan, torch.randn(shape, generator=generator) * 2
    ),
    "minute": lambda shape, generator: products(shape, generator) * 1e-16,
}
SHAPES = [(1, 1), (1, 32), (3, 7), (17, 9), (65, 7), (300, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(MAKERS))
def test_every_size_and_kind_of_survivals(kind, shape, generator, device):
    survival = MAKERS[kind](shape, generator)
    candidates = survival.numel()
    tokens = torch.arange(shape[0] + candidates + 1, dtype=torch.float64)
    rates = 1 / (1 + tokens / (2 * candidates)) if kind in ("random", "tied", "invalid") else torch.ones_like(tokens)
    assert_same(survival, CostTable(rates), device, configs=(LARGE,))


LARGEST_SORTS = [
    pytest.param(kind, shape, marks=() if (kind, shape) == ("tied", (64, 7)) else pytest.mark.exhaustive)
    for kind in ("tied", "invalid", "minute")
    for shape in ((16, 32), (64, 7))
]
"""A sort of 512 takes seconds in the interpreter."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, shape) for kind in ("tied", "invalid", "minute") for shape in ((4, 32), (16, 8))] + LARGEST_SORTS,
    ids=str,
)
def test_as_many_as_one_launch_sorts(kind, shape, generator, device):
    survival = MAKERS[kind](shape, generator)
    for sps in ([1.0] * 600, [1 / (1 + n / 900) for n in range(600)]):
        assert_same(survival, CostTable(sps), device, configs=(None,))


@pytest.mark.exhaustive  # 282 million comparisons, in numpy
def test_more_than_sixteen_thousand_candidates(generator, device):
    survival = MAKERS["tied"]((2100, 8), generator)
    table = CostTable(1 / (1 + torch.arange(20_000, dtype=torch.float64) / 9_000))
    config = kernels.Config(block_sort=0, own_r=64, other_r=1024)
    lengths = kernels.schedule(survival.to(device), table.to(device), config=config).cpu()
    assert 1024 < lengths.sum() < 16_000
    assert torch.equal(lengths, reference.schedule(survival, table))


# --- the last bit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-9], ids=str)
def test_decisions_that_hang_on_the_last_bit(smallest, dtype, generator, device):
    """Theta is 1 up to its rounding at every step: any other order of the sums would show."""
    falling = torch.logspace(0, math.log10(smallest), 60, dtype=torch.float64)
    for _ in range(2):
        survival = (torch.rand(60, generator=generator, dtype=torch.float64) * falling).to(dtype)[:, None]
        ranked = survival.double().flatten().sort(descending=True).values
        tau = 60 + torch.cat((torch.zeros(1, dtype=torch.float64), ranked.cumsum(dim=0)))
        # The second rises by an ulp a step, more or less, so that Algorithm 1 goes on for a while.
        for rates in (1 / tau, 1 / tau * (1 + 2.0**-52 * torch.arange(61))):
            table = CostTable(torch.cat((torch.ones(60, dtype=torch.float64), rates)))
            assert_same(survival, table, device, configs=(LARGE,) if dtype == torch.float64 else (LARGE, None))


def test_sums_are_made_one_after_another(device):
    """After 2 ** 53 half-units a tree of the same terms finds more than single steps do: each of those is rounded away."""
    survival = torch.full((64, 2), 2.0**-47)
    survival[:, 0] = 1.0
    table = CostTable(torch.ones(200))  # tau = 128 + n 2 ** -47; one step is half an ulp, to even
    lengths = reference.schedule(survival, table)
    assert lengths.sum() == 64
    assert_same(survival, table, device, configs=(None, SMALL, LARGE))


def test_throughput_is_computed_in_float64(device):
    rows = torch.ones(256, 1)
    rows[-1] = 2.0**-30
    assert_same(rows, CostTable(torch.ones(600)), device, configs=(LARGE,))
    assert kernels.schedule(rows.to(device), CostTable(torch.ones(600)).to(device), config=LARGE).sum() == 256
    close = CostTable([1.0, 1.0, 0.5 + 2.0**-40])
    assert kernels.schedule(torch.ones(1, 1, device=device), close.to(device)).tolist() == [1]


# --- what it means ---------------------------------------------------------------------------------------------------


@CONFIGS
def test_appendix_a_and_the_staircase(config, device):
    table = CostTable([1.0, 1.0, 0.5, 0.45]).to(device)
    for row in ([0.8, 0.72], [0.8, 0.0]):
        assert kernels.schedule(torch.tensor([row], device=device), table, config=config).tolist() == [0]
    for row, length in (([0.8, 0.72], 2), ([0.8, 0.0], 0)):  # the global search over current survivals
        assert kernels.plan_budget(torch.tensor([row], device=device), table, config=config).item() == length
    rows = torch.tensor([[0.9, 0.8, 0.7]] * 2, device=device)
    stairs = CostTable.from_points([2, 8], [1.0, 1.6]).to(device)
    assert kernels.schedule(rows, stairs, config=config).tolist() == [0, 0]
    for max_tokens, budget in ((None, 6), (5, 3), (3, 0)):
        assert kernels.plan_budget(rows, stairs, max_tokens=max_tokens, config=config).item() == budget


@CONFIGS
def test_the_kernels_do_not_anticipate_and_a_global_search_does(config):
    levels, table = (0.5, 1.0), CostTable([1.0, 1.0, 1.0, 0.7, 0.7])
    assert not anticipates(lambda rows: kernels.schedule(rows, table, config=config).tolist(), levels)
    assert not anticipates(lambda rows: kernels.admit(rows, 2, config=config).tolist(), levels)
    dear = CostTable([1.0, 1.0, 1.0, 1.0, 0.7, 0.6, 0.6])

    def retrospective(rows):
        return kernels.admit(rows, kernels.plan_budget(rows, dear, config=config), config=config).tolist()

    assert anticipates(retrospective, levels)


def test_the_audit_passes_the_kernel():
    def admission(survival, table):
        return kernels.schedule(survival, table, config=SMALL)

    audit_scheduler(admission, max_examples=3).assert_lossless()


@CONFIGS
def test_a_limit_cuts_ties_by_position_then_request(config, generator, device):
    table = CostTable(torch.ones(100))
    for survival in (torch.ones(4, 3), (products((4, 3), generator) * 3).round() / 3):
        for slack in (1, 2, 4, 5, 6, 9):
            expected = reference.schedule(survival, table, max_tokens=4 + slack)
            found = kernels.schedule(survival.to(device), table.to(device), max_tokens=4 + slack, config=config)
            assert found.tolist() == expected.tolist()
            assert kernels.admit(survival.to(device), slack, config=config).tolist() == expected.tolist()


# --- hostile input ---------------------------------------------------------------------------------------------------


@CONFIGS
def test_any_stride_is_read_where_it_lies(config, generator, device):
    rows = products((9, 5), generator).to(device)
    table = CostTable(GENTLE).to(device)
    expected = [kernels.schedule(rows, table), kernels.admit(rows, 11), kernels.plan_budget(rows, table)]
    padded = torch.full((9, 8), math.inf, device=device)
    padded[:, :5] = rows
    interleaved = torch.stack((rows, torch.full_like(rows, math.nan)), dim=-1)[..., 0]
    for form in (padded[:, :5], interleaved, rows.t().contiguous().t(), rows.clone().requires_grad_()):
        before = form.detach().clone()
        assert torch.equal(kernels.schedule(form, table, config=config), expected[0])
        assert torch.equal(kernels.admit(form, 11, config=config), expected[1])
        assert torch.equal(kernels.plan_budget(form, table, config=config), expected[2])
        assert torch.equal(form.detach(), before)
    row = rows[:1].expand(9, 5)
    assert torch.equal(kernels.admit(row, 11, config=config).cpu(), reference.admit(row.cpu(), 11))


@CONFIGS
def test_nothing_to_do(config, device):
    empty, table = torch.zeros(0, 3, device=device), CostTable(GENTLE).to(device)
    for limit in (0, 5, None):
        assert kernels.schedule(empty, table, max_tokens=limit, config=config).tolist() == []
        assert kernels.plan_budget(empty, table, max_tokens=limit, config=config).tolist() == 0
    assert kernels.admit(empty, 4, config=config).tolist() == []
    rows = torch.ones(3, 2, device=device)
    assert kernels.schedule(rows, table, max_tokens=3, config=config).tolist() == [0, 0, 0]
    assert kernels.plan_budget(rows, table, max_tokens=3, config=config).tolist() == 0
    assert kernels.admit(rows, 0, config=config).tolist() == [0, 0, 0]
    assert kernels.admit(rows, 2**70, config=config).tolist() == [2, 2, 2]
    assert kernels.admit(rows, torch.tensor(2**62, device=device), config=config).tolist() == [2, 2, 2]


def test_a_negative_budget_that_only_the_device_sees_admits_nothing(monkeypatch, device):
    monkeypatch.setattr(kernels, "check_budget_arguments", lambda *arguments: None)
    budget = torch.tensor(-3, device=device)
    assert kernels.admit(torch.ones(3, 2, device=device), budget).tolist() == [0, 0, 0]


@triton.jit
def in_range_kernel(x_ptr, out_ptr):
    offs = tl.arange(0, 8)
    tl.store(out_ptr + offs, _in_range(tl.load(x_ptr + offs)))


def test_what_is_no_survival_becomes_one_bit_for_bit(device):
    """A maximum would do for the order, but of -0 and 0, and of NaN, the interpreter's and a GPU's need not be the same."""
    negative_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    x = torch.tensor([math.nan, -0.0, -1.0, math.inf, -math.inf, 2.0, 0.5, negative_nan], device=device)
    out = torch.empty_like(x)
    in_range_kernel[(1,)](x, out)
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    assert torch.equal(out.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_ends_a_prefix_wherever_it_stands(dtype, device):
    rows = torch.tensor(
        [[math.nan, 0.9], [0.5, -0.0], [1.0, -math.nan], [math.inf, 0.3], [-math.inf, 1.0]], dtype=dtype
    )
    assert_same(rows, CostTable(torch.ones(20)), device, configs=(None, SMALL))
    assert kernels.schedule(rows.to(device), CostTable(torch.ones(20)).to(device)).tolist() == [0, 1, 1, 2, 0]


@needs_interpreter
def test_offsets_do_not_overflow():
    far = 2**30
    survival, lengths = torch.ones(4), torch.zeros(4, dtype=torch.int32)
    touched = addresses_of(
        rank_kernel,
        (1,),
        survival_ptr=survival,
        sorted_ptr=None,
        ranks_ptr=None,
        budget_ptr=None,
        lengths_ptr=lengths,
        budget=1,
        num_requests=3,
        block_size=3,
        stride_ar=far,
        stride_ak=far,
        COMPUTE=tl.float32,
        OWN_R=4,
        OTHER_R=4,
        BLOCK_K=8,
    )
    assert {survival.data_ptr() + 4 * far * n for n in range(5)} <= touched


# --- contract and launches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("schedule", (torch.ones(2), CostTable(GENTLE)), {}),
        ("schedule", (torch.ones(3, 33), CostTable(GENTLE)), {}),
        ("schedule", (torch.ones(3, 2).long(), CostTable(GENTLE)), {}),
        ("schedule", (torch.ones(3, 2), CostTable([1.0, 1.0, 1.0])), {}),
        ("plan_budget", (torch.ones(3, 2), CostTable(GENTLE)), {"max_tokens": 2}),
        ("plan_budget", (torch.ones(3, 2), CostTable(GENTLE)), {"max_tokens": 4.0}),
        ("plan_budget", (torch.ones(3, 2, device="meta"), CostTable(GENTLE)), {}),
        ("admit", (torch.ones(3, 2), -1), {}),
        ("admit", (torch.ones(3, 2), torch.tensor(-1)), {}),
        ("admit", (torch.ones(3, 2), torch.tensor([1])), {}),
        ("admit", (torch.ones(3, 2), True), {}),
    ],
)
def test_errors_are_the_references(name, arguments, options):
    with pytest.raises((ValueError, TypeError)) as expected:
        getattr(reference, name)(*arguments, **options)
    with pytest.raises(expected.type) as found:
        getattr(kernels, name)(*arguments, **options)
    assert str(found.value) == str(expected.value)


def test_a_configuration_that_cannot_hold_the_candidates_is_refused():
    rows, table = torch.ones(17, 8), CostTable(GENTLE)
    config = kernels.Config(block_sort=128, own_r=8)
    for survival in (rows, rows[:3].double()):
        with pytest.raises(ValueError, match="block_sort = 128"):
            kernels.schedule(survival, table, config=config)


def on_no_device(table):
    """Move a table where nothing can be read."""
    object.__setattr__(table, "sps", table.sps.to("meta"))
    return table


def test_launches_are_one_or_two_are_listed_and_the_host_reads_nothing(monkeypatch):
    launches = []
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, _, *given, **named: launches.append(specialise(kernel, *given, **named))
    )
    table = on_no_device(CostTable(torch.ones(40_000)))
    listed = kernels.variants()
    for num_requests, gamma in itertools.product((1, 4, 16, 64, 65, 2048), (7, 16)):
        rows = torch.empty(num_requests, gamma, device="meta")
        sorts = num_requests * (8 if gamma == 7 else 32) <= 512
        for function in (kernels.schedule, kernels.plan_budget):
            launches.clear()
            function(rows, table)
            assert len(launches) == (1 if sorts else 2)
            assert all(any(launch.is_described_by(variant) for variant in listed) for launch in launches), launches
        for budget in (5, torch.empty((), dtype=torch.int32, device="meta"), torch.empty((), device="meta").long()):
            launches.clear()
            kernels.admit(rows, budget)
            assert len(launches) == 1
            assert any(launches[0].is_described_by(variant) for variant in listed), launches
    for dtype in DTYPES:
        launches.clear()
        kernels.schedule(torch.empty(16, 7, device="meta", dtype=dtype), table)
        kernels.admit(torch.empty(16, 7, device="meta", dtype=dtype), torch.empty((), dtype=torch.int32, device="meta"))
        assert all(any(launch.is_described_by(variant) for variant in listed) for launch in launches), launches


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_every_kernel_compiles_for_sm_90():
    for report in compile_variants(one_per_kernel(kernels.variants()), "sm_90", jobs=1):
        assert report.problems == (), report

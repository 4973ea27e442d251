"""The calibration kernels against the references, in the interpreter; the same tests run compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from specialise import specialise
from test_calibration import GRID, A, Z, overconfident
from test_kernels_verification_launch import addresses_of, needs_interpreter

from benchmarks.traffic import OTHER, count_traffic
from dsspark.kernels import calibration as kernels
from dsspark.kernels.calibration import Config, expected_calibration_error, fit_sts
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.reference import calibration as reference

SMALL = Config(block_s=64, num_warps=4)
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
OUTCOMES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


def dyadic(count, gamma, generator, device="cpu"):
    """Return logits at which survival and its sums are exact at every position, and outcomes: of 0, -inf and inf."""
    values = torch.tensor([0.0, 0.0, math.inf, math.inf, -math.inf])
    logits = values[torch.randint(5, (count, gamma), generator=generator)]
    accepted = (torch.rand(count, gamma, generator=generator) < 0.7).cumprod(dim=1).bool()
    return logits.to(device), accepted.to(device)


def assert_fits_alike(found, logits, accepted, num_bins, grid):
    """Compare with the reference; where the temperatures differ, their errors there must be within rounding. Return how many do."""
    expected = reference.fit_sts(logits, accepted, num_bins=num_bins, grid=grid)
    slack = 3 / len(logits) if logits.dtype != torch.float64 else 1e-9  # three samples at the edge of a bin
    torch.testing.assert_close(found.ece_before, expected.ece_before, rtol=1e-5, atol=slack)
    for k in range(logits.shape[1]):
        if found.temperatures[k] != expected.temperatures[k]:
            assert abs(found.ece_after[k] - expected.ece_after[k]) <= slack
            return logits.shape[1] - k  # what follows depends on it
        assert abs(found.ece_after[k] - expected.ece_after[k]) <= slack
    return 0


@FLOATS
@pytest.mark.parametrize("num_bins", [1, 7, 20, 33])
def test_the_fit_is_the_references(dtype, num_bins, generator, device):
    logits, accepted = overconfident(900, 4, generator)
    logits, accepted = logits.to(device, dtype), accepted.to(device)
    found = fit_sts(logits, accepted, num_bins=num_bins, grid=GRID)
    assert assert_fits_alike(found, logits, accepted, num_bins, GRID) == 0
    assert {value.dtype for value in vars(found).values()} == {torch.float32}


def test_the_default_grid_and_many_samples(generator, device):
    different = 0
    for true_temperature in (0.7, 2.0):
        logits, accepted = overconfident(6_000, 3, generator, true_temperature=true_temperature)
        found = fit_sts(logits.to(device), accepted.to(device), config=Config(block_s=2048))
        different += assert_fits_alike(found, logits.to(device), accepted.to(device), 20, None)
    assert different <= 1


@pytest.mark.parametrize("gamma", [1, 2, 32])
def test_exact_sums_are_exact(gamma, generator, device):
    """Survival in powers of two: every sum is exact in both bodies, so temperatures and errors are equal bit for bit."""
    logits, accepted = dyadic(300, gamma, generator, device)
    for grid in ([1.0, 2.0], [3.0]):
        found = fit_sts(logits, accepted, grid=grid, config=SMALL)
        expected = reference.fit_sts(logits, accepted, grid=grid)
        for name in vars(found):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_ties_take_the_first_of_the_grid_wherever_it_lies(device):
    logits = torch.tensor([[math.inf, 0.0], [-math.inf, 0.0]], device=device)  # no temperature changes anything
    accepted = torch.tensor([[1, 1], [0, 0]], device=device)
    for grid in (GRID, GRID[::-1], [5.0] + [2.0] * 40):
        assert fit_sts(logits, accepted, grid=grid).temperatures.tolist() == [grid[0], grid[0]]
    logits = torch.full(
        (4, 1), 2.1972246, device=device
    )  # sigmoid(2.197 / 2) = 3/4, and the best comes twice, far apart
    grid = [1.0] + [4.0] * 20 + [2.0] + [8.0] * 20 + [2.0]
    found = fit_sts(logits, torch.tensor([[1], [1], [1], [0]], device=device), grid=grid)
    assert found.temperatures.item() == 2.0
    assert found.ece_after.item() == pytest.approx(0, abs=1e-6)


@FLOATS
@pytest.mark.parametrize("num_bins", [1, 3, 20, 100])
def test_the_error_is_the_references(dtype, num_bins, generator, device):
    p = torch.rand(700, generator=generator)
    p[:40] = torch.linspace(0, 1, 40)  # bin edges, exact 0 and exact 1
    y = (torch.rand(700, generator=generator) < p).to(device)
    p = p.to(device, dtype)
    for outcomes in (y, y.float()):
        found = expected_calibration_error(p, outcomes, num_bins=num_bins)
        expected = reference.expected_calibration_error(p, outcomes, num_bins=num_bins)
        assert (found.dtype, found.shape) == (torch.float32, ())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(expected_calibration_error(p, y, num_bins=num_bins, config=SMALL), found, rtol=0, atol=0)


def test_confidence_of_exactly_zero_and_one_counts(device):
    p = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0], device=device)
    y = torch.tensor([1, 0, 1, 0, 0], device=device)
    for num_bins in (1, 2, 20, 32, 64):
        found = expected_calibration_error(p, y, num_bins=num_bins)
        assert torch.equal(found, reference.expected_calibration_error(p, y, num_bins=num_bins))
    assert found.item() == pytest.approx(3 / 5)
    logits = torch.full((10, 1), 200.0, device=device)
    fit = fit_sts(logits, torch.tensor([[1], [0]] * 5, device=device), grid=[1.0, 200.0, 4000.0])
    assert fit.temperatures.tolist() == [4000.0]
    assert fit.ece_before.tolist() == [0.5]


def test_every_stride_and_outcome_dtype(generator, device):
    logits, accepted = overconfident(150, 3, generator)
    logits, accepted = logits.to(device), accepted.to(device)
    expected = fit_sts(logits, accepted, grid=GRID, config=SMALL)
    wide = torch.full((150, 8), math.nan, device=device)
    wide[:, :6:2] = logits
    forms = [(logits, accepted.to(dtype)) for dtype in OUTCOMES]
    forms += [(logits.t().contiguous().t(), accepted), (wide[:, :6:2], accepted.int().t().contiguous().t())]
    forms += [(logits.requires_grad_(), accepted)]
    for form in forms:
        found = fit_sts(*form, grid=torch.tensor(GRID, device=device).repeat_interleave(2)[::2], config=SMALL)
        for name in vars(found):
            assert torch.equal(getattr(found, name), getattr(expected, name))
    p, y = (
        torch.rand(6, 5, 7, generator=generator).to(device),
        torch.randint(2, (6, 5, 7), generator=generator).to(device),
    )
    error = expected_calibration_error(p, y)
    assert torch.equal(error, expected_calibration_error(p.flatten(), y.flatten()))
    mixed = expected_calibration_error(p.permute(2, 0, 1), y.permute(2, 0, 1).contiguous())
    assert torch.equal(mixed, error)


def test_the_order_of_samples_and_programs_changes_nothing(generator, device):
    logits, accepted = overconfident(500, 3, generator)
    order = torch.randperm(500, generator=generator)
    one = fit_sts(logits.to(device), accepted.to(device), grid=GRID)
    other = fit_sts(logits[order].to(device), accepted[order].to(device), grid=GRID, config=SMALL)
    for name in vars(one):
        assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("logits", "accepted", "options"),
    [
        (Z[:0], A[:0], {}),
        (Z[0], A[0], {}),
        (torch.zeros(4, 33), torch.zeros(4, 33), {}),
        (Z.long(), A, {}),
        (Z * math.nan, A, {}),
        (Z, A[:3], {}),
        (Z, A.flip(1), {}),
        (Z, A * 2, {}),
        (Z, A.tolist(), {}),
        (Z, A.to(torch.int8), {}),
        (Z, A, {"grid": []}),
        (Z, A, {"grid": [1.0, 0.0]}),
        (Z, A, {"grid": [[1.0]]}),
        (Z, A, {"num_bins": 0}),
    ],
)
def test_the_errors_of_the_fit_are_the_references(logits, accepted, options):
    with pytest.raises((ValueError, TypeError)) as expected:
        reference.fit_sts(logits, accepted, **options)
    with pytest.raises(expected.type) as found:
        fit_sts(logits, accepted, **options)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("p", "y", "num_bins"),
    [
        (torch.tensor([0.5, 1.01]), torch.tensor([0, 1]), 20),
        (torch.tensor([0.5, math.nan]), torch.tensor([0, 1]), 20),
        (torch.tensor([0.5, -0.01]), torch.tensor([0, 1]), 20),
        (torch.tensor([0.5, 0.5]), torch.tensor([0, 2]), 20),
        (torch.tensor([0.5, 0.5]), torch.tensor([0]), 20),
        (torch.tensor([]), torch.tensor([]), 20),
        (torch.tensor([1, 0]), torch.tensor([0, 1]), 20),
        (torch.tensor([0.5]), torch.tensor([0]), True),
    ],
)
def test_the_errors_of_the_error_are_the_references(p, y, num_bins):
    with pytest.raises((ValueError, TypeError)) as expected:
        reference.expected_calibration_error(p, y, num_bins=num_bins)
    with pytest.raises(expected.type) as found:
        expected_calibration_error(p, y, num_bins=num_bins)
    assert str(found.value) == str(expected.value)


@needs_interpreter
def test_one_pass_over_the_samples_a_position(generator):
    count, gamma = 2_000, 5
    logits, accepted = overconfident(count, gamma, generator)
    accepted = accepted.float()
    for grid in ([1.0], GRID):
        with count_traffic(logits=logits, accepted=accepted) as traffic:
            fit_sts(logits, accepted, grid=grid)
        assert traffic.read["accepted"] == accepted.nbytes
        # Every position once, and all but the last once more for the survival up to there.
        assert traffic.read["logits"] == logits.nbytes + (gamma - 1) * count * 4
        bins = 4 * (len(grid) + 1) * 20 * 8 * gamma * 2  # programs, temperatures, bins
        carried = (2 * gamma - 3 + 2 * gamma - 2) * count * 4
        assert traffic.read[OTHER] <= carried + bins
        assert traffic.written[OTHER] <= carried + bins


@pytest.mark.parametrize("num_samples", [1, 2**20, 2**22, 2**22 + 1, 2**31, 2**40])
def test_the_largest_sum_fits(num_samples):
    bits = kernels.fraction_bits(num_samples)
    assert num_samples << bits < 2**63
    assert bits == 40 or num_samples << (bits + 2) >= 2**63


def test_two_launches_a_position_that_the_variants_describe(monkeypatch, generator):
    launches = []
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, _, *given, **named: launches.append(specialise(kernel, *given, **named))
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for outcomes in (torch.bool, torch.int64, torch.float32):
            logits, accepted = torch.zeros(64, 7, dtype=dtype), torch.zeros(64, 7, dtype=outcomes)
            fit_sts(logits, accepted)
            assert len(launches) == 14
            expected_calibration_error(logits[:, 0].contiguous(), accepted[:, 0].contiguous())
            variants = kernels.variants()
            for launch in launches:
                assert any(launch.is_described_by(variant) for variant in variants), launch
            launches.clear()


@needs_interpreter
def test_offsets_do_not_overflow():
    far = 2**31 - 1
    logits = torch.zeros(1)
    touched = addresses_of(
        kernels.grid_kernel,
        (1,),
        logits_ptr=logits,
        accepted_ptr=logits,
        grid_ptr=torch.ones(1),
        temperatures_ptr=torch.ones(3),
        fitted_ptr=torch.ones(2),
        plain_ptr=torch.ones(2),
        sums_ptr=torch.zeros(3, 2, 4, dtype=torch.int64),
        stride_zs=far,
        stride_zk=far,
        stride_ys=far,
        stride_yk=far,
        position=2,
        block_size=3,
        num_samples=2,
        num_bins=4,
        grid_size=1,
        COMPUTE=kernels._TRITON_FLOATS[torch.float32],
        BITS=40,
        BINS=4,
        BLOCK_S=2,
    )
    assert {logits.data_ptr() + 4 * far * n for n in (1, 2, 3)} <= touched


@pytest.mark.exhaustive  # `make test` compiles every variant for sm_90, outside of pytest
def test_one_variant_of_each_kernel_compiles_for_sm_90():
    for report in compile_variants(one_per_kernel(kernels.variants()), "sm_90", jobs=1):
        assert report.problems == (), report

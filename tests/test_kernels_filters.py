"""The cutoffs of top-k, top-p and min-p against the reference, in the interpreter; the same tests run compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from dsspark import Filters
from dsspark.kernels import filters as kernels
from dsspark.kernels.filters import Config, cutoffs, kept
from dsspark.numerics import row_weights
from dsspark.reference.filters import filter_weights, select_requests, target_weights

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SMALL = Config(block_r=64, block_v=16, block_s=64, num_warps=4)
LARGE = Config(block_r=4, block_v=2048, block_s=16)
HALVES = math.log2(math.e)
"""The temperature at which a step of 1 in the logits halves a weight, exactly."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


def find(logits, temperature, filters, ids=None, **options):
    """Return the cutoffs of rows whose statistics are the reference's."""
    ids = torch.arange(len(logits), dtype=torch.int32, device=logits.device) if ids is None else ids
    _, row_max, row_sum = row_weights(logits, temperature[ids.clamp(min=0).long()])
    return cutoffs(logits, temperature, row_max, row_sum, filters, ids, **options)


def keeps(logits, weights, found):
    """Return which tokens `kept` keeps."""
    token = torch.arange(logits.shape[1], device=logits.device)
    columns = (column[:, None] for column in (found.threshold, found.last_id, found.min_weight))
    return kept.fn(logits.float(), token, weights, *columns) & (weights > 0)


def mixed(num_rows, vocab_size, generator, device="cpu"):
    """Return filters of every kind, per request."""

    def pick(values):
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)].to(device)

    return Filters(
        top_k=pick([0, 0, 1, 2, 5, max(1, vocab_size // 2), max(1, vocab_size - 1), vocab_size, vocab_size + 3]),
        top_p=pick([1.0, 1.0, 2.0**-9, 0.25, 0.5, 0.75, 0.875, 0.99]),
        min_p=pick([0.0, 0.0, 0.0, 0.0625, 0.25, 0.26, 1.0]).to(torch.float64),
    )


def grid(num_rows, vocab_size, generator, device="cpu", levels=7):
    """Return logits of few integer levels, many of them tied, some -inf."""
    logits = -torch.randint(levels, (num_rows, vocab_size), generator=generator).float()
    masked = torch.rand(num_rows, vocab_size, generator=generator) < 0.3
    masked[torch.arange(num_rows), torch.randint(vocab_size, (num_rows,), generator=generator)] = False
    shift = torch.randint(-3, 4, (num_rows, 1), generator=generator)
    return (logits.masked_fill(masked, -math.inf) + shift).to(device)


def assert_exact(logits, filters, found):
    """Compare with the reference on weights that are powers of two, whose sums are exact."""
    x = logits.double()
    weights = torch.exp2(x - x.amax(dim=1, keepdim=True)).float()
    expected, in_range = filter_weights(logits.float(), weights, filters)
    assert torch.equal(found.in_range, in_range)
    assert torch.equal(keeps(logits, weights, found), expected > 0)
    assert torch.equal(found.kept_sum, expected.double().sum(dim=1).float())


@DTYPES
@pytest.mark.parametrize("vocab_size", [1, 2, 37, 300])
def test_ties_are_cut_as_in_the_reference(dtype, vocab_size, generator, device):
    logits = grid(64, vocab_size, generator, device).to(dtype)
    filters = mixed(64, vocab_size, generator, device)
    temperature = torch.full((64,), HALVES, device=device)
    wide = Config(block_r=32, block_v=512, block_s=64)
    assert_exact(logits, filters, find(logits, temperature, filters, config=wide if vocab_size == 300 else SMALL))
    some = Filters(**{name: value[:5] for name, value in vars(filters).items()})
    assert_exact(logits[:5], some, find(logits[:5], temperature[:5], some))


@DTYPES
def test_a_share_that_is_reached_exactly_needs_no_further_token(dtype, device):
    """The law (8, 4, 2, 1, 1) / 16, its tokens out of order: top-p at, just below and just above its running masses."""
    logits = torch.tensor([[-3.0, -1.0, 0.0, -3.0, -2.0]], dtype=dtype, device=device).repeat(9, 1)
    just = 2.0**-20
    top_p = torch.tensor([0.5, 0.5 + just, 0.75, 0.75 + just, 0.875, 0.9375, 0.9375 + just, 0.5 - just, 0.75])
    top_k = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 2])  # 3/4 of (8, 4) / 12 takes both
    expected = [[2], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4], [2], [1, 2]]
    filters = Filters(top_k=top_k.to(device), top_p=top_p.to(device))
    found = find(logits, torch.full((9,), HALVES, device=device), filters, config=SMALL)
    assert [row.nonzero()[:, 0].tolist() for row in keeps(logits, torch.ones(9, 5, device=device), found)] == expected


@DTYPES
def test_large_rows_are_cut_as_in_the_reference(dtype, generator, device):
    logits = grid(12, 8193, generator, device, levels=30).to(dtype)
    logits[0] = 2.0  # all equal
    logits[1, 5:] = -math.inf
    filters = mixed(12, 8193, generator, device)
    filters.top_k[:2] = torch.tensor([4097, 3])
    filters.top_p[2:4] = 0.75
    filters.top_k[3] = 4000
    assert_exact(logits, filters, find(logits, torch.full((12,), HALVES, device=device), filters, config=LARGE))


@DTYPES
def test_a_tie_at_rank_k_keeps_the_lowest_ids_wherever_it_is_cut(dtype, device):
    """The last id kept lies at the first and last token of tiles and of the 64 parts of a row."""
    vocab_size = 8193
    ranks = torch.tensor([1, 15, 16, 17, 2047, 2048, 2049, 4096, 4097, 6000, 8191, 8192])
    logits = torch.zeros(len(ranks), vocab_size, dtype=dtype, device=device)
    logits[:, ::2] = -1.0
    temperature = torch.full((len(ranks),), HALVES, device=device)
    found = find(logits, temperature, Filters(top_k=ranks.to(device)), config=LARGE)
    odd = vocab_size // 2
    expected = torch.where(ranks <= odd, 2 * ranks - 1, 2 * (ranks - odd - 1))
    split = (ranks != odd).to(device)
    assert torch.equal(found.last_id[split].cpu().long(), expected[split.cpu()])
    assert torch.equal(found.threshold[split].cpu(), torch.where(ranks <= odd, 0.0, -1.0)[split.cpu()])
    assert_exact(logits, Filters(top_k=ranks.to(device)), found)


def unlike(logits, temperature, filters, found):
    """Return how far from the target of top-p's share the tokens lie in which the cutoffs differ from the reference, per row."""
    weights, _, _ = row_weights(logits, temperature)
    expected, _ = target_weights(logits, temperature, filters)
    different = keeps(logits, weights, found) != (expected > 0)
    distance = torch.zeros(len(logits), dtype=torch.float64)
    for row in different.any(dim=1).nonzero()[:, 0].tolist():
        order = logits[row].float().sort(descending=True, stable=True).indices
        mass = weights[row, order].double()
        top_k, top_p, min_p = (float(torch.as_tensor(v).expand(len(logits))[row]) for v in vars(filters).values())
        mass = mass[: int(top_k)] if top_k else mass
        running = mass.cumsum(0) / mass.sum()
        at = different[row, order].nonzero()[:, 0]
        near = torch.minimum((running[at] - top_p).abs(), (running[at] - mass[at] / mass.sum() - top_p).abs())
        distance[row] = torch.minimum(near, (mass[at] / min_p - 1).abs() if min_p else near).max()
    return distance


@DTYPES
def test_continuous_rows_differ_only_within_rounding_of_the_crossing(dtype, generator, device):
    num_rows, vocab_size = 16, 2500
    scale = torch.logspace(-1, 1, num_rows)[:, None]
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * scale + 5).to(device, dtype)
    temperature = torch.logspace(-1.3, 1.7, num_rows)[torch.randperm(num_rows, generator=generator)].to(device)
    filters = Filters(
        top_k=torch.randint(0, 2000, (num_rows,), generator=generator).to(device),
        top_p=(torch.rand(num_rows, generator=generator) * 0.98 + 0.01).to(device),
        min_p=(torch.rand(num_rows, generator=generator) ** 8).to(device),
    )
    none = torch.zeros(num_rows, device=device)
    for chosen in (
        filters,
        Filters(top_k=filters.top_k, top_p=1 - none, min_p=none),
        Filters(top_k=none.long(), top_p=filters.top_p, min_p=none),
    ):
        found = find(logits, temperature, chosen, config=Config(block_r=16, block_v=1024, block_s=16))
        distance = unlike(logits, temperature, chosen, found)
        assert distance.max() < 1e-6
        assert (distance > 0).sum() <= 1
        _, total = target_weights(logits, temperature, chosen)
        torch.testing.assert_close(found.kept_sum, total, rtol=1e-5, atol=0)


@DTYPES
def test_top_p_while_the_mass_that_top_k_leaves_is_not_known_yet(dtype, generator, device):
    """Top-k cuts bins of much mass, at every level: the share that top-p seeks lies on either side of a bin's edge."""
    rows, vocab_size = 48, 600
    logits = (torch.rand(rows, vocab_size, generator=generator) * 24 - 12).to(device, dtype)
    logits[::3] = (8 + torch.rand(16, vocab_size, generator=generator) * 1e-3).to(device, dtype)
    top_k = torch.randint(1, vocab_size, (rows,), generator=generator).to(device)
    top_p = torch.linspace(0.02, 0.98, rows)[torch.randperm(rows, generator=generator)].to(device)
    temperature = torch.where(torch.arange(rows, device=device) % 3 == 0, 2e-4, 30.0)
    filters = Filters(top_k=top_k, top_p=top_p)
    found = find(logits, temperature, filters, config=Config(block_r=16, block_v=1024, block_s=64))
    distance = unlike(logits, temperature, filters, found)
    assert distance.max() < 1e-6
    assert (distance > 0).sum() <= 1


@DTYPES
def test_top_p_beyond_the_bin_that_the_least_mass_points_to(dtype, generator, device):
    """Bins of the first pass are 4 wide here: 28.5 is in the first, the others are in the second, which top-k cuts among its heavier half.

    Top-p's share of what is left lies in the second bin, though the same share of the least that can be left lies in the first.
    """
    logits = torch.tensor([28.5] * 200 + [24.375] * 1000 + [20.625] * 1000)[torch.randperm(2200, generator=generator)]
    logits = logits[None].to(device, dtype).repeat(3, 1)
    temperature = torch.full((3,), 4.0, device=device)
    filters = Filters(top_k=700, top_p=torch.tensor([0.54, 0.57, 0.6], device=device))
    found = find(logits, temperature, filters, config=LARGE)
    expected, _ = target_weights(logits, temperature, filters)
    assert torch.equal(keeps(logits, torch.ones_like(expected), found), expected > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_an_ulp_apart_where_both_filters_cut(dtype, device):
    """Every token in neighbouring keys, or every key far from the next: the passes in the middle are all needed."""
    width, vocab_size = (torch.int32, 3000) if dtype == torch.float32 else (torch.int16, 700)
    bits = torch.arange(vocab_size, device=device).to(width)
    near = (torch.tensor(16.0, dtype=dtype, device=device).view(width) + bits // 3).view(dtype)
    far = (bits * (2**31 - 2**24 if width == torch.int32 else 2**15 - 2**11) // vocab_size).to(width).view(dtype)
    logits = torch.stack([near, near.flip(0), far, -far, torch.cat([far[::2], -far[::2]])[:vocab_size]])
    logits = logits.repeat_interleave(4, dim=0)
    rows = len(logits)
    temperature = torch.where(torch.arange(rows, device=device) < 8, 1e-3, 1e38 if dtype == torch.float32 else 2e4)
    top_k = torch.tensor([vocab_size // 2 + 1, vocab_size - 1, 0, 100], device=device).repeat(5)
    top_p = torch.tensor([0.9, 0.5, 0.7, 1.0], device=device).repeat(5)
    filters = Filters(top_k=top_k, top_p=top_p)
    found = find(logits, temperature, filters, config=LARGE)
    distance = unlike(logits, temperature, filters, found)
    assert distance.max() < 1e-6
    assert (distance > 0).sum() <= 2


def test_minus_zero_ties_with_zero(device):
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0], [0.0, -0.0, 0.0, 1e-30]], device=device)
    for top_k in (1, 2, 3):
        found = find(logits, torch.full((2,), HALVES, device=device), Filters(top_k=top_k), config=SMALL)
        expected = [list(range(top_k)), sorted([3, *range(top_k - 1)])]
        assert [row.nonzero()[:, 0].tolist() for row in keeps(logits, torch.ones_like(logits), found)] == expected


def test_each_row_takes_the_filters_and_the_temperature_of_its_request(generator, device):
    logits = torch.randn(12, 37, generator=generator).to(device) * 3
    ids = torch.tensor([2, 0, -1, 1, 2, 2, 0, -1, 5, 1, 0, 3], dtype=torch.int32, device=device)
    filters = Filters(
        top_k=torch.tensor([3, 0, 7, 1], device=device), top_p=torch.tensor([1.0, 0.6, 0.9, 0.5]).to(device)
    )
    temperature = torch.tensor([0.5, 1.0, 3.0, 0.0], device=device)
    skip = torch.zeros(12, dtype=torch.bool, device=device)
    skip[5] = True
    clamped = ids.clamp(0, 3).long()
    weights, row_max, row_sum = row_weights(logits, temperature[clamped])
    for config in (None, SMALL):
        found = cutoffs(logits, temperature, row_max, row_sum, filters, ids, skip=skip, config=config)
        live = (ids >= 0) & (ids < 4) & ~skip
        expected, total = target_weights(logits, temperature[clamped], select_requests(filters, clamped))
        assert torch.equal(keeps(logits, weights, found)[live], (expected > 0)[live])
        torch.testing.assert_close(found.kept_sum[live], total[live])
        assert torch.equal(found.in_range, live)
        assert found.kept_sum[~live].isnan().all()


def test_scalars_are_every_requests_entries(generator, device):
    logits = torch.randn(5, 100, generator=generator).to(device)
    temperature = torch.full((5,), 0.7, device=device)
    scalars = Filters(top_k=20, top_p=0.8, min_p=0.1)
    tensors = Filters(
        **{name: torch.full((5,), value, device=device) for name, value in vars(scalars).items() if name == "top_k"},
        top_p=torch.tensor(0.8, dtype=torch.float64, device=device),
        min_p=torch.full((1, 5), 0.1, dtype=torch.float64, device=device).t()[:, 0],
    )
    one, other = (find(logits, temperature, filters) for filters in (scalars, tensors))
    for name in vars(one):
        assert torch.equal(getattr(one, name), getattr(other, name))


@DTYPES
def test_strides_and_padding(dtype, generator, device):
    logits = (torch.randn(6, 37, generator=generator) * 2).to(device, dtype)
    wide = torch.full((6, 64), math.inf, dtype=dtype, device=device)
    wide[:, :37] = logits
    temperature = torch.rand(6, generator=generator).to(device) + 0.5
    filters = Filters(top_k=20, top_p=0.7, min_p=0.05)
    expected = find(logits, temperature, filters, config=SMALL)
    twice = torch.arange(12, dtype=torch.int32, device=device) // 2
    for form in (wide[:, :37], logits.t().contiguous().t(), torch.stack([logits, logits], dim=2)[:, :, 1]):
        found = find(form, temperature.repeat_interleave(2)[::2], filters, twice[::2], config=SMALL)
        for name in vars(found):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def test_rows_that_are_settled_without_reading_them(device):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]], device=device).repeat(8, 1)
    logits[1, 2], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0, math.nan, 1.0, math.inf], device=device)
    filters = Filters(top_k=torch.tensor([2, 2, 2, 2, 2, 2, 0, 2], device=device), top_p=1.0)
    found = find(logits, temperature, filters, config=SMALL)
    assert found.kept_sum.isnan().tolist() == [False, True, True, True, True, True, False, True]
    assert (found.kept_sum[0].item(), found.threshold[0].item()) == (1.0, 3.0)
    torch.testing.assert_close(found.kept_sum[6], torch.exp(logits[6] - 3).sum())
    assert found.threshold[6].item() == -math.inf
    assert found.in_range.all()
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device)
    assert keeps(logits[:1], one_hot[None], found.__class__(**{k: v[:1] for k, v in vars(found).items()})).tolist() == [
        [False, True, False, False]
    ]


@pytest.mark.parametrize(
    ("filters", "bad"),
    [
        (Filters(top_k=torch.tensor([1, -1, 2**40, 0])), [1]),
        (Filters(top_p=torch.tensor([1.0, 0.0, math.nan, 1.5])), [1, 2, 3]),
        (Filters(min_p=torch.tensor([0.0, -0.5, 1.0, math.nan])), [1, 3]),
        (Filters(min_p=torch.tensor([0.0, 1.001, 1.0, math.inf]), top_k=2), [1, 3]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_entries_out_of_range_spoil_their_own_row(filters, bad, temperature, device):
    filters = Filters(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(filters).items()})
    found = find(torch.zeros(4, 9, device=device), torch.full((4,), temperature, device=device), filters)
    assert (~found.in_range).nonzero()[:, 0].tolist() == bad
    assert found.kept_sum.isnan().nonzero()[:, 0].tolist() == bad


@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.3, 0.7, 1 / 3, 1e-30, 1e-45, 1e-300, 0.5, 1.0])
def test_the_least_weight_is_the_least_float32_that_is_enough(min_p, device):
    least = (
        find(torch.zeros(1, 2, device=device), torch.ones(1, device=device), Filters(min_p=min_p)).min_weight[0].cpu()
    )
    assert least.double() >= min_p
    assert min_p == 0 or torch.nextafter(least, torch.tensor(0.0)).double() < min_p


def test_no_rows(device):
    found = find(torch.zeros(0, 5, device=device), torch.ones(0, device=device), Filters(top_k=2, top_p=0.5))
    assert {len(value) for value in vars(found).values()} == {0}
    assert kernels.middle_passes(torch.bfloat16, True, False) == 0

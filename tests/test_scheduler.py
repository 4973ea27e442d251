"""Algorithm 1, the budget and the admission: against loops, by exact enumeration, and for what they may not know."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsspark import CostTable, admit, plan_budget, schedule

FLAT = [1.0] * 200
LINEAR = [1.0] + [1 / b for b in range(1, 200)]  # every token costs alike: no draft pays
STAIRS = CostTable.from_points([2, 4, 8, 16, 64], [1.0, 1.2, 1.5, 2.0, 4.0]).sps.tolist()
GENTLE = [1.0] + [1 / (1 + 0.05 * b) for b in range(1, 200)]
TABLES = [FLAT, LINEAR, STAIRS, GENTLE]


def candidates_of(rows):
    """Return (survival, position, request) in order of admission, NaN and zeros left out, rows made non-increasing."""
    found = []
    for r, row in enumerate(rows):
        running = 1.0
        for j, a in enumerate(row):
            running = min(running, 0.0 if math.isnan(a) else min(max(a, 0.0), 1.0))
            if running > 0:
                found.append((running, j, r))
    return sorted(found, key=lambda c: (-c[0], c[1], c[2]))


def lengths_of(admitted, num_requests):
    lengths = [0] * num_requests
    for _, j, r in admitted:
        assert j == lengths[r], "admission must be a prefix"
        lengths[r] += 1
    return lengths


def algorithm_1(rows, sps, limit):
    """Follow the paper's Algorithm 1 line by line."""
    admitted, batch_tokens, tau = [], len(rows), float(len(rows))
    best = tau * sps[batch_tokens]
    for candidate in candidates_of(rows):
        batch_tokens, tau = batch_tokens + 1, tau + candidate[0]
        if batch_tokens > limit or not tau * sps[batch_tokens] > best:
            break
        best = tau * sps[batch_tokens]
        admitted.append(candidate)
    return lengths_of(admitted, len(rows))


def tensor(rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


@st.composite
def survivals(draw, max_requests=5, max_block=4):
    """Draw rows with ties, zeros, ones, NaN, values outside [0, 1] and rows that rise."""
    num_requests, block_size = draw(st.integers(1, max_requests)), draw(st.integers(1, max_block))
    value = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0]) | st.floats(0, 1, width=32)
    value = draw(st.sampled_from([value, value | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1.5, -2.0])]))
    rows = st.lists(value, min_size=block_size, max_size=block_size)
    return draw(st.lists(rows, min_size=num_requests, max_size=num_requests))


# --- the searches ----------------------------------------------------------------------------------------------------


@given(survivals(), st.sampled_from(TABLES), st.integers(0, 21))
def test_schedule_is_algorithm_1(rows, sps, slack):
    limit = len(rows) + slack
    lengths = schedule(tensor(rows), CostTable(sps), max_tokens=limit)
    assert lengths.tolist() == algorithm_1(rows, sps, limit)
    assert lengths.dtype == torch.int32
    assert len(rows) + int(lengths.sum()) <= limit
    assert schedule(tensor(rows), CostTable(sps[: limit + 1])).tolist() == lengths.tolist()


@given(survivals(), st.integers(0, 25), st.booleans())
def test_admit_takes_the_largest_and_no_more(rows, budget, as_tensor):
    lengths = admit(tensor(rows), torch.tensor(budget, dtype=torch.int32) if as_tensor else budget)
    ranked = candidates_of(rows)
    assert lengths.tolist() == lengths_of(ranked[:budget], len(rows))
    assert int(lengths.sum()) == min(budget, len(ranked))
    assert lengths.dtype == torch.int32


def brute_force_budget(rows, sps, limit):
    """Try every vector of lengths, in exact arithmetic; ties take the smallest total."""
    best = None
    for lengths in itertools.product(*(range(1 + sum(a > 0 for a in row)) for row in rows)):
        batch_tokens = len(rows) + sum(lengths)
        if batch_tokens <= limit:
            tau = len(rows) + sum(Fraction(a) for row, n in zip(rows, lengths, strict=True) for a in row[:n])
            key = (tau * Fraction(sps[batch_tokens]), -sum(lengths))
            best = key if best is None else max(best, key)
    return -best[1]


@given(st.data())
def test_plan_budget_is_the_best_of_all_lengths(data):
    num_requests, block_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    eighths = st.lists(st.integers(0, 8), min_size=block_size, max_size=block_size)
    rows = [[n / 8 for n in sorted(data.draw(eighths), reverse=True)] for _ in range(num_requests)]
    rates = st.lists(st.integers(1, 16), min_size=13, max_size=13)
    sps = [n / 16 for n in data.draw(rates)]  # any curve, ties and steps up included
    limit = num_requests + data.draw(st.integers(0, 9))
    budget = plan_budget(tensor(rows), CostTable(sps), max_tokens=limit)
    assert budget.item() == brute_force_budget(rows, sps, limit)
    assert (budget.dtype, budget.shape) == (torch.int32, ())
    assert plan_budget(tensor(rows, torch.float32), CostTable(sps), max_tokens=limit).item() == budget.item()


def test_schedule_stops_at_a_step_of_the_staircase_and_plan_budget_does_not():
    rows = [[0.9, 0.8, 0.7]] * 2
    table = CostTable.from_points([2, 8], [1.0, 1.6])  # Theta: 2, then 2.9/1.6 = 1.81, ... 6.8/1.6 = 4.25
    assert schedule(tensor(rows), table).tolist() == [0, 0]
    assert plan_budget(tensor(rows), table).item() == 6
    assert admit(tensor(rows), plan_budget(tensor(rows), table)).tolist() == [3, 3]
    assert plan_budget(tensor(rows), table, max_tokens=5).item() == 3
    assert plan_budget(tensor(rows), table, max_tokens=3).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ties_go_by_position_then_request(dtype):
    ones = tensor([[1.0] * 3] * 3, dtype)
    by_budget = [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
        [3, 2, 2],
        [3, 3, 2],
        [3, 3, 3],
    ]
    for budget, expected in enumerate(by_budget):
        assert admit(ones, budget).tolist() == expected
        assert schedule(ones, CostTable(FLAT), max_tokens=3 + budget).tolist() == expected
    assert admit(ones, 10).tolist() == [3, 3, 3]


def test_ties_at_one_stay_prefixes_in_a_large_batch():
    """Saturated survivals in more rows than any unstable sort keeps in order."""
    rows = torch.ones(300, 16)
    rows[:, 10:] = 0.5
    assert admit(rows, 300 * 4 + 17).tolist() == [5] * 17 + [4] * 283
    table = CostTable([1.0] * 5_000)
    assert schedule(rows, table, max_tokens=300 + 300 * 11 + 2).tolist() == [12] * 2 + [11] * 298


def test_a_flat_table_verifies_everything_above_zero_and_a_linear_one_nothing():
    rows = tensor([[0.5, 0.25, 0.0], [1.0, 1.0, 0.001]])
    assert schedule(rows, CostTable(FLAT)).tolist() == [2, 3]
    assert plan_budget(rows, CostTable(FLAT)).item() == 5
    assert schedule(rows, CostTable(LINEAR)).tolist() == [0, 0]
    assert plan_budget(rows, CostTable(LINEAR)).item() == 0


def test_equal_throughput_does_not_continue():
    halves = CostTable([1.0, 1.0, 0.5, 0.5])
    assert schedule(tensor([[1.0, 1.0]]), halves).tolist() == [0]  # Theta_1 = 2 * 0.5 = Theta_0, though Theta_2 = 1.5
    assert plan_budget(tensor([[1.0, 1.0]]), halves).item() == 2
    assert plan_budget(tensor([[1.0, 0.0]]), halves).item() == 0  # the smallest of a tie


def test_a_candidate_is_not_dropped_for_its_own_probability():
    """Only the order of survivals counts: with drafts free, even a hopeless one is verified."""
    rows = tensor([[0.9, 1e-6], [1e-9, 1e-12]])
    assert schedule(rows, CostTable(FLAT)).tolist() == [2, 2]
    assert admit(rows, 3).tolist() == [2, 1]


def test_zeros_nan_and_rows_that_rise():
    rows = tensor([[0.0, 0.9], [0.5, math.nan], [math.nan, 0.9], [0.25, 0.75], [2.0, 1.5], [-1.0, 0.5]])
    assert admit(rows, 12).tolist() == [0, 1, 0, 2, 2, 0]
    assert schedule(rows, CostTable(FLAT)).tolist() == [0, 1, 0, 2, 2, 0]
    assert plan_budget(rows, CostTable(FLAT)).item() == 5
    assert admit(rows, 3).tolist() == [0, 1, 0, 0, 2, 0]  # the rising 0.75 counts as 0.25
    zeros = torch.zeros(3, 2)
    rising = CostTable(
        [1.0, 1.0, 1.0, 1.0, 8.0, 9.0]
    )  # more tokens, more steps: a hopeless draft still is no candidate
    assert plan_budget(zeros, rising).item() == 0
    assert schedule(zeros, rising).tolist() == [0, 0, 0]


def test_throughput_is_computed_in_float64():
    """In float32 the sum of 4,096 ones swallows 2**-12, and the last candidate would not be admitted."""
    rows = torch.ones(4_096, 1)
    rows[-1] = 2.0**-12
    table = CostTable([1.0] * 8_193)
    assert schedule(rows, table).sum().item() == 4_096
    assert plan_budget(rows, table).item() == 4_096
    close = CostTable([1.0, 1.0, 0.5 + 2.0**-40])  # Theta_1 = 1 + 2**-39
    assert schedule(torch.ones(1, 1), close).tolist() == [1]


@pytest.mark.parametrize("limit", [0, 5, None])
def test_no_requests(limit):
    empty = torch.zeros(0, 3)
    assert schedule(empty, CostTable(FLAT), max_tokens=limit).tolist() == []
    assert schedule(empty, CostTable(FLAT)).dtype == torch.int32
    assert plan_budget(empty, CostTable(FLAT), max_tokens=limit).item() == 0
    assert admit(empty, 4).tolist() == []


def test_the_table_ends_the_search():
    rows = tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    for max_tokens in (None, 99):
        assert schedule(rows, CostTable([1.0] * 6), max_tokens=max_tokens).tolist() == [2, 1]
        assert plan_budget(rows, CostTable([1.0] * 6), max_tokens=max_tokens).item() == 3
    assert schedule(rows, CostTable([1.0] * 3)).tolist() == [0, 0]


def test_inputs_of_any_stride_are_left_alone(generator):
    rows = torch.rand(4, 3, generator=generator).sort(dim=1, descending=True).values
    before = rows.clone()
    strided = torch.stack((rows, torch.full_like(rows, math.nan)), dim=-1)[..., 0]
    for form in (rows, strided, rows.t().contiguous().t(), rows.clone().requires_grad_()):
        assert torch.equal(schedule(form, CostTable(GENTLE)), schedule(rows, CostTable(GENTLE)))
        assert torch.equal(admit(form, 5), admit(rows, 5))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("function", [schedule, plan_budget])
def test_searches_name_the_bad_argument(function):
    rows, table = torch.ones(3, 2), CostTable(FLAT)
    for arguments, options, error, text in (
        ((rows[0], table), {}, ValueError, "survival: got shape"),
        ((torch.ones(3, 33), table), {}, ValueError, "survival: gamma: got 33"),
        ((rows[:, :0], table), {}, ValueError, "survival: gamma: got 0"),
        ((rows.long(), table), {}, TypeError, "survival: got dtype int64"),
        ((rows.tolist(), table), {}, TypeError, "survival: got list"),
        (
            (rows, CostTable([1.0, 1.0, 1.0])),
            {},
            ValueError,
            "cost_table: got 2 batch tokens",
        ),
        ((rows, table), {"max_tokens": 2}, ValueError, "max_tokens: got 2 batch tokens for R = 3"),
        ((rows, table), {"max_tokens": -1}, ValueError, "max_tokens: got -1"),
        ((rows, table), {"max_tokens": 4.0}, TypeError, "max_tokens: got float"),
        ((rows.to("meta"), table), {}, ValueError, "cost_table: got device cpu"),
    ):
        with pytest.raises(error, match=text):
            function(*arguments, **options)
    assert function(rows, table, max_tokens=3).sum().item() == 0


@pytest.mark.parametrize(
    ("budget", "error"),
    [
        (-1, ValueError),
        (torch.tensor(-1), ValueError),
        (1.0, TypeError),
        (True, TypeError),
        (torch.tensor(1.0), TypeError),
        (torch.tensor([1]), ValueError),
        (torch.tensor(1, device="meta"), ValueError),
    ],
)
def test_admit_names_the_bad_budget(budget, error):
    with pytest.raises(error, match="budget: got"):
        admit(torch.ones(2, 2), budget)


# --- what admission may not know -------------------------------------------------------------------------------------


def retrospective(rows, table):
    """The tempting fault: a global search over the *current* survivals (paper Appendix A)."""
    return admit(rows, plan_budget(rows, table))


def test_appendix_a():
    """Enumerate R = 1, gamma = 2, exactly: the global search emits A with 17/20, Algorithm 1 with the target's 7/10."""
    table = CostTable([1.0, 1.0, 0.5, 0.45])
    p, q = {"A": Fraction(7, 10), "B": Fraction(3, 10)}, {"A": Fraction(1, 2), "B": Fraction(1, 2)}
    second = {"A": 0.9, "B": 0.0}  # c_2, which depends on x_1
    residual_a = Fraction(1)  # max(0, p - q) has mass on A alone

    def law_of_a(rule):
        total = Fraction(0)
        for x, mass in q.items():
            length = rule(tensor([[0.8, 0.8 * second[x]]]), table).item()
            if length == 0:  # nothing verified: the anchor's row gives a token of p
                total += mass * p["A"]
                continue
            accept = min(Fraction(1), p[x] / q[x])
            total += mass * ((accept if x == "A" else 0) + (1 - accept) * residual_a)
        return total

    assert law_of_a(retrospective) == Fraction(17, 20)
    assert law_of_a(schedule) == Fraction(7, 10)
    assert law_of_a(lambda rows, _: admit(rows, 1)) == Fraction(7, 10)
    assert retrospective(tensor([[0.8, 0.72]]), table).tolist() == [2]
    assert retrospective(tensor([[0.8, 0.0]]), table).tolist() == [0]


LEVELS = [0.0, 0.25, 0.5, 1.0]


def anticipates(rule, levels=(0.0, 0.5, 1.0)):
    """Tell whether, for R = gamma = 2, some change past the first draft left out of each request changes a length."""
    rows = [(a, b) for a in levels for b in levels if b <= a]
    for first, second in itertools.product(rows, rows):
        lengths = rule(tensor([first, second]))
        options = [
            [(row[0], b) for b in levels if b <= row[0]] if length == 0 else [row]
            for row, length in zip((first, second), lengths, strict=True)
        ]
        if any(rule(tensor(changed)) != lengths for changed in itertools.product(*options)):
            return True
    return False


SMALL_TABLES = [CostTable([1.0, 1.0, *rates]) for rates in itertools.product([1.0, 0.7, 0.4], repeat=3)]


def admit_out_of_order(rows, budget):
    """A fault: survival ties broken by (-position, -request), which admits (r, j + 1) before (r, j)."""
    order = sorted(candidates_of(rows.tolist()), key=lambda c: (-c[0], -c[1], -c[2]))
    return [sum(r == request for _, _, r in order[:budget]) for request in range(len(rows))]


def test_the_rules_do_not_anticipate_and_the_check_sees_faults_that_do():
    for budget in range(5):
        assert not anticipates(lambda rows, k=budget: admit(rows, k).tolist())
    assert any(anticipates(lambda rows, k=budget: admit_out_of_order(rows, k)) for budget in range(5))
    for table in SMALL_TABLES:
        assert not anticipates(lambda rows, t=table: schedule(rows, t).tolist())
    assert any(anticipates(lambda rows, t=table: retrospective(rows, t).tolist()) for table in SMALL_TABLES)


@st.composite
def futures(draw, rows, lengths):
    """Replace every a_{r,j} with j > l_r + 1, in all requests at once, by other values in [0, a_{r,l_r+1}]."""
    changed = []
    for row, length in zip(rows, lengths, strict=True):
        known = row[: length + 1]
        count = len(row) - len(known)
        ceiling = known[-1]
        share = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1, width=32)
        shares = draw(st.lists(share, min_size=count, max_size=count))
        changed.append(known + [ceiling * s for s in sorted(shares, reverse=True)])
    return changed


def non_increasing(rows):
    return [[min(row[: j + 1]) for j in range(len(row))] for row in rows]


@st.composite
def proper_survivals(draw):
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    value = st.sampled_from(LEVELS) | st.floats(0, 1, width=32)
    rows = st.lists(value, min_size=shape[1], max_size=shape[1])
    return non_increasing(draw(st.lists(rows, min_size=shape[0], max_size=shape[0])))


@given(st.data(), proper_survivals(), st.sampled_from(TABLES), st.integers(0, 25))
def test_schedule_is_jointly_non_anticipating(data, rows, sps, slack):
    table, limit = CostTable(sps), len(rows) + slack
    lengths = schedule(tensor(rows), table, max_tokens=limit).tolist()
    changed = data.draw(futures(rows, lengths))
    assert schedule(tensor(changed), table, max_tokens=limit).tolist() == lengths


@given(st.data(), proper_survivals(), st.integers(0, 25))
def test_admit_is_jointly_non_anticipating(data, rows, budget):
    lengths = admit(tensor(rows), budget).tolist()
    changed = data.draw(futures(rows, lengths))
    assert admit(tensor(changed), budget).tolist() == lengths

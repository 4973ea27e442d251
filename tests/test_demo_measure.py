"""What the demo measures, on toy models: counts by domain, calibration, greedy equality, the exact law, costs and speed."""

from __future__ import annotations

import pytest
import torch
from toy import ToyDrafter, ToyTarget

from dsspark import CostTable, survival
from dsspark.decoding import generate
from dsspark.demo import measure, timing

V = 11
GROUPS = {"math": [[1, 2, 3], [4], [5, 6]], "code": [[7, 8, 9, 10], [0, 1]]}


@pytest.fixture
def target():
    return ToyTarget(V)


@pytest.fixture
def drafter(target):
    return ToyDrafter(target)


# ---- measurements


def counts(statistics):
    tensors = (statistics.verified, statistics.reached, statistics.accepted)
    return statistics.rounds, statistics.emitted, *(tensor.tolist() for tensor in tensors)


def test_rounds_are_counted_for_each_domain(target, drafter):
    found = measure.decode_rounds(target, drafter, GROUPS, max_new_tokens=40, seed=3)
    # With whole blocks a request's text does not depend on its batch, so the first domain alone gives its counts again.
    alone = measure.decode_rounds(target, drafter, {"math": GROUPS["math"]}, max_new_tokens=40, seed=3)
    assert counts(found.by_domain["math"]) == counts(alone.total) == counts(alone.by_domain["math"])
    for name in ("rounds", "emitted"):
        assert getattr(found.total, name) == sum(getattr(s, name) for s in found.by_domain.values())
    assert found.by_domain["code"].rounds > 0
    assert len(found.accepted) == found.total.rounds == len(found.confidence_logits)
    assert found.accepted.sum(0).tolist() == found.total.accepted.tolist()
    assert found.total.tokens_per_round == pytest.approx(1 + found.accepted.float().sum(1).mean().item())


def test_confidence_logits_belong_to_their_own_outcomes(target):
    drafter = ToyDrafter(target)
    found = measure.decode_rounds(target, drafter, GROUPS, max_new_tokens=40, seed=3)
    reports = []
    seeds = measure._seeds(3, 5)
    for group, own in zip(GROUPS.values(), (seeds[:3], seeds[3:]), strict=True):
        generate(target, drafter, group, 40, seeds=own, on_round=reports.append)
    expected = torch.cat([report.proposal.confidence_logits for report in reports])
    accepted = torch.cat([report.verification.num_accepted for report in reports])
    assert torch.equal(found.confidence_logits, expected)
    assert torch.equal(found.accepted.sum(1).to(torch.int32), accepted)


def test_a_drafter_without_confidence_is_only_counted(target):
    found = measure.decode_rounds(target, ToyDrafter(target, confidence=False), GROUPS, max_new_tokens=10)
    assert found.confidence_logits is None
    assert found.total.rounds > 0


def test_progress_adds_up_to_the_text(target, drafter):
    told = []
    measure.decode_rounds(target, drafter, GROUPS, max_new_tokens=7, on_tokens=told.append)
    assert sum(told) == 5 * 7


def test_calibration_sees_the_temperature_that_is_right(generator):
    logits = 3 * torch.randn(20_000, 3, generator=generator)
    truth = torch.tensor([2.0, 3.0, 0.5])
    accepted = (torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits / truth)).cumprod(1).bool()
    right = measure.measure_calibration(logits, accepted, truth)
    assert all(after < 0.015 for after in right.ece_after)
    assert all(after < 2 * floor + 0.005 for after, floor in zip(right.ece_after, right.noise_floor, strict=True))
    assert right.ece_before[0] > 0.05
    assert right.samples == 20_000
    assert right.temperatures == truth.tolist()
    assert all(0.5 < value < 1 for value in right.auroc)
    none = measure.measure_calibration(logits, accepted, None)
    assert none.ece_after == none.ece_before == right.ece_before
    assert int(right.after.count.sum()) == logits.numel()


def test_the_noise_floor_shrinks_with_more_rounds(generator):
    logits = torch.randn(8_000, 2, generator=generator)
    accepted = (torch.rand(logits.shape, generator=generator) < survival(logits)).cumprod(1).bool()
    many = measure.measure_calibration(logits, accepted, None).noise_floor
    few = measure.measure_calibration(logits[:200], accepted[:200], None).noise_floor
    assert all(0 < a < b / 3 for a, b in zip(many, few, strict=True))


def test_greedy_equality_is_found_and_its_failure_too(target, drafter):
    prompts = GROUPS["math"]
    good = measure.check_greedy(target, drafter, prompts, max_new_tokens=20)
    assert good == measure.GreedyCheck(prompts=3, tokens=60, different=0)

    class Distracted(ToyTarget):
        """Gives other logits when it verifies a block than when it decodes alone."""

        def forward_ragged(self, batch, cache):
            logits, features = super().forward_ragged(batch, cache)
            alone = len(batch.tokens) == batch.num_requests
            return (logits if alone else logits.roll(1, dims=1)), features

    assert measure.check_greedy(Distracted(V), drafter, prompts, max_new_tokens=20).different == 3


def test_rows_are_those_of_the_drafted_positions(target, drafter):
    """The draft row names the token before it; the target's row must be one that follows that very token."""
    rows = measure.collect_rows(target, drafter, GROUPS["code"], 50, temperature=1.0, seed=1)
    assert len(rows) > 10
    head = drafter.head
    drafts = head.markov_w2(head.markov_w1.weight).detach()
    for row in rows:
        previous = int((drafts - row.draft).abs().sum(1).argmin())
        torch.testing.assert_close(drafts[previous], row.draft)
        assert (target.table[:, previous] == row.target).all(1).any()
        assert (target.table.flatten(0, 1) == row.bonus).all(1).any()


def test_the_exact_law_is_rounding_for_the_library_and_not_for_a_biased_one(target, drafter, monkeypatch):
    done = []
    good = measure.check_law(target, drafter, GROUPS, rows_per_domain=2, on_row=lambda: done.append(1))
    assert good.rows == len(done) == 4
    assert good.max_law_error_in_eps < 16
    assert good.max_law_error_in_eps == max(good.by_domain.values()) == pytest.approx(good.max_law_error * 2**23)
    assert not good.final_varies

    from dsspark.testing.laws import law_error

    def hot(p, q, bonus, *, temperature):
        return law_error(p, q, bonus, temperature=temperature, draft_temperature=1.0, verify_fn=biased_verify)

    def biased_verify(logits, *args, **kwargs):
        import dsspark

        return dsspark.verify(logits * 1.001, *args, **kwargs)

    monkeypatch.setattr(measure, "law_error", hot)
    assert measure.check_law(target, drafter, GROUPS, rows_per_domain=2).max_law_error_in_eps > 100


# ---- timing


class Counting:
    """A target that records how many tokens each pass verified."""

    def __init__(self, target):
        self.target, self.sizes, self.requests = target, [], []

    def new_cache(self, num_requests):
        return self.target.new_cache(num_requests)

    def forward_ragged(self, batch, cache):
        self.sizes.append(len(batch.tokens))
        self.requests.append(batch.num_requests)
        return self.target.forward_ragged(batch, cache)


def test_the_profile_runs_steps_of_exactly_the_sizes(target, drafter):
    counting = Counting(target)
    table = timing.profile_costs(counting, drafter, GROUPS["math"], [1, 3, 4, 10], repeats=2)
    assert counting.sizes[1:] == [10] * 3 + [4] * 3 + [3] * 3 + [1] * 3
    assert counting.requests[1:] == [3] * 3 + [1] * 9
    assert table.max_tokens == 10


def test_schedulers_verify_less_as_requests_grow(target, drafter):
    steep = CostTable(1.0 / (1.0 + 0.15 * torch.arange(40)))
    points = timing.sweep_schedulers(target, drafter, GROUPS["math"], steep, [1, 8], steps=4)
    assert [point.num_requests for point in points] == [1, 8]
    for name in ("Algorithm 1", "delayed"):
        assert 1 + drafter.block_size >= points[0].budgets[name] > points[1].budgets[name] >= 1
    assert all(rate > 0 for point in points for rate in point.tokens_per_second.values())


def test_only_steps_with_all_requests_are_counted(target, drafter):
    counting = Counting(target)
    timing.sweep_schedulers(counting, drafter, GROUPS["math"], CostTable([1.0] * 30), [3], steps=6)
    decoding = [r for r, size in zip(counting.requests, counting.sizes, strict=True)]
    assert set(decoding) == {3}
    assert len(decoding) == 4 * (1 + 6 + timing._WARMUP_STEPS)  # four policies, each with one pass over the prompts


def test_speed_is_tokens_a_second_and_the_order_alternates(target, drafter, monkeypatch):
    counting, order = Counting(target), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(len(counting.sizes)))  # a pass takes a second
    original = timing.generate

    def recording(target, used, *args, **kwargs):
        order.append("alone" if used is None else "drafted")
        return original(target, used, *args, **kwargs)

    monkeypatch.setattr(timing, "generate", recording)
    found = timing.time_pairs(counting, drafter, GROUPS["math"], new_tokens=24, temperature=0.0)
    assert order == ["alone", "drafted", "drafted", "alone", "alone", "drafted"]
    assert found.alone == 24 / 25  # one pass over the prompt, and one for each token
    for ratio, prompt in zip(found.ratios, GROUPS["math"], strict=True):
        rounds = original(target, drafter, [prompt], 24, 0.0).statistics.rounds
        assert ratio == pytest.approx(25 / (rounds + 1)) or len(prompt) == 1
    assert found.median == sorted(found.ratios)[1] > 1

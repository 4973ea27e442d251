"""What the simulator assumes: rounds, rooflines, traces, and the shape that comes out of them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from dsspark.reference.calibration import auroc
from dsspark.serving import assumptions
from dsspark.serving.acceptance import (
    Parametric,
    RoundPool,
    auc_of_calibrated,
    fit_domain,
    load_traces,
    parametric_pools,
)
from dsspark.serving.assumptions import H200_NODE, MODELS, Sourced
from dsspark.serving.command import SHIPPED_TRACES
from dsspark.serving.experiment import Load, best_at_speed, crossing, match, roofline_system, sweep, verdicts
from dsspark.serving.profiling import profile_shipped
from dsspark.serving.roofline import captured_sizes, layer_seconds, roofline_costs
from dsspark.serving.sensitivity import VARIANTS, variant_system
from dsspark.serving.simulator import Outcome

SIZE = 20000


@pytest.fixture(scope="module")
def pools():
    return parametric_pools(Parametric.stated(), 7, pool_size=SIZE)


# Rounds


def test_the_drawn_rounds_have_the_accepted_lengths_and_the_auc_of_the_paper(pools):
    drafter, mtp = pools
    for number, domain in enumerate(drafter.domains):
        wanted = assumptions.ACCEPTED_LENGTH[domain].value
        assert drafter.accepted_length()[domain] == pytest.approx(wanted, abs=0.06), domain
        first = torch.from_numpy(drafter.survival[number, :, 0])
        outcome = torch.from_numpy(drafter.accepted[number] >= 1)
        assert float(auroc(first, outcome)) == pytest.approx(0.86, abs=0.012), domain
        assert mtp.accepted_length()[domain] == pytest.approx(1.875, abs=0.01)


def test_the_confidence_is_calibrated_and_an_overconfident_one_is_not(pools):
    drafter, _ = pools
    hit = drafter.accepted[..., None] > np.arange(7)
    assert abs(hit.mean(axis=1) - drafter.survival.mean(axis=1)).max() < 4 * 0.5 / math.sqrt(SIZE)
    for low in (0.1, 0.5, 0.8):  # and within a band of confidence
        band = (drafter.survival > low) & (drafter.survival < low + 0.15)
        assert hit[band].mean() == pytest.approx(drafter.survival[band].mean(), abs=0.01)
    bold, _ = parametric_pools(Parametric.stated(overconfidence=1.5), 7, pool_size=SIZE)
    assert np.array_equal(bold.accepted, drafter.accepted)  # the scheduler is misled; the drafts are the same
    assert abs(hit.mean(axis=1) - bold.survival.mean(axis=1)).max() > 0.02


def test_a_round_that_is_hard_for_the_drafter_is_hard_for_mtp(pools):
    drafter, mtp = pools
    assert np.corrcoef(drafter.accepted[0] >= 1, mtp.accepted[0])[0, 1] > 0.2


def test_shorter_blocks_are_the_first_drafts_of_the_same_rounds(pools):
    drafter, _ = pools
    five = drafter.first(5)
    assert np.array_equal(five.survival, drafter.survival[:, :, :5])
    assert np.array_equal(five.accepted, np.minimum(drafter.accepted, 5))
    for length in (0, 8):
        with pytest.raises(ValueError, match=f"block_size: got {length}, expected 1 to 7"):
            drafter.first(length)


def test_the_auc_of_calibrated_confidences_in_closed_form():
    assert auc_of_calibrated(np.full(10, 0.3)) == pytest.approx(0.5)
    assert auc_of_calibrated(np.array([1.0, 0.0])) == pytest.approx(1.0)
    # c = 1/4 or 3/4: of (success, failure) pairs 9/16 are in order, 1/16 reversed, 6/16 tied.
    assert auc_of_calibrated(np.array([0.25, 0.75] * 5000)) == pytest.approx(9 / 16 + 3 / 16, abs=1e-3)


@pytest.mark.parametrize(
    "arguments", [(1.0, 0.86, 0.5, 7), (8.0, 0.86, 0.5, 7), (4.0, 0.5, 0.5, 7), (4.0, 0.86, 1.5, 7)]
)
def test_an_impossible_drafter_is_refused(arguments):
    with pytest.raises(ValueError, match="accepted_length, auc, shared: got"):
        fit_domain(*arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"survival": np.array([[[0.5, 0.6]]], dtype=np.float32)}, "never rise"),
        ({"survival": np.array([[[1.5, 0.6]]], dtype=np.float32)}, "out of range"),
        ({"survival": np.array([[[np.nan, 0.6]]], dtype=np.float32)}, "out of range"),
        ({"accepted": np.array([[3]])}, "out of range"),
        ({"accepted": np.array([[1, 2]])}, "rounds: got survival"),
        ({"domains": ("a", "b")}, "rounds: got survival"),
    ],
)
def test_rounds_are_checked(changes, text):
    good = {
        "domains": ("a",),
        "survival": np.array([[[0.9, 0.6]]], dtype=np.float32),
        "accepted": np.array([[2]]),
        "origin": "",
    }
    RoundPool(**good)
    with pytest.raises(ValueError, match=text):
        RoundPool(**(good | changes))


def test_traces_are_read_and_repeated_to_equal_length(tmp_path):
    path = tmp_path / "traces.json"
    part = {
        "a": {"survival": [[0.9, 0.5], [0.8, 0.1], [1.0, 1.0]], "accepted": [0, 1, 2]},
        "b": {"survival": [[0.5, 0.5]], "accepted": [2]},
    }
    path.write_text(json.dumps({"rounds": part}))
    pool = load_traces(path)
    assert pool.domains == ("a", "b")
    assert pool.accepted.tolist() == [[0, 1, 2], [2, 2, 2]]
    assert pool.survival[1].tolist() == [[0.5, 0.5]] * 3
    assert pool.accepted_length() == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"rounds": {}}',
        '{"rounds": {"a": {"survival": [[0.5]], "accepted": []}}}',
        '{"rounds": {"a": {"survival": [0.5], "accepted": [1]}}}',
    ],
)
def test_other_files_are_no_traces(content, tmp_path):
    path = tmp_path / "traces.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"--traces: got .*traces.json.*record_traces"):
        load_traces(path)


def test_the_shipped_traces_are_real_rounds():
    pool = load_traces(SHIPPED_TRACES)
    assert set(pool.domains) == {"math", "code", "chat"}
    assert pool.block_size == 7
    lengths = pool.accepted_length()
    assert lengths["math"] > lengths["code"] > 1.5
    assert abs((pool.accepted[..., None] > np.arange(7)).mean(axis=1) - pool.survival.mean(axis=1)).max() < 0.1


# Rooflines


def number(value):
    return Sourced(value, "", "test")


TINY_NODE = dataclasses.replace(
    H200_NODE,
    gpus=number(2),
    memory_bandwidth=number(100.0),
    memory_efficiency=number(1.0),
    fp8_flops=number(1000.0),
    compute_efficiency=number(1.0),
    dispatch_bandwidth=number(50.0),
    combine_bandwidth=number(100.0),
    layer_floor=number(0.25),
)
TINY = dataclasses.replace(
    MODELS["v4-flash"],
    layers=number(2),
    hidden_size=number(1),
    experts=number(4),
    experts_per_token=number(1),
    expert_intermediate=number(1),  # 3 parameters an expert
    active_parameters=number(16),  # 10 dense, 2 x 3 of experts
    expert_bytes=number(2.0),
    dense_bytes=number(1.0),
)


def test_the_roofline_by_hand():
    at = np.array([1.0, 1e3])
    seconds = layer_seconds(TINY, TINY_NODE, at, 2)
    # One token: 10 dense bytes and 2 layers x 1 expert x 6 bytes / 2 cards = 16 bytes; computing 16 FLOP and sending take less.
    assert seconds[0] == pytest.approx(0.5 + 16 / 100)
    # 1,000 tokens: 2 x 16 x 500 FLOP; half of the tokens go to the other card: 2 x 500 x 0.5 numbers, 1 byte out and 2 back.
    compute, sent = 2 * 16 * 500 / 1000, 2 * 500 * 0.5 * (1 / 50 + 2 / 100)
    assert seconds[1] == pytest.approx(0.5 + max(compute, sent))
    together = layer_seconds(TINY, TINY_NODE, at, 2, overlap=False)[1]
    assert together == pytest.approx(0.5 + (10 + 2 * 4 * 6 / 2) / 100 + compute + sent)
    assert layer_seconds(TINY, TINY_NODE, at, 1)[0] == pytest.approx(0.25 + 8 / 100)


def test_an_engine_pads_to_what_it_captured_and_no_further():
    costs = roofline_costs(MODELS["v4-flash"], max_requests=1024, block_size=5, stages=3, context=1000)
    sizes = captured_sizes(H200_NODE, 6144)
    assert sizes[:5] == [8, 16, 32, 64, 128]
    assert sizes[-1] == 8 * 512
    assert len(set(costs.verify[1:9])) == 1
    assert costs.verify[64] < costs.verify[65] == costs.verify[128]
    assert len(set(costs.verify[4097:4200])) == 103
    assert (np.diff(costs.verify) >= 0).all()
    assert (np.diff(costs.draft) >= 0).all()
    assert costs.draft[1024] > 2 * costs.draft[1]
    assert costs.table.max_tokens == 6144
    whole = costs.verify[400] + costs.draft[100] + costs.cached_token * 1000 * 100
    assert float(costs.table.seconds[400]) == pytest.approx(whole)
    no_drafter = roofline_costs(MODELS["v4-flash"], max_requests=8, block_size=0, stages=0, context=0)
    assert not no_drafter.draft.any()


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_models_are_consistent_with_their_own_sizes(model):
    """Experts times their size give the total, within what else there is, and the weights fit the node."""
    expert = 3 * model.hidden_size.value * model.expert_intermediate.value * model.layers.value
    routed = model.experts.value * expert
    assert 0.9 < routed / model.total_parameters.value < 1.0
    assert model.experts_per_token.value * expert < model.active_parameters.value
    weights = routed * model.expert_bytes.value + (model.total_parameters.value - routed) * model.dense_bytes.value
    assert weights < H200_NODE.gpus.value * H200_NODE.memory.value


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_every_number_has_a_source(model):
    sources = assumptions.all_sources(model)
    assert len(sources) > 25
    for name, entry in sources.items():
        assert len(entry["source"]) > 8, name
        assert math.isfinite(entry["value"]), name


# The shape


@pytest.fixture(scope="module")
def curves():
    pools = parametric_pools(Parametric.stated(), 5, pool_size=4096)
    system = roofline_system(MODELS["v4-flash"], pools, max_requests=4096, context=1124)
    loads = [Load(users=n, requests=max(2 * n, 200)) for n in (4, 64, 256, 1024, 4096)]
    return sweep(system, loads, ("mtp-1", "fixed-5", "algorithm-1", "delayed"))


def test_the_papers_shape(curves):
    budgets = [o.budget for o in curves["delayed"]]
    assert 4 <= budgets[0] <= 6
    assert budgets[-1] < budgets[-2] < budgets[-3]
    assert budgets[-1] < 3.2
    assert curves["fixed-5"][-1].throughput < 0.9 * min(
        curves["delayed"][-1].throughput, curves["mtp-1"][-1].throughput
    )
    assert curves["delayed"][-1].waste < 0.5 * curves["fixed-5"][-1].waste
    found = verdicts(curves, match(curves["mtp-1"], curves["delayed"]), (1.60, 1.85), 1.51)
    least, median, most = found["matched-throughput speed-up, simulated: least, median, most"]
    assert 1.2 < least <= median <= most < 2.3
    assert sum(found["loads below, inside, above the paper's range"]) == len(curves["mtp-1"]) - 1
    assert found["fixed-5 throughput over mtp-1, heaviest load"] < 0.9


def test_algorithm_1_gets_stuck_where_the_delayed_scheduler_does_not(curves):
    at_64 = 1
    assert curves["algorithm-1"][at_64].budget < 1.2
    assert curves["delayed"][at_64].budget > 5
    assert curves["delayed"][at_64].throughput > 2 * curves["algorithm-1"][at_64].throughput


def test_crossing_interpolates_between_logarithms_and_takes_the_better_of_two():
    assert crossing([1.0, 100.0], [100.0, 1.0], 10.0) == pytest.approx(10.0)
    assert crossing([1.0, 4.0, 2.0], [8.0, 4.0, 1.0], 3.0) > 4.0  # the curve bends back
    assert crossing([1.0, 4.0], [8.0, 4.0], 1.0) == pytest.approx(8.0)
    assert crossing([1.0, 4.0], [8.0, 4.0], 4.0) == pytest.approx(4.0)
    assert math.isnan(crossing([1.0, 4.0], [8.0, 4.0], 5.0))
    assert crossing([2.0], [3.0], 2.0) == pytest.approx(3.0)


def outcome(policy, throughput, speed, budget=1.0):
    numbers = {field.name: 1 for field in dataclasses.fields(Outcome)}
    return Outcome(**(numbers | {"policy": policy, "throughput": throughput, "user_speed": speed, "budget": budget}))


def test_matches_compare_at_equal_throughput_and_at_equal_speed():
    baseline = [outcome("mtp-1", 10.0, 100.0), outcome("mtp-1", 100.0, 50.0), outcome("mtp-1", 5000.0, 10.0)]
    subject = [outcome("delayed", 20.0, 180.0), outcome("delayed", 100.0, 100.0), outcome("delayed", 1000.0, 25.0)]
    first, second, third = match(baseline, subject)
    assert first.speedup == pytest.approx(1.8)  # below the lightest load: the engine idles
    assert first.throughput_gain == pytest.approx(10.0)
    assert second.speedup == pytest.approx(2.0)
    assert math.isnan(third.speedup)
    assert math.isnan(third.throughput_gain)


def test_an_impossible_target_says_what_is_possible():
    curves = {"mtp-1": [outcome("mtp-1", 10.0, 100.0), outcome("mtp-1", 90.0, 30.0)]}
    assert best_at_speed(curves, 100.0)["mtp-1"] == pytest.approx(10.0)
    assert 10.0 < best_at_speed(curves, 60.0)["mtp-1"] < 90.0
    assert best_at_speed(curves, 5.0)["mtp-1"] == 90.0  # faster than asked for at every load
    assert math.isnan(best_at_speed(curves | {"none": [outcome("none", 5.0, 50.0)]}, 60.0)["none"])
    with pytest.raises(ValueError, match=r"--target-speed: got 101 tokens/s/user, expected at most 100, .*\(mtp-1\)"):
        best_at_speed(curves, 101.0)


def test_every_variant_moves_something():
    options = {"block_size": 5, "max_requests": 1024, "pool_size": 512, "seed": 0}
    stated, prompt = variant_system(MODELS["v4-flash"], VARIANTS[0], **options)

    def differs(variant):
        system, moved_prompt = variant_system(MODELS["v4-flash"], variant, **options)
        parts = [(system.costs[name].verify, stated.costs[name].verify) for name in stated.costs]
        parts += [(system.costs[name].draft, stated.costs[name].draft) for name in stated.costs]
        parts += [(system.pools[name].survival, stated.pools[name].survival) for name in stated.pools]
        return moved_prompt != prompt or variant.mix is not None or not all(np.array_equal(a, b) for a, b in parts)

    assert [variant.name for variant in VARIANTS if not differs(variant)] == ["as assumed"]


def test_the_shipped_models_are_profiled():
    steps = []
    table = profile_shipped(sizes=(1, 6, 64), repeats=1, on_step=lambda: steps.append(1))
    assert table.max_tokens == 64
    assert len(steps) == 6
    assert table.seconds[64] > table.seconds[1]
    assert "shipped" in table.provenance["model"]

"""The exact laws: lattices that fit, counts that are the law, bisection to the last bit, and Appendix A in fractions."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from functools import partial

import pytest
import torch

import dsspark
from dsspark import CostTable, DelayedScheduler, Filters
from dsspark.reference import rejection
from dsspark.serving.policies import EarlyStopping
from dsspark.testing.laws import (
    TOP,
    GridLaw,
    LatticeSizes,
    LosslessnessError,
    Stages,
    assert_exact,
    compare,
    composed_law,
    exact_law,
    first_token_law,
    first_true,
    grid_round,
    is_exact,
    lattice,
    lattice_sizes,
    law_error,
    two_level_sizes,
)
from dsspark.testing.mutants.mutant import with_stage
from dsspark.testing.mutants.scheduling import global_search, later_positions_first
from dsspark.testing.scheduling import compare_scheduled, scheduled_law, verified_law

CHAIN = GridLaw(target=((3, 1), (1, 3)), draft=((1, 1), (1, 1)), block_size=2)
APPENDIX_A = GridLaw.independent((7, 3), (1, 1), 2, ((0.8, 0.8), (0.9, 0.0)))
APPENDIX_A_TABLE = CostTable([1.0, 1.0, 0.5, 0.45])
THREE = GridLaw(target=((2, 1, 1), (1, 1, 2), (0, 2, 2)), draft=((1, 1, 2), (2, 1, 1), (1, 1, 2)))


class Search:
    """The retrospective search of Appendix A, made a scheduler."""

    def step(self, survival, request_ids):
        return global_search(survival, APPENDIX_A_TABLE)


def counted(law, stages=None, anchors=(0,), rounds=1):
    points = lattice(law, cell=(stages or Stages()).cell, num_requests=len(anchors), rounds=rounds)
    return exact_law(grid_round(law, stages, anchors), points)


# Lattices


def test_the_documented_law_does_not_fit_8_by_8_and_fits_8_by_15():
    """q = (1, 2, 3, 2) / 8 in cells of two."""
    assert two_level_sizes((1, 2, 3, 2), 2) == (8, 15)
    law = GridLaw.independent((1, 2, 3, 2), (1, 2, 3, 2))
    for wrong in ((8, 8), (16, 16), (4, 15)):
        with pytest.raises(ValueError, match=r"multiple of (8|15)"):
            lattice(law, cell=2, sizes=LatticeSizes(draft=wrong, accept=1, final=(8, 15)))
    points = lattice(law, cell=2, sizes=LatticeSizes(draft=(8, 30), accept=2, final=(16, 15)))
    assert_exact(exact_law(grid_round(law, Stages(cell=2)), points), law)


@pytest.mark.parametrize(("draft", "good"), [((8, 8), False), ((16, 16), False), ((8, 15), True)])
def test_sizes_that_do_not_fit_really_give_wrong_counts(draft, good):
    law = GridLaw.independent((1, 2, 3, 2), (1, 2, 3, 2))
    points = lattice(law, cell=2)
    points = type(points)(
        sizes=LatticeSizes(draft=draft, accept=1, final=(8, 15)), block_size=1, num_requests=1, rounds=1, cell=2
    )
    counts = exact_law(grid_round(law, Stages(cell=2)), points)
    assert is_exact(counts, law) is good


def test_sizes_come_from_cells_ratios_and_residuals():
    sizes = lattice_sizes(GridLaw.independent((1, 2, 1), (2, 1, 1)), cell=2)
    # q: cells 3/4 and 1/4, within the first 2:1. p/q: 1/2 and >= 1. Final: p has cells 3:1 and 1:2 within; the residual is a point.
    assert sizes == LatticeSizes(draft=(4, 3), accept=2, final=(4, 3))


def test_the_smallest_joint_lattice_has_4096_points():
    law = GridLaw.independent((3, 1), (1, 1), 2)
    assert len(lattice(law)) == 64
    assert len(lattice(law, num_requests=2)) == len(lattice(law, rounds=2)) == 4096


def test_chunks_cover_every_point_once(monkeypatch):
    monkeypatch.setattr("dsspark.testing.grid.CHUNK_ROWS", 100)
    points = lattice(CHAIN, num_requests=2)
    chunks = list(points)
    assert max(len(uniforms.accept) for (uniforms,) in chunks) <= 100
    rows = torch.cat([torch.cat((u.draft.flatten(1), u.accept, u.final), 1) for (u,) in chunks]).view(len(points), -1)
    assert len(torch.unique(rows, dim=0)) == len(points)
    assert_exact(exact_law(grid_round(CHAIN, None, (0, 1)), points), CHAIN, (0, 1))


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: lattice(CHAIN, num_requests=4), ValueError, "points"),
        (lambda: lattice(GridLaw.independent((1, 4998), (1, 4998))), ValueError, "midpoints"),
        (lambda: lattice(CHAIN, cell=0), ValueError, "cell"),
        (lambda: lattice(CHAIN, rounds=0), ValueError, "rounds"),
        (lambda: GridLaw.independent((0, 0), (1, 1)), ValueError, "target"),
        (lambda: GridLaw.independent((0.5, 0.5), (1, 1)), TypeError, "numerators"),
        (lambda: GridLaw(target=((1, 1), (1, 1)), draft=((1, 1),)), ValueError, "V tokens"),
        (lambda: GridLaw(target=((1, 1), (1, 1, 1)), draft=((1, 1),)), ValueError, "lengths"),
        (lambda: GridLaw.independent((1, 1), (1, 1), draft_to_target=(1, 0)), ValueError, "draft_to_target"),
        (lambda: GridLaw.independent((1, 1), (1, 1), confidence=((1.0,),)), ValueError, "confidence"),
        (lambda: GridLaw.independent((1, 1), (1, 1), 40), ValueError, "block_size"),
        (lambda: exact_law(lambda uniforms: 3, lattice(CHAIN)), ValueError, "round_fn"),
        (lambda: exact_law(lambda uniforms: torch.zeros(3, 1, 1), lattice(CHAIN)), ValueError, "round_fn"),
        (lambda: compare({((0,), (1,)): 1}, 1, CHAIN, (0,)), ValueError, "anchors"),
    ],
)
def test_bad_use_is_refused(call, error, names):
    with pytest.raises(error, match=names):
        call()


# Integer laws


@pytest.mark.parametrize(
    ("law", "stages", "anchors", "rounds"),
    [
        (CHAIN, Stages(cell=2), (0,), 1),
        (CHAIN, Stages(cell=1), (1, 0), 1),
        (CHAIN, Stages(cell=2, temperature=0.5, draft_temperature=2.0), (0,), 1),
        (CHAIN, Stages(cell=2), (0,), 2),
        (THREE, Stages(cell=2), (2,), 1),
        (GridLaw.independent((1, 1, 2), (1, 1), draft_to_target=(0, 2)), Stages(cell=2), (0,), 1),
        (GridLaw.independent((1, 1), (1, 1, 2)), Stages(cell=2), (0,), 1),  # a draft with tokens the target lacks
        (GridLaw.independent((3, 1), (1, 0)), Stages(cell=2), (0,), 1),
    ],
)
def test_the_library_is_exact(law, stages, anchors, rounds):
    assert_exact(counted(law, stages, anchors, rounds), law, anchors)


def test_composition_equals_joint_enumeration():
    joint, composed = counted(CHAIN, Stages(cell=2), rounds=2), composed_law(CHAIN, Stages(cell=2), rounds=2)
    assert joint.total == composed.total
    assert joint.counts == composed.counts


def test_a_wrong_law_is_told_with_its_worst_text():
    counts = counted(CHAIN, Stages(cell=2, scheduler=Search))
    assert is_exact(counts, CHAIN)  # no confidence: nothing to look at
    counts = counted(APPENDIX_A, Stages(scheduler=Search))
    assert not is_exact(counts, APPENDIX_A)
    comparison = compare(counts.counts, counts.total, APPENDIX_A)
    assert comparison.total_variation == Fraction(3, 20)
    assert sum(comparison.observed.values()) == sum(comparison.exact.values()) == 1
    with pytest.raises(LosslessnessError, match="instead of"):
        assert_exact(counts, APPENDIX_A)


def test_an_impossible_token_or_an_empty_text_is_not_the_targets_law():
    counts = counted(GridLaw.independent((1, 1), (1, 1)))
    as_dict = dict(counts.counts)
    first = next(iter(as_dict))
    for text in ((5,), (-1, 0)):
        broken = type(counts)({**as_dict, first: as_dict[first] - 1, (text,): 1}, counts.total)
        assert not is_exact(broken, GridLaw.independent((1, 1), (1, 1)))
        assert not compare(broken.counts, broken.total, GridLaw.independent((1, 1), (1, 1))).equal
    lost = type(counts)({**as_dict, first: as_dict[first] - 1}, counts.total)
    assert not is_exact(lost, GridLaw.independent((1, 1), (1, 1)))


# Appendix A, and the counterexamples of the documentation


def test_appendix_a_the_global_search_gives_17_20ths():
    counts = counted(APPENDIX_A, Stages(scheduler=Search))
    assert first_token_law(counts, APPENDIX_A) == [Fraction(17, 20), Fraction(3, 20)]
    weights = scheduled_law(APPENDIX_A, lambda a: global_search(a, APPENDIX_A_TABLE))
    assert sum(w for texts, w in weights.items() if texts[0][0] == 0) == Fraction(17, 20)


def test_appendix_a_early_stopping_gives_7_10ths():
    counts = counted(APPENDIX_A, Stages(scheduler=lambda: EarlyStopping(APPENDIX_A_TABLE)))
    assert first_token_law(counts, APPENDIX_A) == [Fraction(7, 10), Fraction(3, 10)]
    assert_exact(counts, APPENDIX_A)


@pytest.mark.parametrize("delay", [1, 2])
def test_appendix_a_the_delayed_scheduler_gives_7_10ths_in_every_round(delay):
    stages = Stages(scheduler=lambda: DelayedScheduler(APPENDIX_A_TABLE, 2, delay))
    counts = composed_law(APPENDIX_A, stages, rounds=3)
    assert first_token_law(counts, APPENDIX_A) == [Fraction(7, 10), Fraction(3, 10)]
    assert_exact(counts, APPENDIX_A)
    assert len({len(text) for (text,) in counts.counts}) > 3  # it really verifies different lengths


def test_two_requests_admitting_each_other_are_exact_one_by_one_and_wrong_together():
    """41/80 instead of 49/100: each is admitted by the other's first token."""
    law = GridLaw.independent((7, 3), (1, 1), 2, ((1.0, 1.0), (1.0, 0.0)))

    def each_other(survival):
        return (survival[:, 1] > 0).to(torch.int64).roll(1)

    weights = scheduled_law(law, each_other, (0, 0))
    first = {}
    for (a, b), weight in weights.items():
        first[a[0], b[0]] = first.get((a[0], b[0]), 0) + weight
    assert first[0, 0] + first[0, 1] == first[0, 0] + first[1, 0] == Fraction(7, 10)
    assert first[0, 0] == Fraction(41, 80)
    assert not compare_scheduled(law, each_other, (0, 0)).equal


def test_ties_taken_out_of_order_leak():
    law = GridLaw.independent((3, 1), (1, 1), 2, ((1.0, 1.0), (1.0, 0.0)))
    table = CostTable([1.0, 1.0, 1.0, 0.95, 0.4, 0.3, 0.2])
    assert not compare_scheduled(law, lambda a: later_positions_first(a, table), (0, 0)).equal
    assert compare_scheduled(law, lambda a: dsspark.admit(a, 1), (0, 0)).equal


def test_the_law_of_verification_by_hand():
    # q = 1/2, p = 3/4, 1/4: token 1 is accepted half the time, and the residual is token 0.
    law = GridLaw.independent((3, 1), (1, 1), 2)
    assert verified_law(law, 0, (1, 0), 1) == {
        (0,): Fraction(1, 2),
        (1, 0): Fraction(3, 8),
        (1, 1): Fraction(1, 8),
    }


# Bisection


def test_first_true_finds_the_very_float():
    thresholds = torch.tensor([0.0, 2.0**-149, 1e-30, 0.3, TOP, 1.0])
    assert first_true(lambda u: u >= thresholds, 6).tolist() == thresholds.double().tolist()


@pytest.mark.parametrize("vocab", [1, 2, 19, 272])
@pytest.mark.parametrize(("temperature", "draft_temperature"), [(1.0, None), (0.7, 1.3), (0.0, 1.0), (1.0, 0.0)])
def test_the_library_is_exact_to_float32_rounding(vocab, temperature, draft_temperature, generator):
    target = torch.randn(vocab, generator=generator) * 3
    draft, bonus = target + torch.randn(vocab, generator=generator), torch.randn(vocab, generator=generator)
    error = law_error(target, draft, bonus, temperature=temperature, draft_temperature=draft_temperature)
    assert error.in_eps < 4
    assert error.max_threshold_ulps < 64
    assert max(error.draft_error, error.residual_error, error.bonus_error) < 1e-6
    assert not error.final_varies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_exact_laws_of_what_is_stored(dtype, generator):
    target, draft = (torch.randn(40, generator=generator).to(dtype) for _ in range(2))
    assert law_error(target, draft, cell=8).in_eps < 4


def test_equal_rows_have_thresholds_of_exactly_one(generator):
    row = torch.randn(50, generator=generator)
    error = law_error(row, row.clone(), cell=16)
    assert error.max_threshold_ulps == 0
    assert error.residual_error == 0


@pytest.mark.parametrize("filters", [Filters(top_k=5), Filters(top_p=0.8), Filters(min_p=0.1), Filters(7, 0.9, 0.05)])
def test_filtered_laws_are_exact(filters, generator):
    target, draft = (torch.randn(30, generator=generator) * 2 for _ in range(2))
    error = law_error(target, draft, filters=filters, cell=8)
    assert error.in_eps < 4
    assert not error.final_varies


def test_a_draft_vocabulary_of_its_own_is_exact(generator):
    ids = torch.tensor([0, 3, 4, 9, 17])
    error = law_error(
        torch.randn(20, generator=generator), torch.randn(5, generator=generator), draft_to_target=ids, cell=4
    )
    assert error.in_eps < 4
    wider = law_error(torch.randn(6, generator=generator), torch.randn(9, generator=generator), cell=4)
    assert wider.in_eps < 4


def broken(name, stage):
    return with_stage(rejection.verify, rejection, name, stage)


def test_each_part_of_the_error_sees_its_own_fault(generator):
    target, draft = torch.randn(24, generator=generator), torch.randn(24, generator=generator)
    measure = partial(law_error, target, draft, cell=8)
    eager = measure(verify_fn=broken("accepts", lambda u, p, q: u * q * 0.99 < p))
    assert eager.max_threshold_ulps > 1e4
    from_p = measure(verify_fn=broken("residual", lambda p, q: p))
    assert from_p.residual_error > 1e-2
    assert from_p.in_eps > 1e4
    assert from_p.max_threshold_ulps < 64

    def other_bonus(rows, *args, **kwargs):
        rows = rows.clone()
        rows[1::2, 0] += 0.1
        return dsspark.verify(rows, *args, **kwargs)

    bonus = measure(verify_fn=other_bonus)
    assert bonus.bonus_error > 1e-3
    assert bonus.max_threshold_ulps < 64
    drawn = measure(draft_fn=lambda base, *args, **kwargs: dsspark.draft_block(base.bfloat16(), *args, **kwargs))
    assert drawn.draft_error > 1e-4


def test_a_residual_that_depends_on_the_draft_is_seen(generator):
    def at_the_token_only(draft, requests, position, vocab_size):
        law = true_law(draft, requests, position, vocab_size)
        tokens = draft.tokens[requests, position, None]
        return torch.zeros_like(law).scatter_(1, tokens, law.gather(1, tokens))

    true_law = rejection.draft_law
    target, draft = torch.randn(24, generator=generator), torch.randn(24, generator=generator)
    error = law_error(target, draft, cell=8, verify_fn=broken("draft_law", at_the_token_only))
    assert error.final_varies
    assert error.in_eps > 1e4


def test_a_draw_that_is_no_two_level_inverse_cdf_is_refused(generator):
    row = torch.randn(12, generator=generator)
    with pytest.raises(ValueError, match="two-level"):
        law_error(
            row, row, cell=4, draft_fn=lambda *args, **kwargs: dsspark.draft_block(*args, **{**kwargs, "cell": 3})
        )


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"target_logits_row": torch.zeros(2, 3)}, ValueError, "target_logits_row"),
        ({"target_logits_row": torch.full((3,), -torch.inf)}, ValueError, "distribution"),
        ({"draft_logits_row": torch.tensor([0.0, torch.nan, 0.0])}, ValueError, "distribution"),
        ({"draft_logits_row": torch.zeros(3, dtype=torch.int64)}, TypeError, "draft_logits_row"),
        ({"bonus_row": torch.zeros(4)}, ValueError, "bonus_row"),
        ({"cell": 0}, ValueError, "cell"),
    ],
)
def test_law_error_refuses_bad_rows(change, error, names):
    with pytest.raises(error, match=names):
        law_error(**{"target_logits_row": torch.zeros(3), "draft_logits_row": torch.zeros(3), **change})


def test_laws_need_no_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None; sys.modules['scipy'] = None\n"
        "import torch\n"
        "from dsspark.testing import laws, mutants\n"
        "assert laws.law_error(torch.zeros(4), torch.arange(4.0)).in_eps < 4\n"
        "from dsspark.testing.audit import audit_rng, audit_scheduler\n"
        "import dsspark\n"
        "assert audit_rng(dsspark.Uniforms.from_seeds).passed\n"
        "try: audit_scheduler(dsspark.schedule)\n"
        "except RuntimeError as error: assert 'dsspark[test]' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""The audits, as a user meets them: a counterexample as small as the paper's, clear errors, the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

import dsspark
from dsspark import DelayedScheduler, Uniforms
from dsspark.cli import main
from dsspark.testing.audit import LosslessnessError, OutsideSampler, audit_rng, audit_sampler, audit_scheduler
from dsspark.testing.mutants import scheduling
from dsspark.testing.mutants.noise import keyed_by_position, keyed_by_row, mirrored, one_seed, same_every_round
from dsspark.testing.mutants.verification import VERIFICATION_MUTANTS

QUICK = 40


def outside(target, draft, drafted, accept=None, final=None, *, residual=True):
    """A vectorised rejection sampler as an engine has it: probabilities in, tokens out; draws by itself if it is given nothing."""
    num_requests, block_size = drafted.shape
    accept = torch.rand(num_requests, block_size) if accept is None else accept
    final = torch.rand(num_requests) if final is None else final
    p_x = target[:, :block_size].gather(2, drafted[..., None])[..., 0]
    q_x = draft.gather(2, drafted[..., None])[..., 0]
    accepted = (accept * q_x < p_x).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(num_requests)
    law = target[rows, accepted]
    excess = (law - torch.cat((draft, torch.zeros_like(target[:, :1])), dim=1)[rows, accepted]).clamp(min=0)
    law = torch.where((excess.sum(dim=1, keepdim=True) > 0) & residual, excess, law)
    running = law.cumsum(dim=1)
    total = running[:, -1:]
    drawn = torch.searchsorted(running, (final[:, None] * total).contiguous(), right=True)
    drawn = torch.minimum(drawn, torch.searchsorted(running, total.contiguous()))
    position = torch.arange(block_size + 1)
    padded = torch.cat((drafted, drafted[:, :1]), dim=1)
    return torch.where(position < accepted[:, None], padded, torch.where(position == accepted[:, None], drawn, -1))


def without_residual(*arguments):
    return outside(*arguments, residual=False)


# Samplers


def test_the_librarys_sampler_passes():
    report = audit_sampler(dsspark.verify, max_examples=QUICK)
    assert report.passed, str(report)
    assert (report.counterexample, report.exact, report.total_variation) == (None, {}, 0)
    report.assert_lossless()


LAW_MUTANTS = [mutant for mutant in VERIFICATION_MUTANTS if mutant.check == "law"]


@pytest.mark.parametrize("mutant", LAW_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_biased_sampler_is_told_by_a_law(mutant):
    report = audit_sampler(mutant.library.verify, max_examples=QUICK)
    assert not report.passed
    finding = report.findings[0]
    assert finding.check == "law"
    assert not finding.passed
    assert report.counterexample is finding.counterexample
    assert sum(report.exact.values()) == sum(report.observed.values()) == 1
    assert report.total_variation == sum(abs(report.exact[t] - p) for t, p in report.observed.items()) / 2 > 0
    with pytest.raises(LosslessnessError, match="NOT LOSSLESS"):
        report.assert_lossless()


def test_a_biased_sampler_is_shrunk():
    """Two tokens, one draft, one request are enough to show a residual that is not one."""
    report = audit_sampler(VERIFICATION_MUTANTS[0].library.verify, max_examples=QUICK)
    case = report.counterexample
    assert (case.law.vocab_size, case.law.block_size, len(case.lengths)) == (2, 1, 1)
    assert f"observed {report.comparison.observed[report.comparison.worst]}" in str(report)


EDGE_MUTANTS = [mutant for mutant in VERIFICATION_MUTANTS if mutant.check in ("boundary draw", "law by bisection")]


@pytest.mark.parametrize("mutant", EDGE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_sampler_that_is_wrong_at_the_edges_only_is_told(mutant):
    report = audit_sampler(mutant.library.verify, max_examples=5)
    assert {f.check for f in report.failures} & {"boundary draw", "thresholds"}
    assert report.counterexample is not None


def test_an_outside_sampler_is_exact_with_injected_uniforms():
    assert audit_sampler(OutsideSampler(outside, takes_uniforms=True), max_examples=QUICK).passed
    report = audit_sampler(OutsideSampler(without_residual, takes_uniforms=True), max_examples=QUICK)
    assert not report.findings[0].passed
    assert report.total_variation > 0


def test_an_outside_sampler_that_draws_by_itself_is_tested_statistically():
    torch.manual_seed(0)
    assert audit_sampler(OutsideSampler(outside), samples=20_000).passed
    report = audit_sampler(OutsideSampler(without_residual), samples=20_000)
    assert [f.passed for f in report.findings] == [False, False, False, True]  # the last has p = q
    assert "G-test" in str(report)


def test_an_outside_sampler_with_impossible_tokens_fails():
    def impossible(target, draft, drafted):
        return torch.full((len(drafted), drafted.shape[1] + 1), 99)

    assert not any(f.passed for f in audit_sampler(OutsideSampler(impossible), samples=100).findings)


# Schedulers


@pytest.mark.parametrize("scheduler", [dsspark.schedule, DelayedScheduler])
def test_the_librarys_schedulers_pass(scheduler):
    report = audit_scheduler(scheduler, max_examples=QUICK)
    assert report.passed, str(report)
    assert [f.check for f in report.findings] == ["joint law", "causality"]


@pytest.mark.parametrize("scheduler", [scheduling.global_search, scheduling.budget_of_this_step])
def test_a_global_search_is_told_by_a_counterexample_as_small_as_appendix_a(scheduler):
    report = audit_scheduler(scheduler)
    law, causality = report.findings
    case = law.counterexample
    assert (len(case.anchors), case.law.block_size, case.law.vocab_size, len(case.sps)) == (1, 2, 2, 3)
    assert law.comparison.total_variation > 0
    assert tuple(causality.counterexample.survival.shape) == (1, 2)
    text = str(report)
    assert "SPS(1..)" in text
    assert "confidence" in text
    assert isinstance(report.total_variation, Fraction)
    assert f"total variation {report.total_variation}" in text
    with pytest.raises(LosslessnessError):
        report.assert_lossless()


@pytest.mark.parametrize("scheduler", [scheduling.admitting_each_other, scheduling.later_positions_first])
def test_a_leak_between_requests_is_told_by_two_requests(scheduler):
    report = audit_scheduler(scheduler, max_examples=150)
    assert report.counterexample is not None
    law = report.findings[0]
    assert not law.passed
    assert (len(law.counterexample.anchors), law.counterexample.law.block_size) == (2, 2)


class NoDelay(DelayedScheduler):
    """Plans from the survivals of this very step."""

    def step(self, survival, request_ids, max_tokens=None):
        return dsspark.admit(survival, dsspark.plan_budget(survival, self.cost_table))


class Sticky:
    """Searches the current block too, but only after a first step: a leak that needs a history to show."""

    def __init__(self, cost_table, block_size):
        self.cost_table, self.seen = cost_table, 0

    def step(self, survival, request_ids):
        self.seen += 1
        if self.seen == 1:
            return torch.zeros(len(survival), dtype=torch.int32)
        return scheduling.budget_of_this_step(survival, self.cost_table)


@pytest.mark.parametrize("scheduler", [NoDelay, Sticky])
def test_a_scheduler_with_a_memory_is_told(scheduler):
    report = audit_scheduler(scheduler, max_examples=80)
    assert not report.passed
    case = report.findings[0].counterexample
    assert case.law.block_size == 2
    assert bool(case.history) is (scheduler is Sticky)


# Randomness


def counters_of_from_seeds(seeds, rounds, block_size):
    """(key, round, stream, position) of every word, as documented for Uniforms.from_seeds."""
    streams = {"draft": (0, block_size), "accept": (1, block_size), "final": (2, 1)}
    return {
        name: torch.tensor([[[s, t, stream, k] for k in range(n)] for s, t in zip(seeds, rounds, strict=True)])
        for name, (stream, n) in streams.items()
    }


def test_the_librarys_noise_passes():
    report = audit_rng(Uniforms.from_seeds, counters=counters_of_from_seeds)
    assert report.passed, str(report)
    assert len(report.findings) == 7


def from_zero_excluded(seeds, rounds, block_size):
    """u in (0, 1] instead of [0, 1), on a coarse grid so that 1 does occur."""
    uniforms = Uniforms.from_seeds(seeds, rounds, block_size)
    return Uniforms(draft=uniforms.draft, accept=1 - (uniforms.accept * 8).floor() / 8, final=uniforms.final)


def squared(seeds, rounds, block_size):
    uniforms = Uniforms.from_seeds(seeds, rounds, block_size)
    return Uniforms(draft=uniforms.draft**2, accept=uniforms.accept, final=uniforms.final)


def restless(seeds, rounds, block_size):
    return Uniforms.draw(len(seeds), block_size)


def crowded(seeds, rounds, block_size):
    """The last request's numbers depend on how many requests there are."""
    return Uniforms.from_seeds([*seeds[:-1], seeds[-1] ^ len(seeds) << 40], rounds, block_size)


@pytest.mark.parametrize(
    ("source", "check"),
    [
        (keyed_by_position, "noise used twice"),
        (same_every_round, "noise used twice"),
        (keyed_by_row, "independence of the batch"),
        (crowded, "independence of the batch"),
        (restless, "independence of the batch"),
        (one_seed, "streams of different seeds"),
        (mirrored, "correlation"),
        (from_zero_excluded, "range"),
        (squared, "uniformity"),
    ],
)
def test_each_check_of_the_noise_sees_its_fault(source, check):
    report = audit_rng(source)
    assert check in [finding.check for finding in report.failures]


def test_reused_counters_are_told():
    def overlapping(seeds, rounds, block_size):
        counters = counters_of_from_seeds(seeds, rounds, block_size)
        return {**counters, "final": counters["accept"][:, :1]}

    report = audit_rng(Uniforms.from_seeds, counters=overlapping)
    assert [f.check for f in report.failures] == ["counters"]
    assert "accept[0]" in str(report.counterexample)


# Bad use


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: audit_sampler(3), TypeError, "dsspark.verify"),
        (lambda: audit_sampler(lambda *a, **k: 3), ValueError, "Verification"),
        (lambda: audit_sampler(dsspark.verify, max_examples=0), ValueError, "max_examples"),
        (lambda: audit_sampler(OutsideSampler(lambda *a: 3)), ValueError, "int64 tensor"),
        (lambda: audit_sampler(OutsideSampler(lambda p, q, x: x)), ValueError, r"\[40000, 3\]"),
        (lambda: OutsideSampler(3), TypeError, "callable"),
        (lambda: audit_scheduler(3), TypeError, "survival, cost_table"),
        (lambda: audit_scheduler(dict), TypeError, "step"),
        (lambda: audit_scheduler(lambda a, t: [0]), ValueError, "lengths in 0..2"),
        (lambda: audit_scheduler(lambda a, t: a[:, 0]), ValueError, "integer tensor"),
        (lambda: audit_scheduler(lambda a, t: torch.full((len(a),), 9)), ValueError, "lengths in 0..2"),
        (lambda: audit_rng(3), TypeError, "from_seeds"),
        (lambda: audit_rng(lambda s, t, g: 3), ValueError, "expected the Uniforms"),
        (lambda: audit_rng(lambda s, t, g: Uniforms.draw(1, 1)), ValueError, "expected the Uniforms"),
        (lambda: audit_rng(Uniforms.from_seeds, counters=lambda s, t, g: {"draft": 3}), ValueError, "counters"),
    ],
)
def test_bad_use_says_what_was_expected(call, error, names):
    with pytest.raises(error, match=names):
        call()


# Command line


def test_the_command_line_passes_what_is_lossless(capsys):
    assert main(["audit", "dsspark:Uniforms.from_seeds", "--kind", "rng"]) == 0
    assert main(["audit", "dsspark:verify", "--kind", "sampler", "--examples", "5"]) == 0
    assert main(["audit", "dsspark:schedule", "--kind", "scheduler", "--examples", "5", "--seed", "3"]) == 0
    assert len(re.findall(r": lossless$", capsys.readouterr().out, re.MULTILINE)) == 3


def test_the_command_line_exits_1_on_a_leak_in_a_module_of_the_current_folder(tmp_path):
    (tmp_path / "my_engine.py").write_text(
        "import dsspark\n"
        "def schedule(survival, cost_table):\n"
        "    return dsspark.admit(survival, dsspark.plan_budget(survival, cost_table))\n"
    )
    command = [sys.executable, "-m", "dsspark", "audit", "my_engine:schedule", "--kind", "scheduler"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "NOT LOSSLESS" in result.stdout
    assert "R = 1, gamma = 2" in result.stdout
    assert "total variation" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dsspark:schedule"], "--kind"),
        (["--kind", "rng"], "subject"),
        (["dsspark:nothing_here", "--kind", "rng"], "nothing_here"),
        (["no_such_module:f", "--kind", "rng"], "cannot be imported"),
        (["dsspark.schedule", "--kind", "scheduler"], "package.module:name"),
        (["dsspark:schedule", "--kind", "sampler"], "target_logits"),
        (["dsspark:__version__", "--kind", "scheduler"], "survival, cost_table"),
        (["dsspark:verify", "--mutants"], "one or the other"),
        (["--mutants", "--seeds", "0"], "seeds"),
    ],
)
def test_the_command_line_says_what_is_wrong(words, says, capsys):
    assert main(["audit", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_command_line_kills_the_mutants(capsys):
    assert main(["audit", "--mutants", "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    killed, total = map(int, re.fullmatch(r"killed (\d+) of (\d+)", lines[-1]).groups())
    assert killed == total == len(lines) - 1 >= 24


def test_the_command_line_reports_a_survivor(capsys, monkeypatch):
    from dsspark.testing import command
    from dsspark.testing.checks import Library
    from dsspark.testing.mutants import Mutant

    harmless = Mutant(name="harmless", fault="none", check="budget", parts={"admit": Library().admit})
    monkeypatch.setattr(command, "MUTANTS", (harmless,))
    assert main(["audit", "--mutants", "--seeds", "1"]) == 1
    out = capsys.readouterr().out
    assert "SURVIVES harmless" in out
    assert out.endswith("killed 0 of 1\n")

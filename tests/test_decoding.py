"""`generate`: greedy equality, law, reproducibility, batches, stopping, statistics and errors."""

from __future__ import annotations

import collections

import pytest
import torch
from scipy.stats import chisquare
from toy import ToyDrafter, ToyTarget

from dsspark import CostTable, DelayedScheduler, Filters
from dsspark.decoding import generate
from dsspark.serving.policies import ConfidenceThreshold, EarlyStopping, FixedLength

V = 11
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0, 1]]
TABLE = CostTable(1.0 / (1.0 + 0.15 * torch.arange(40)))


def policies(block_size=3, table=TABLE):
    return {
        "none": FixedLength(0),
        "whole": None,
        "two": FixedLength(2),
        "threshold": ConfidenceThreshold(0.4),
        "early": EarlyStopping(table),
        "delayed": DelayedScheduler(table, block_size),
    }


@pytest.fixture
def target():
    return ToyTarget(V)


@pytest.mark.parametrize("name", list(policies()))
@pytest.mark.parametrize("keep_logits", [True, False])
def test_greedy_output_is_the_targets_own(target, name, keep_logits):
    result = generate(
        target, ToyDrafter(target), PROMPTS, 20, temperature=0.0, policy=policies()[name], keep_logits=keep_logits
    )
    assert result.tokens == [target.greedy(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("name", list(policies()))
def test_the_text_has_the_targets_law(target, name):
    """The joint law of three tokens under every policy, over 6,000 seeds: chi-square at a false-alarm rate of 1e-6."""
    target = ToyTarget(3, scale=0.6)
    count = 6000
    policy = policies(table=CostTable(1.0 / (1.0 + 1e-4 * torch.arange(4 * count + 1))))[name]
    result = generate(target, ToyDrafter(target), [[1, 2]] * count, 3, policy=policy, seeds=range(count))
    observed = collections.Counter(tuple(text) for text in result.tokens)
    law = {}
    for a in range(3):
        for b in range(3):
            for c in range(3):
                p = (
                    target.table[1, 2].softmax(-1)[a]
                    * target.table[2, a].softmax(-1)[b]
                    * target.table[a, b].softmax(-1)[c]
                )
                law[a, b, c] = float(p)
    expected = [law[key] * count / sum(law.values()) for key in law]
    assert min(expected) > 5
    assert chisquare([observed[key] for key in law], expected).pvalue > 1e-6


def test_a_seed_gives_the_same_text_in_any_batch(target):
    """Under no, fixed and threshold policies; across requests the schedulers keep the law only."""
    drafter = ToyDrafter(target)
    for name in ("none", "whole", "two", "threshold"):
        together = generate(target, drafter, PROMPTS, 25, policy=policies()[name], seeds=[7, 8, 9, 10])
        for i in (2, 0):
            alone = generate(target, drafter, [PROMPTS[i]], 25, policy=policies()[name], seeds=[7 + i])
            assert alone.tokens[0] == together.tokens[i]
            assert alone.logprobs[0] == together.logprobs[i]
    assert generate(target, drafter, PROMPTS, 25, seeds=[1, 2, 3, 4]).tokens != together.tokens


def test_a_drafter_changes_neither_greedy_text_nor_logprobs(target):
    alone = generate(target, None, PROMPTS, 15, temperature=0.0)
    drafted = generate(target, ToyDrafter(target), PROMPTS, 15, temperature=0.0)
    assert alone.tokens == drafted.tokens
    assert alone.statistics.tokens_per_round == 1.0
    assert drafted.statistics.tokens_per_round > 1.5


def test_logprobs_are_the_targets(target):
    filters, temperature = Filters(top_k=5), 0.7
    result = generate(target, ToyDrafter(target), PROMPTS, 12, temperature, filters=filters)
    for prompt, new, logprobs in zip(PROMPTS, result.tokens, result.logprobs, strict=True):
        text = [0, *prompt, *new]
        for i, (token, logprob) in enumerate(zip(new, logprobs, strict=True)):
            end = len(prompt) + i
            row = target.table[text[end - 1], text[end]]
            row = torch.where(row >= row.topk(5).values[-1], row, -torch.inf) / temperature
            assert logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-5)


def test_stop_tokens_and_limits_cut_the_text(target):
    full = generate(target, ToyDrafter(target), PROMPTS, 40, seeds=[1, 2, 3, 4]).tokens
    stop = full[0][9]
    cut = generate(target, ToyDrafter(target), PROMPTS, 40, seeds=[1, 2, 3, 4], stop_tokens=[stop]).tokens
    for whole, text in zip(full, cut, strict=True):
        assert text == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    limited = generate(target, ToyDrafter(target), PROMPTS, [0, 1, 5, 40], seeds=[1, 2, 3, 4]).tokens
    assert limited == [full[0][:0], full[1][:1], full[2][:5], full[3]]


def test_long_prompts_are_taken_in_pieces(target, monkeypatch):
    prompts = [[i % V for i in range(70)], [3], [i % 7 for i in range(33)]]
    whole = generate(target, ToyDrafter(target), prompts, 10)
    monkeypatch.setattr("dsspark.decoding.PREFILL_CHUNK", 16)
    assert generate(target, ToyDrafter(target), prompts, 10).tokens == whole.tokens


def test_reports_stream_the_text_and_match_the_statistics(target):
    reports = []
    result = generate(target, ToyDrafter(target), PROMPTS, 21, policy=FixedLength(2), on_round=reports.append)
    texts = {i: [] for i in range(len(PROMPTS))}
    for report in reports:
        for request, new in zip(report.request_ids, report.emitted, strict=True):
            texts[request].extend(new)
        assert report.survival.shape == (len(report.request_ids), 3)
        assert (report.lengths == 2).all()
    assert list(texts.values()) == result.tokens
    accepted = torch.cat([report.verification.num_accepted for report in reports])
    statistics = result.statistics
    assert statistics.rounds == len(accepted)
    assert statistics.tokens_per_round == pytest.approx(1 + accepted.float().mean().item())
    assert statistics.verified.tolist() == [len(accepted), len(accepted), 0]
    assert statistics.reached.tolist() == [len(accepted), int((accepted >= 1).sum()), 0]
    assert statistics.accepted.tolist() == [int((accepted >= 1).sum()), int((accepted >= 2).sum()), 0]
    assert statistics.mean_budget == 3
    assert statistics.waste == pytest.approx(1 - accepted.sum().item() / (2 * len(accepted)))
    assert statistics.cumulative_acceptance[0] == statistics.conditional_acceptance[0]


def test_the_scheduler_verifies_less_as_requests_grow(target):
    drafter = ToyDrafter(target)
    budgets = [
        generate(target, drafter, [[1, 2]] * count, 12, policy=EarlyStopping(TABLE)).statistics.mean_budget
        for count in (1, 6, 16)
    ]
    assert budgets[0] > budgets[1] > budgets[2] >= 1


def test_no_prompts_is_an_empty_batch(target):
    result = generate(target, ToyDrafter(target), [], 5)
    assert result.tokens == []
    assert result.statistics.rounds == 0


def test_a_broken_model_is_refused_not_decoded(target):
    target.table[2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match="no distribution"):
        generate(target, None, [[2, 3]], 5)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\]"),
        ({"prompts": [["a"]]}, TypeError, r"prompts\[0\]"),
        ({"prompts": [[-1]]}, TypeError, r"prompts\[0\]"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": [1]}, ValueError, "max_new_tokens"),
        ({"seeds": [1]}, ValueError, "seeds"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature"),
        ({"backend": "cuda"}, ValueError, "backend"),
    ],
)
def test_bad_arguments_name_themselves(target, change, error, names):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 3, **change}
    with pytest.raises(error, match=names):
        generate(target, ToyDrafter(target), **arguments)


@pytest.mark.parametrize(("policy", "value"), [(FixedLength, -1), (ConfidenceThreshold, 1.5)])
def test_a_bad_policy_is_refused(policy, value):
    with pytest.raises(ValueError, match="got"):
        policy(value)


def test_a_missing_kernel_is_an_error_not_a_fallback(target, monkeypatch):
    monkeypatch.setattr("dsspark._dispatch._kernel_module", lambda component: None)
    with pytest.raises(RuntimeError, match="triton"):
        generate(target, ToyDrafter(target), PROMPTS, 3, backend="triton")

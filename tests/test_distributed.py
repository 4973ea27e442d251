"""A vocabulary sharded over 1, 2 and 4 gloo ranks: the tokens of a single rank, on every rank, and the bytes that were promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from breakpoints import MARGIN, distance_to_breakpoints
from distributed_cases import CASES, Case, build, reference_verify
from distributed_ranks import DRAFTED, EMITTED, WORLDS
from helpers import law_counts, logits_of, midpoints

import dsspark
from dsspark.distributed import ShardedDraft, VocabularyShard, draft_block_parallel, verify_parallel
from dsspark.distributed import traffic as wire
from dsspark.reference.filters import target_weights

HERE = Path(__file__).parent
BY_NAME = {case.name: case for case in CASES}
RANKS = [(world, rank) for world in WORLDS for rank in range(world)]

every_case = pytest.mark.parametrize("name", list(BY_NAME))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request, tmp_path_factory):
    """Return what every rank of every world size found, by (world size, rank)."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(HERE / "distributed_ranks.py"), str(folder), request.param]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stderr
    return {place: torch.load(folder / f"world{place[0]}rank{place[1]}.pt") for place in RANKS}


def same_bits(a, b):
    return torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)) if a.is_floating_point() else torch.equal(a, b)


@every_case
def test_every_rank_returns_the_same_bits(ranks, name):
    for world in WORLDS:
        first = ranks[world, 0][name]
        for rank in range(1, world):
            found = ranks[world, rank][name]
            for part in ("draft", "result"):
                for field, value in first[part].items():
                    assert same_bits(found[part][field], value), (world, rank, part, field)


@every_case
def test_the_number_of_ranks_changes_nothing(ranks, name):
    """Without a product with W2, whose rounding is the matrix library's, not even the bits of a probability."""
    alone = ranks[1, 0][name]
    for world in WORLDS[1:]:
        found = ranks[world, 0][name]
        for part in ("draft", "result"):
            for field, value in alone[part].items():
                if BY_NAME[name].kind is None or not value.is_floating_point():
                    assert same_bits(found[part][field], value), (world, part, field)
                else:
                    torch.testing.assert_close(found[part][field], value, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("name", [case.name for case in CASES if not case.arbitrary])
@pytest.mark.parametrize("world", WORLDS)
def test_equals_the_single_rank_reference(ranks, name, world):
    case = BY_NAME[name]
    round_ = build(case)
    found = ranks[world, world - 1][name]
    if not case.point:
        tokens, probs = found["draft"]["tokens"], found["draft"]["token_probs"]
        assert torch.equal(tokens, round_.reference.tokens)
        expected = torch.full_like(probs, 4.0) if case.doubted else round_.reference.token_probs
        if not case.doubted:
            torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    expected = reference_verify(case, round_)
    for field in EMITTED[:-1]:
        assert torch.equal(found["result"][field], getattr(expected, field)), field
    torch.testing.assert_close(found["result"]["logprobs"], expected.logprobs, rtol=1e-5, atol=2e-6)


def test_arbitrary_uniforms_differ_from_the_reference_only_within_rounding_of_a_breakpoint(ranks):
    case = next(case for case in CASES if case.arbitrary)
    round_ = build(case)
    drafted = ranks[4, 0][case.name]["draft"]["tokens"]
    differs = drafted != round_.reference.tokens
    assert int(differs.sum()) <= 3  # of 900
    for k in range(drafted.shape[1]):
        weights, _ = target_weights(round_.reference.logits[:, k].double(), round_.reference.temperature.double())
        distance = distance_to_breakpoints(weights, round_.uniforms.draft[:, k], case.cell)
        assert bool((distance[differs[:, k]] < MARGIN).all())


def test_the_cases_reach_every_branch():
    """Rejections and bonuses at every position, requests that are invalid, and residuals that are empty."""
    seen = set()
    for case in CASES:
        round_ = build(case)
        result = reference_verify(case, round_)
        lengths = round_.batch.cu_seqlens.diff() - 1
        for accepted, length, valid in zip(
            result.num_accepted.tolist(), lengths.tolist(), result.valid.tolist(), strict=True
        ):
            seen.add(("bonus" if accepted == length else "rejected", accepted) if valid else "invalid")
    assert seen == {"invalid", *(("rejected", k) for k in range(3)), *(("bonus", k) for k in range(4))}


@every_case
def test_what_travels_is_what_was_promised(ranks, name):
    case, round_ = BY_NAME[name], build(BY_NAME[name])
    vocab, draft_vocab = case.vocab, round_.base.shape[2]
    for world in WORLDS:
        shard = VocabularyShard(bounds=case.bounds(world), cell=case.cell)
        draft_counts = shard.cell_counts
        if case.draft_ids:
            draft_counts = shard.of_draft(round_.draft_to_target).cell_counts
        elif draft_vocab != vocab:
            draft_counts = VocabularyShard(bounds=(*shard.bounds[:-1], draft_vocab), cell=case.cell).cell_counts
        size = wire.RoundSize(
            num_requests=case.requests,
            block_size=3,
            num_tokens=len(round_.target_logits),
            vocab_size=vocab,
            cell_counts=shard.cell_counts,
            draft_cell_counts=draft_counts,
            itemsize=case.dtype.itemsize,
            num_filters={"none": 0, "top_k": 1, "top_p": 1}.get(case.filters, 2),
            scheduled=False,
        )
        expected = wire.round_payload(size)
        if case.requests == 0:  # verification has nothing to ask
            expected = {label: count for label, count in expected.items() if label.startswith("draft")}
        for rank in range(world):
            assert ranks[world, rank][name]["payload"] == expected
            if case.requests:
                assert ranks[world, rank][name]["calls"] == wire.round_calls(size)


def test_no_message_is_as_large_as_a_row_of_logits_for_every_token(ranks):
    """At real cells of 256 the statistics of a row are a hundredth of the row."""
    payload = ranks[4, 0]["real cells"]["payload"]
    round_ = build(BY_NAME["real cells"])
    rows = (round_.base.numel() + round_.target_logits.numel()) * 2
    assert sum(payload.values()) < 0.03 * rows


@pytest.mark.parametrize("world", WORLDS)
def test_decisions_are_taken_once(ranks, world):
    """Survivals that differ from rank to rank give one survival, one schedule, one budget, one admission: the first rank's."""
    decisions = [ranks[world, rank]["decisions"] for rank in range(world)]
    for name in ("survival", "schedule", "budget", "admit"):
        assert all(torch.equal(found[name], decisions[0][name]) for found in decisions)
    assert torch.equal(decisions[0]["survival"], decisions[0]["own survival"])
    assert torch.equal(decisions[0]["schedule"], decisions[0]["own schedule"])
    assert int(decisions[0]["budget"]) == int(decisions[0]["admit"].sum()) > 0
    if world > 1:  # without the broadcast the ranks would have parted
        assert any(not torch.equal(found["own schedule"], found["schedule"]) for found in decisions[1:])


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_raises_alike(ranks, world):
    errors = [ranks[world, rank]["errors"] for rank in range(world)]
    assert all(found == errors[0] for found in errors)
    assert errors[0]["adopted"] == str(tuple(37984 * p for p in range(world + 1)))
    if world > 1:
        assert "expected a divisor of every offset" in errors[0]["from_size"]
        assert "cell=32 works" in errors[0]["from_size"]
        assert f"on ranks [{world - 1}] than on rank 0" in errors[0]["agreement"]
    assert ("3 cells of 1 for 4 ranks" in errors[0]["split"]) == (world == 4)


def test_a_shard_that_splits_a_cell_is_refused_with_a_cell_that_works():
    with pytest.raises(ValueError, match=r"got 256 with shard offsets \(37984, 75968, 113952\).*cell=32 works"):
        VocabularyShard(bounds=(0, 37984, 75968, 113952, 151936))
    assert VocabularyShard(bounds=(0, 37984, 75968, 113952, 151936), rank=3, cell=32).cell_counts == (1187,) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bounds": (0, 8, 8, 16), "cell": 4}, "at least one id"),
        ({"bounds": (4, 8), "cell": 4}, "bounds: got"),
        ({"bounds": (0,), "cell": 4}, "bounds: got"),
        ({"bounds": (0, 2**20 + 1)}, "at most 1048576 ids"),
        ({"bounds": (0, 8, 16), "rank": 2, "cell": 4}, "rank: got 2"),
        ({"bounds": (0, 8), "cell": 0}, "cell: got 0"),
        ({"bounds": (0, 8), "draft_to_target": torch.arange(3)}, "draft_to_target"),
    ],
)
def test_a_shard_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        VocabularyShard(**arguments)


def test_a_draft_whose_shards_lie_elsewhere_is_refused():
    tokens = torch.tensor([[1]])
    batch = dsspark.pack(torch.tensor([0]), tokens, torch.tensor([1]), torch.tensor([0]))
    shard = VocabularyShard(bounds=(0, 4, 8), cell=4)
    draft = ShardedDraft.point(tokens, VocabularyShard(bounds=(0, 4, 8), cell=2))
    uniforms = dsspark.Uniforms.draw(1, 1)
    with pytest.raises(ValueError, match="in cells of 2 for a target"):
        verify_parallel(torch.zeros(2, 4), batch, draft, uniforms, shard)
    other = ShardedDraft.point(tokens, shard.of_draft(torch.tensor([0, 1, 2, 3, 4])))
    with pytest.raises(ValueError, match="expected the same offsets"):
        verify_parallel(torch.zeros(2, 8), batch, other, uniforms, VocabularyShard(bounds=(0, 8), cell=4))
    with pytest.raises(ValueError, match="expected a divisor"):
        shard.of_draft(torch.tensor([0, 1, 2, 5, 6]))
    with pytest.raises(ValueError, match="at least one id"):
        shard.of_draft(torch.tensor([0, 1, 2]))


def test_arguments_are_checked_against_the_shard():
    shard = VocabularyShard.single(8)
    tokens, uniforms = torch.tensor([[1]]), dsspark.Uniforms.draw(1, 1)
    with pytest.raises(ValueError, match=r"base_logits: got shape \[1, 1, 7\]"):
        draft_block_parallel(torch.zeros(1, 1, 7), torch.tensor([0]), None, uniforms, shard)
    with pytest.raises(TypeError, match="base_logits: got dtype float64"):
        draft_block_parallel(torch.zeros(1, 1, 8).double(), torch.tensor([0]), None, uniforms, shard)
    batch = dsspark.pack(torch.tensor([0]), tokens, torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"target_logits: got shape \[2, 9\]"):
        verify_parallel(torch.zeros(2, 9), batch, ShardedDraft.point(tokens, shard), uniforms, shard)


def test_an_overflowing_batch_makes_every_request_invalid(monkeypatch):
    """What only a device can see: the mark of `pack` invalidates, nothing is truncated."""
    tokens = torch.tensor([[1, 2], [3, 4]])
    batch = dsspark.pack(torch.tensor([0, 0]), tokens, torch.tensor([2, 2]), torch.tensor([0, 0]))
    batch = dsspark.PackedBatch(**{**vars(batch), "num_tokens": torch.tensor(99, dtype=torch.int32)})
    monkeypatch.setattr("dsspark.distributed.verification.check_verify_arguments", lambda *_: None)
    shard = VocabularyShard.single(8)
    result = verify_parallel(
        torch.zeros(6, 8), batch, ShardedDraft.point(tokens, shard), dsspark.Uniforms.draw(2, 2), shard
    )
    assert not result.valid.any()
    assert bool((result.tokens == -1).all())
    assert int(result.num_emitted.sum()) == 0


def test_the_head_of_a_shard_shares_its_storage():
    head = dsspark.MarkovHead(16, 4, "gated", 6)
    shard = VocabularyShard(bounds=(0, 4, 16), rank=1, cell=4)
    part = shard.shard_head(head)
    assert part.markov_w1 is head.markov_w1
    assert part.gate_proj is head.gate_proj
    assert part.markov_w2.weight.data_ptr() == head.markov_w2.weight[4:].data_ptr()
    assert part.markov_w2.weight.shape == (12, 4)
    with torch.no_grad():
        head.markov_w2.weight[5] = 3.0
    assert bool((part.markov_w2.weight[1] == 3.0).all())


def test_the_drawn_law_is_exact_on_integers():
    """(1, 2, 3, 2) / 8 in cells of two, every combination of 8 x 15 midpoints: counts are exactly proportional to the law."""
    points = torch.cartesian_prod(torch.tensor(midpoints(8)), torch.tensor(midpoints(15))).to(torch.float32)
    count = len(points)
    uniforms = dsspark.Uniforms(draft=points[:, None], accept=torch.zeros(count, 1), final=points)
    logits = logits_of([1, 2, 3, 2]).expand(count, 1, 4)
    shard = VocabularyShard.single(4, cell=2)
    block = draft_block_parallel(logits, torch.zeros(count, dtype=torch.int64), None, uniforms, shard)
    assert law_counts(block.tokens.flatten(), 4) == [15, 30, 45, 30]


def test_the_page_shows_the_computed_table():
    page = (HERE.parent / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert wire.comparison(wire.default_sizes()) in page


def test_the_command_prints_bytes(capsys):
    import argparse

    parser = argparse.ArgumentParser()
    wire.add_arguments(parser)
    assert wire.run(parser.parse_args(["--requests", "64", "--cell", "32", "--ranks", "4"])) == 0
    printed = capsys.readouterr().out
    assert "4,748" in printed
    assert "all-gather of draft: logits" in printed
    with pytest.raises(ValueError, match="ranks: got 5"):
        wire.run(parser.parse_args(["--requests", "1", "--vocab-size", "512", "--ranks", "5"]))


def test_more_rows_than_a_chunk_are_filtered_alike():
    """Filters over 150 packed rows, several chunks, equal the sort of the reference."""
    case = Case(name="many filtered rows", requests=60, filters="all", rounded=True, vocab=37)
    round_ = build(case)
    shard = VocabularyShard.single(37, cell=case.cell)
    draft = ShardedDraft(block=round_.reference, shard=shard)
    found = verify_parallel(
        round_.target_logits,
        round_.batch,
        draft,
        round_.uniforms,
        shard,
        temperature=round_.temperature,
        filters=round_.filters,
    )
    expected = reference_verify(case, round_)
    for field in EMITTED[:-1]:
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)
    assert set(DRAFTED) <= set(vars(round_.reference))

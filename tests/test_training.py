"""Optimiser, resumable loop, drawing text from the target, and distillation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from dsspark.models.drafter import DSparkDrafter
from dsspark.models.target import BOS_ID, EOS_ID, TargetLM
from dsspark.reference.losses import draft_losses
from dsspark.training.corpus import DOMAINS, TokenStream, documents
from dsspark.training.distill import block_losses, draw_anchors, teach, train_drafters
from dsspark.training.loop import Schedule, train
from dsspark.training.optimiser import Muon, orthogonalise
from dsspark.training.precision import autocast, product_dtype
from dsspark.training.pretrain import train_target
from dsspark.training.rollout import sample_continuations
from dsspark.training.run import small_plan

QUIET = Console(quiet=True)
PLAN = small_plan()


@pytest.fixture(scope="module")
def streams() -> dict[str, TokenStream]:
    """The training split, with a few hundred problems."""
    return {domain: TokenStream(documents(domain, held_out=False, num_math=200), domain) for domain in DOMAINS}


@pytest.fixture
def target(generator: torch.Generator) -> TargetLM:
    """A tiny target with weights large enough that its laws are far from uniform."""
    model = TargetLM(PLAN.target, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() >= 2 else 1.0)
    return model.requires_grad_(False)


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_orthogonalise_brings_every_singular_value_near_one(shape, generator):
    matrix = torch.randn(shape, generator=generator) * 50
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalise(matrix)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3
    assert values.max() < 1.4
    # The singular vectors are kept: U^T X V is diagonal and positive.
    inner = left.T @ result @ right.T
    assert (inner.diagonal() > 0.25).all()
    assert (inner - inner.diagonal().diag()).abs().max() < 0.1


def test_muon_moves_against_the_gradient_by_a_size_that_ignores_its_scale(generator):
    gradient = torch.randn(12, 20, generator=generator)
    moved = []
    for scale in (1.0, 1024.0):  # a power of two: bfloat16 rounds both alike
        parameter = nn.Parameter(torch.zeros(12, 20))
        parameter.grad = gradient * scale
        Muon([parameter], lr=0.1).step()
        moved.append(parameter.detach())
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-2, atol=1e-3)
    assert (moved[0] * gradient).sum() < 0
    assert 0.5 < moved[0].square().mean().sqrt() / (0.1 * 0.2) < 1.5


def test_schedule_warms_up_then_falls():
    scales = [Schedule(steps=40, peak_lr=1.0, warmup=10).scale(step) for step in range(40)]
    assert scales[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(a > b for a, b in itertools.pairwise(scales[10:]))
    assert scales[-1] < 0.02


class InterruptedError_(KeyboardInterrupt):
    """Ctrl-C at a chosen step."""


def toy_run(
    checkpoint, *, stop_at: int | None = None, resume: bool = True, steps: int = 9
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Fit two small modules to a target that changes with the step; raise at step `stop_at`."""
    torch.manual_seed(0)
    modules = {
        name: nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 3)}) for name in "ab"
    }

    def losses(step: int) -> dict[str, Tensor]:
        if step == stop_at:
            raise InterruptedError_
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return {
            name: module["head"](torch.tanh(module["layers"][0](x))).square().mean() for name, module in modules.items()
        }

    schedule = Schedule(steps=steps, peak_lr=0.01, warmup=2, checkpoint_every=3)
    history = train("toy", modules, losses, schedule, checkpoint, resume=resume, console=QUIET)
    weights = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    return weights, history


@pytest.mark.parametrize("stop_at", [3, 5, 8])
def test_interrupted_and_resumed_training_equals_an_uninterrupted_one(tmp_path, stop_at):
    """Bit for bit, wherever it stopped: on a checkpoint or between two."""
    want, history = toy_run(tmp_path / "whole.pt")
    with pytest.raises(InterruptedError_):
        toy_run(tmp_path / "cut.pt", stop_at=stop_at)
    assert not list(tmp_path.glob("*.partial"))
    got, resumed = toy_run(tmp_path / "cut.pt")
    assert [{k: v for k, v in step.items() if k != "seconds"} for step in resumed] == [
        {k: v for k, v in step.items() if k != "seconds"} for step in history
    ]
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert history[-1]["a"] < history[0]["a"]


def test_modules_trained_side_by_side_do_not_touch_one_another(tmp_path):
    """Clipping is per module: one module's huge loss changes nothing of the other."""
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    finals = []
    for factor in (1.0, 1e6):
        twins = {"small": nn.Linear(3, 3), "large": nn.Linear(3, 3)}
        for module in twins.values():
            module.load_state_dict(first.state_dict())

        def losses(step: int, twins=twins, factor=factor) -> dict[str, Tensor]:
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            return {"small": twins["small"](x).square().mean(), "large": factor * twins["large"](x).square().mean()}

        train("toy", twins, losses, Schedule(4, 0.01, warmup=1), tmp_path / f"{factor}.pt", console=QUIET)
        finals.append(twins["small"].weight.detach().clone())
    assert torch.equal(*finals)


def test_a_checkpoint_of_another_plan_is_refused_unless_starting_afresh(tmp_path):
    toy_run(tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"^checkpoint: got 'toy' of 9 steps, expected 'toy' of 12"):
        toy_run(tmp_path / "c.pt", steps=12)
    assert len(toy_run(tmp_path / "c.pt", steps=12, resume=False)[1]) == 12


def test_training_the_target_learns(streams, tmp_path):
    schedule = Schedule(steps=30, peak_lr=5e-3, warmup=3)
    _, history = train_target(
        streams, tmp_path / "t.pt", config=PLAN.target, schedule=schedule, batch_rows=4, row_length=48, console=QUIET
    )
    assert history[-1]["target"] < history[0]["target"] - 1.0


def test_continuations_follow_the_target_law(target):
    """1,500 draws after one prefix: the counts of the first two drawn tokens fit the dense model's law."""
    target.lm_head.weight.mul_(4)  # a few likely tokens, so that two steps are enough to tell laws apart
    prefix = torch.tensor([[BOS_ID, 10, 20]])
    drawn = sample_continuations(target, prefix.expand(1500, -1), 2, torch.Generator().manual_seed(1))
    assert torch.equal(drawn[:, :3], prefix.expand(1500, -1))
    first = target(prefix).logits[0, -1].double().softmax(-1)
    unique, inverse = drawn[:, 3].unique(return_inverse=True)
    second = (
        target(torch.cat((prefix.expand(len(unique), -1), unique[:, None]), dim=1)).logits[:, -1].double().softmax(-1)
    )
    mixed = second[inverse].mean(dim=0)  # the law of token 2 given the tokens 1 that were really drawn
    for law, column in ((first, 3), (mixed, 4)):
        counts = torch.bincount(drawn[:, column], minlength=272).double()
        likely = law > 0.005
        deviation = (counts - 1500 * law)[likely] / (1500 * law * (1 - law))[likely].sqrt()
        assert deviation.abs().max() < 4.5
        assert law.max() > 0.05


def test_some_rows_are_continued_greedily(target):
    prefix = torch.tensor([[BOS_ID, 10, 20]]).expand(40, -1)
    greedy = torch.arange(40) % 4 == 1
    drawn = sample_continuations(target, prefix, 3, torch.Generator().manual_seed(1), greedy=greedy)
    likeliest = prefix[:1]
    for _ in range(3):
        likeliest = torch.cat((likeliest, target(likeliest).logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
    assert torch.equal(drawn[greedy], likeliest.expand(10, -1))
    assert len(drawn[~greedy].unique(dim=0)) > 1


@pytest.mark.parametrize(
    ("capability", "dtype"), [("AVX512", torch.bfloat16), ("AVX2", torch.float32), ("DEFAULT", torch.float32)]
)
def test_products_are_in_bfloat16_only_where_that_is_fast(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert product_dtype() == dtype
    with autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_anchors_are_distinct_and_leave_room_for_a_block():
    anchors = draw_anchors(np.random.default_rng(0), 50, 20, 5, 14)
    assert anchors.shape == (50, 14)
    assert anchors.min() == 1
    assert anchors.max() == 20 - 1 - 5
    assert all(len(set(row)) == 14 for row in anchors.tolist())
    with pytest.raises(ValueError, match=r"^count: got 15 anchors, expected at most 14"):
        draw_anchors(np.random.default_rng(0), 1, 20, 5, 15)


def test_teacher_scores_each_slot_and_stops_at_the_end_of_a_text(target, generator):
    tokens = torch.randint(0, 256, (2, 24), generator=generator)
    tokens[0, 9] = EOS_ID
    anchors = torch.tensor([[5, 8], [1, 20]])
    batch = teach(target, tokens, anchors, 3)
    dense = target(tokens).logits
    for b, a in np.ndindex(2, 2):
        for k in range(3):
            place = int(anchors[b, a]) + k
            torch.testing.assert_close(batch.target_logits[b, a, k], dense[b, place], rtol=0.1, atol=0.15)
            assert batch.slots(0)[b, a, k] == tokens[b, place]
            assert batch.slots(1)[b, a, k] == tokens[b, place + 1]
    assert batch.supervised.tolist() == [[[True] * 3, [True, False, False]], [[True] * 3] * 2]


def test_training_pass_equals_decoding(target, generator):
    """Losses of the vectorised pass equal those of blocks drafted one by one from a decoding context, Markov bias included."""
    drafter = DSparkDrafter(target, PLAN.drafter, generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(0, 256, (2, 24), generator=generator)
    anchors = torch.tensor([[5, 13], [1, 20]])
    batch = teach(target, tokens, anchors, 3)
    logits, confidence = [], []
    for b, a in np.ndindex(2, 2):
        place = int(anchors[b, a])
        context = drafter.new_context(1)
        drafter.extend(context, batch.texts.features[b, :place], torch.zeros(place, dtype=torch.int64))
        base, hidden = drafter.backbone_pass(tokens[b, place : place + 1], context)
        previous = tokens[b, place : place + 3][None]
        logits.append(base + drafter.markov_head(previous))
        confidence.append(drafter.confidence(hidden, previous[:, 0], tokens[b, place + 1 : place + 4][None]))
    want = draft_losses(
        torch.cat(logits), batch.target_logits.flatten(0, 1), batch.slots(1).flatten(0, 1), torch.cat(confidence)
    )
    got = block_losses(drafter, batch)
    for name in ("cross_entropy", "distance", "confidence", "acceptance"):
        assert getattr(got, name).item() == pytest.approx(getattr(want, name).item(), rel=0.02)  # bfloat16 products


def test_twins_start_alike_and_train_on_the_same_batches(streams, target, tmp_path):
    """At step 0 a drafter whose W2 is zero proposes what its twin does; training leaves the target alone and separates them."""
    before = {name: value.clone() for name, value in target.state_dict().items()}
    drawn = torch.randint(0, 256, (6, 49), generator=torch.Generator().manual_seed(0))
    configs = {"drafter": PLAN.drafter, "parallel_only": dataclasses.replace(PLAN.drafter, markov_rank=0)}
    drafters, history = train_drafters(
        target,
        streams,
        drawn,
        tmp_path / "d.pt",
        configs=configs,
        schedule=Schedule(steps=25, peak_lr=0.01, warmup=2),
        batch_rows=4,
        anchors_per_row=8,
        console=QUIET,
    )
    assert history[0]["drafter accept"] == history[0]["parallel_only accept"]
    assert history[-1]["drafter accept"] != history[-1]["parallel_only accept"]
    for name in configs:
        assert history[-1][name] < history[0][name]
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    assert not torch.equal(drafters["drafter"].backbone.feature_std, torch.ones(PLAN.target.feature_size))

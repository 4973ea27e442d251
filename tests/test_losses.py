"""Training losses (paper 3.3, eq. 8 and 12) against plain float64 loops and hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsspark.reference.losses import acceptance_label, draft_losses, l1_distance, position_weights, weighted_mean


def logits_of(law: list[float]) -> Tensor:
    return torch.tensor(law, dtype=torch.float64).log()


@pytest.fixture
def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Six blocks of five slots over eleven tokens, float64."""

    def draw(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "draft_logits": draw(6, 5, 11),
        "target_logits": draw(6, 5, 11),
        "labels": torch.randint(0, 11, (6, 5), generator=generator),
        "confidence_logits": draw(6, 5),
        "supervised": torch.rand(6, 5, generator=generator) < 0.7,
    }


def looped(batch: dict[str, Tensor], decay: float) -> tuple[float, float, float, float]:
    """Return cross-entropy, distance, confidence and acceptance with Python numbers only."""
    sums, total = [0.0] * 4, 0.0
    for r in range(6):
        for k in range(5):
            if not batch["supervised"][r, k]:
                continue
            q, p = ([math.exp(x) for x in batch[name][r, k].tolist()] for name in ("draft_logits", "target_logits"))
            q, p = [x / sum(q) for x in q], [x / sum(p) for x in p]
            distance = sum(abs(a - b) for a, b in zip(q, p, strict=True))
            label = sum(min(a, b) for a, b in zip(q, p, strict=True))
            c = 1 / (1 + math.exp(-float(batch["confidence_logits"][r, k])))
            values = (
                -math.log(q[int(batch["labels"][r, k])]),
                distance,
                -label * math.log(c) - (1 - label) * math.log(1 - c),
                label,
            )
            weight = math.exp(-k / decay)
            total += weight
            sums = [old + weight * value for old, value in zip(sums, values, strict=True)]
    return tuple(value / total for value in sums)


@pytest.mark.parametrize("decay", [4.0, 2.5])
def test_losses_equal_a_plain_loop(batch, decay):
    losses = draft_losses(**batch, decay=decay)
    got = (losses.cross_entropy, losses.distance, losses.confidence, losses.acceptance)
    for value, want in zip(got, looped(batch, decay), strict=True):
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(want, rel=1e-12)
    want = 0.1 * losses.cross_entropy + 0.9 * losses.distance + losses.confidence
    assert losses.total.item() == pytest.approx(want.item(), rel=1e-12)


def test_each_term_has_its_own_weight(batch):
    only = [
        draft_losses(**batch, **dict(zip(("ce_weight", "l1_weight", "confidence_weight"), w, strict=True)))
        for w in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    parts = (only[0].cross_entropy, only[1].distance, only[2].confidence)
    for losses, part in zip(only, parts, strict=True):
        assert torch.equal(losses.total, part)


def test_distance_has_no_half_and_the_label_has_one():
    """q = (1/2, 1/2), p = (1/4, 3/4): |q - p|_1 = 1/2, and a draft is accepted with probability 3/4."""
    distance = l1_distance(logits_of([0.5, 0.5]), logits_of([0.25, 0.75]))
    assert distance.item() == pytest.approx(0.5)
    assert acceptance_label(distance).item() == pytest.approx(0.75)
    assert l1_distance(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0])).item() == pytest.approx(2.0)


def test_position_weights_start_at_one_and_fall_by_a_quarter_nat():
    assert position_weights(7).tolist() == pytest.approx([math.exp(-k / 4) for k in range(7)])
    assert position_weights(3, math.inf).tolist() == [1.0, 1.0, 1.0]


def test_no_gradient_reaches_the_target_or_goes_through_the_label(batch):
    """The confidence term moves neither q nor p; the distance moves q only."""
    draft, target = (batch[name].requires_grad_() for name in ("draft_logits", "target_logits"))
    confidence = batch["confidence_logits"].requires_grad_()
    losses = draft_losses(**batch)
    assert torch.autograd.grad(losses.confidence, draft, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(losses.total, target, allow_unused=True, retain_graph=True) == (None,)
    gradient = torch.autograd.grad(losses.total, (draft, confidence))
    assert all(bool((part != 0).any()) for part in gradient)
    assert not losses.acceptance.requires_grad


def test_gradients_are_right(batch):
    """By finite differences, in float64; the kinks of |q - p| are not met at random points."""
    batch = {name: value[:2] for name, value in batch.items()}
    draft, confidence = batch.pop("draft_logits"), batch.pop("confidence_logits")

    def total(draft: Tensor, confidence: Tensor) -> Tensor:
        # The label is detached in the loss, so a finite difference must see it held too: that term is left to its own test.
        return draft_losses(draft, **batch, confidence_weight=0.0).total + 0 * confidence.sum()

    assert torch.autograd.gradcheck(total, (draft.requires_grad_(), confidence.requires_grad_()))


def test_unsupervised_slots_count_for_nothing_even_if_they_hold_nan(batch):
    want = draft_losses(**batch)
    poisoned = dict(batch)
    for name in ("draft_logits", "target_logits", "confidence_logits"):
        poisoned[name] = batch[name].clone()
        poisoned[name][~batch["supervised"]] = float("nan")
    got = draft_losses(**poisoned)
    assert got.total.item() == pytest.approx(want.total.item(), rel=1e-12)
    assert draft_losses(**(batch | {"supervised": torch.zeros(6, 5, dtype=torch.bool)})).total.item() == 0.0


def test_labels_stay_probabilities_under_rounding():
    """float32 sums of |q - p| can pass 2 by an ulp; the label of binary cross-entropy must not be negative."""
    assert acceptance_label(torch.tensor([2.0000002, -1e-8, 1.0])).tolist() == [0.0, 1.0, 0.5]


def test_half_precision_logits_are_read_in_float32(batch):
    half = batch | {
        "draft_logits": batch["draft_logits"].bfloat16(),
        "target_logits": batch["target_logits"].bfloat16(),
    }
    wide = batch | {name: half[name].double() for name in ("draft_logits", "target_logits")}
    got = draft_losses(**half)
    assert got.total.dtype == torch.float32
    assert got.total.item() == pytest.approx(draft_losses(**wide).total.item(), rel=1e-5)


def test_without_a_confidence_head_its_term_is_zero(batch):
    batch.pop("confidence_logits")
    losses = draft_losses(**batch)
    assert losses.confidence.item() == 0.0
    assert losses.total.item() == pytest.approx(0.1 * losses.cross_entropy.item() + 0.9 * losses.distance.item())


def test_weighted_mean_divides_by_the_weights():
    assert weighted_mean(torch.tensor([1.0, 4.0, 9.0]), torch.tensor([1.0, 0.5, 0.0])).item() == pytest.approx(2.0)


def test_errors_name_the_argument(batch):
    for name, value, error in (
        ("draft_logits", batch["draft_logits"][0], ValueError),
        ("target_logits", batch["target_logits"][:, :, :9], ValueError),
        ("labels", batch["labels"][:, :4], ValueError),
        ("labels", batch["labels"].double(), TypeError),
        ("confidence_logits", batch["confidence_logits"][:3], ValueError),
        ("confidence_logits", batch["labels"], TypeError),
        ("supervised", batch["supervised"][:3], ValueError),
        ("supervised", batch["labels"], TypeError),
        ("draft_logits", batch["draft_logits"].long(), TypeError),
        ("l1_weight", -0.1, ValueError),
        ("decay", 0.0, ValueError),
        ("decay", float("nan"), ValueError),
    ):
        with pytest.raises(error, match=rf"^{name}: got"):
            draft_losses(**(batch | {name: value}))
    with pytest.raises(ValueError, match=r"^block_size: gamma|^block_size: got 33"):
        position_weights(33)

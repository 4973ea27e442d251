"""Laws of the training losses and their gradients, over laws with ties, zeros and one-hots, on both bodies."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsspark.reference import losses as reference

BODIES = [reference]
if importlib.util.find_spec("triton") is not None:
    from dsspark.kernels import losses as kernels

    BODIES.append(kernels)
both = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.split(".")[1])


@st.composite
def slots(draw) -> tuple[Tensor, Tensor, Tensor]:
    """Draw logits of q and p on a lattice, so that ties are common, with tokens that have no mass, and labels that have."""
    count, vocab_size = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    entry = st.sampled_from([-torch.inf, -2.0, -0.5, 0.0, 0.0, 0.0, 1.0, 3.0])
    rows = st.lists(st.lists(entry, min_size=vocab_size, max_size=vocab_size), min_size=count, max_size=count)
    draft, target = (torch.tensor(draw(rows)) for _ in range(2))
    labels = torch.tensor([draw(st.integers(0, vocab_size - 1)) for _ in range(count)])
    places = torch.arange(count), labels
    draft[places], target[places] = 0.5, torch.where(target[places].isinf(), 0.5, target[places])
    return draft, target, labels


def gradients(body, draft: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = draft.clone().requires_grad_()
    losses = body.slot_losses(leaf, target, labels)
    return tuple(torch.autograd.grad(part.sum(), leaf, retain_graph=True)[0] for part in losses)


@both
@settings(max_examples=25)
@given(slots())
def test_the_gradient_moves_mass_and_makes_none(body, drawn):
    """Logits shifted together are the same law: every slot's gradient sums to zero, and a token without mass has none."""
    draft, _, _ = drawn
    for gradient in gradients(body, *drawn):
        assert gradient.sum(dim=1).abs().max() < 2e-6
        assert not gradient[draft.isinf()].any()


@both
@settings(max_examples=25)
@given(slots())
def test_equal_laws_have_no_distance_and_no_gradient(body, drawn):
    draft, _, labels = drawn
    assert not body.slot_losses(draft, draft, labels).distance.any()
    assert not gradients(body, draft, draft.clone(), labels)[1].any()


@both
@settings(max_examples=25)
@given(slots())
def test_the_distance_is_twice_what_would_be_rejected(body, drawn):
    draft, target, labels = drawn
    accepted = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
    distance = body.slot_losses(draft, target, labels).distance
    assert torch.allclose(1 - distance / 2, accepted, atol=2e-6)


@both
@settings(max_examples=25)
@given(slots())
def test_a_small_step_against_the_gradient_lowers_the_loss(body, drawn):
    """Both losses fall, or stay where the gradient is zero: a sign that is wrong anywhere would raise one."""
    draft, target, labels = drawn
    before = body.slot_losses(draft, target, labels)
    for part, gradient in enumerate(gradients(body, *drawn)):
        after = body.slot_losses(draft - 1e-3 * gradient, target, labels)[part]
        assert (after <= before[part] + 1e-6).all()
        steep = gradient.pow(2).sum(dim=1) > 1e-2
        assert (after < before[part])[steep].all()

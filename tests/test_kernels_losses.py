"""The loss kernels and their gradients against the reference and float64, in the interpreter; the same tests run compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from recording import describes, record

from benchmarks.traffic import count_traffic
from dsspark.kernels import losses as kernels
from dsspark.kernels.compile import compile_variants, one_per_kernel
from dsspark.reference import losses as reference

SMALL = kernels.Config(block_s=2, block_v=8)
CONFIGS = pytest.mark.parametrize("config", [None, SMALL], ids=["chosen", "small"])
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""Of a gradient, relative to the largest of its slot: float32 sums, then one rounding to the logits' dtype."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


@pytest.fixture
def slots(generator, device):
    """Return a maker of (draft_logits, target_logits, labels, upstream gradients)."""

    def make(num_slots=5, vocab_size=37, dtype=torch.float32, target_dtype=None):
        draft, target = (3 * torch.randn(num_slots, vocab_size, generator=generator) for _ in range(2))
        labels = torch.randint(vocab_size, (num_slots,), generator=generator)
        upstream = torch.randn(2, num_slots, generator=generator)
        moved = draft.to(device, dtype), target.to(device, target_dtype or dtype), labels.to(device)
        return *moved, upstream.to(device)

    return make


def with_gradient(module, draft, target, labels, upstream, **config):
    """Return cross-entropy, distance and the gradient of their weighted sum."""
    draft = draft.detach().requires_grad_()
    losses = module.slot_losses(draft, target, labels, **config)
    total = (losses.cross_entropy * upstream[0] + losses.distance * upstream[1]).sum()
    return losses.cross_entropy.detach(), losses.distance.detach(), torch.autograd.grad(total, draft)[0]


def exact(draft, target, labels, upstream):
    """Return the same in float64, by autograd of two softmaxes."""
    draft = draft.detach().double().requires_grad_()
    q, p = draft.softmax(-1), target.double().softmax(-1)
    cross_entropy = -draft.log_softmax(-1).gather(1, labels[:, None].long())[:, 0]
    distance = (q - p).abs().sum(-1)
    total = (cross_entropy * upstream[0].double() + distance * upstream[1].double()).sum()
    return cross_entropy.detach(), distance.detach(), torch.autograd.grad(total, draft)[0]


@pytest.mark.parametrize("sizes", [(5, 37), (1, 1), (3, 8), (64, 3), (2, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [kernels, reference], ids=["kernels", "reference"])
def test_losses_and_gradients_are_those_of_two_softmaxes(module, sizes, dtype, slots):
    arguments = slots(*sizes, dtype=dtype)
    wanted = exact(*arguments)
    chosen = (None, SMALL) if sizes[1] < 1000 else (None,)
    for config in chosen if module is kernels else (None,):
        got = with_gradient(module, *arguments, **({"config": config} if module is kernels else {}))
        for value, want in zip(got[:2], wanted[:2], strict=True):
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), want, rtol=3e-6, atol=3e-6)
        assert got[2].dtype == dtype
        largest = wanted[2].abs().amax(dim=1, keepdim=True) + arguments[3].abs().amax() * 1e-1
        assert ((got[2].double() - wanted[2]).abs() <= ROUNDING[dtype] * largest).all()


def test_dtypes_may_differ(slots):
    arguments = slots(dtype=torch.float32, target_dtype=torch.bfloat16)
    for value, want in zip(with_gradient(kernels, *arguments), exact(*arguments), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)


@CONFIGS
def test_a_tie_has_gradient_zero(config, slots, device):
    """Where the laws are equal nothing moves; where they agree on some tokens only, those have s_v = 0, in both bodies."""
    draft, _, labels, upstream = slots()
    upstream[0] = 0
    for module, extra in ((kernels, {"config": config}), (reference, {})):
        _, distance, gradient = with_gradient(module, draft, draft.clone(), labels, upstream, **extra)
        assert distance.tolist() == [0.0] * 5
        assert not gradient.any()
    # q = p = 1/4 on the first two tokens; 1/8 against 3/8 and back on the others. sum_u s_u q_u = -1/8 + 3/8 = 1/4.
    q, p = (torch.tensor([[2.0, 2, a, b]]).log().to(device) for a, b in ((1, 3), (3, 1)))
    one = torch.tensor([[0.0], [1.0]], device=device)
    for module, extra in ((kernels, {"config": config}), (reference, {})):
        _, distance, gradient = with_gradient(module, q, p, torch.tensor([0], device=device), one, **extra)
        assert distance.item() == pytest.approx(0.5)
        want = [1 / 4 * (0 - 1 / 4), 1 / 4 * (0 - 1 / 4), 1 / 8 * (-1 - 1 / 4), 3 / 8 * (1 - 1 / 4)]
        assert gradient[0].tolist() == pytest.approx(want, rel=1e-5)


@CONFIGS
def test_tokens_without_mass_and_slots_that_do_not_count(config, slots):
    """-inf logits have probability and gradient 0; a slot whose upstream gradients are 0 passes no NaN on."""
    draft, target, labels, upstream = slots()
    draft[0, :5], target[1, 3:30] = -torch.inf, -torch.inf
    labels[0] = 7
    wanted = exact(draft, target, labels, upstream)
    draft[2], upstream[:, 2] = torch.nan, 0
    kept = [0, 1, 3, 4]
    for module, extra in ((kernels, {"config": config}), (reference, {})):
        cross_entropy, distance, gradient = with_gradient(module, draft, target, labels, upstream, **extra)
        assert bool(cross_entropy[2].isnan())
        assert bool(distance[2].isnan())
        assert not gradient[2].any()
        assert not gradient[0, :5].any()
        for value, want in zip((cross_entropy, distance, gradient), wanted, strict=True):
            torch.testing.assert_close(value[kept].double(), want[kept], rtol=1e-5, atol=1e-5)


def test_any_strides(slots):
    draft, target, labels, upstream = slots(4, 20)
    wanted = with_gradient(kernels, draft, target, labels, upstream)
    padded = torch.full((4, 31), torch.inf, device=draft.device)
    padded[:, :20] = draft
    spread = torch.stack((labels, labels + 99), dim=1)
    got = with_gradient(kernels, padded[:, :20], target.T.contiguous().T, spread[:, 0], upstream)
    for value, want in zip(got, wanted, strict=True):
        assert torch.equal(value, want)


def test_a_label_that_only_the_device_can_see_is_wrong(slots):
    draft, target, labels, _ = slots()
    labels[1], labels[3] = 37, -1
    losses = kernels.slot_losses(draft, target, labels)
    assert losses.cross_entropy.isnan().tolist() == [False, True, False, True, False]
    assert not losses.distance.isnan().any()


def test_no_slots_at_all(slots):
    for module in (kernels, reference):
        _, _, gradient = with_gradient(module, *slots(0))
        assert gradient.shape == (0, 37)


def test_the_whole_loss_is_the_references(generator, device):
    """Terms, means and every gradient, the confidence head's included."""
    shape = (6, 5)
    draft, target = (torch.randn(*shape, 11, generator=generator).to(device) for _ in range(2))
    rest = {
        "labels": torch.randint(11, shape, generator=generator).to(device),
        "supervised": (torch.rand(shape, generator=generator) < 0.7).to(device),
        "decay": 3.0,
        "ce_weight": 0.3,
    }
    confidence = torch.randn(shape, generator=generator).to(device)
    results = []
    for module in (kernels, reference):
        leaves = [draft.clone().requires_grad_(), confidence.clone().requires_grad_()]
        losses = module.draft_losses(leaves[0], target, confidence_logits=leaves[1], **rest)
        values = [getattr(losses, name).detach() for name in ("cross_entropy", "distance", "confidence", "acceptance")]
        results.append([*values, losses.total.detach(), *torch.autograd.grad(losses.total, leaves)])
    for value, want in zip(*results, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6)


def test_errors_are_the_references(slots):
    draft, target, labels, _ = slots()
    for arguments in (
        (draft[0], target, labels),
        (draft, target[:, :9], labels),
        (draft, target, labels[:2]),
        (draft, target, labels.double()),
        (draft.long(), target, labels),
    ):
        with pytest.raises((ValueError, TypeError)) as expected:
            reference.slot_losses(*arguments)
        with pytest.raises(expected.type) as found:
            kernels.slot_losses(*arguments)
        assert str(found.value) == str(expected.value)
    with pytest.raises(TypeError, match="draft_logits: got dtype float64"):
        kernels.slot_losses(draft.double(), target, labels)


def test_rows_moved(slots):
    """Forward reads both rows twice; backward reads them once and writes one. Autograd of two softmaxes would keep four."""
    draft, target, labels, upstream = slots(16, 512)
    draft.requires_grad_()
    with count_traffic(draft=draft, target=target) as traffic:
        losses = kernels.slot_losses(draft, target, labels)
        (losses.cross_entropy * upstream[0] + losses.distance * upstream[1]).sum().backward()
    row = 16 * 512 * 4
    assert traffic.read["draft"] == traffic.read["target"] == 3 * row
    assert row <= traffic.written.total() <= row + 16 * 4 * 7
    assert traffic.launches == 2


@pytest.mark.parametrize("module", [kernels, reference], ids=["kernels", "reference"])
def test_no_law_is_kept_for_the_backward_pass(module, slots):
    draft, target, labels, _ = slots(4, 512)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        module.slot_losses(draft.requires_grad_(), target, labels)
    own = {draft.data_ptr(), target.data_ptr(), labels.data_ptr()}
    assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in own) <= 5 * 4


def test_the_reference_takes_slots_a_few_at_a_time(slots, monkeypatch):
    arguments = slots(7, 37)
    whole = with_gradient(reference, *arguments)
    monkeypatch.setattr(reference, "_ENTRIES_AT_ONCE", 2 * 37)
    for value, want in zip(with_gradient(reference, *arguments), whole, strict=True):
        assert torch.equal(value, want)


def test_launches_that_a_listed_variant_describes(monkeypatch, slots):
    launches = record(monkeypatch, kernels)
    variants = kernels.variants()
    real = kernels.choose_config(151_936)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with_gradient(kernels, *slots(2, 2064, dtype=dtype), config=real)
    with_gradient(kernels, *slots(2, 2064, dtype=torch.bfloat16, target_dtype=torch.float32), config=real)
    assert len(launches) == 2 * 4
    for launch in launches:
        launch.arguments.pop("INTERPRETED", None)
        assert any(describes(variant, launch) for variant in variants), launch


def test_every_kernel_compiles_for_sm_90():
    for report in compile_variants(one_per_kernel(kernels.variants()), "sm_90", jobs=1):
        assert report.problems == (), report

"""The drafting kernels against the reference, in the interpreter; the same tests run compiled on a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton exists on Linux only")

from breakpoints import MARGIN, away_from_breakpoints, distance_to_breakpoints

from dsspark import MarkovHead, Uniforms
from dsspark.kernels import markov as kernels
from dsspark.numerics import row_weights
from dsspark.reference import markov as reference
from dsspark.reference.sampling import sample_two_level

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SMALL = kernels.Config(block_v=16, block_r=16, pick_rows=4, latent_rows=16, block_j=16, block_k=32)
HIDDEN = 20
KINDS = pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
KEPT = pytest.mark.parametrize("keep_logits", [True, False], ids=["kept", "recomputed"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


@dataclasses.dataclass
class Case:
    """The arguments of `draft_block`."""

    base_logits: torch.Tensor
    anchors: torch.Tensor
    head: MarkovHead | None
    uniforms: Uniforms
    options: dict

    def run(self, draft_block, **changed):
        """Call a body of `draft_block`."""
        options = {**self.options, **{name: changed.pop(name) for name in tuple(changed) if name not in vars(self)}}
        given = {**vars(self), **changed}
        return draft_block(given["base_logits"], given["anchors"], given["head"], given["uniforms"], **options)


@pytest.fixture
def case(generator, device):
    """Return a maker of cases whose weights are eighths: the biases are exact in float32, in whatever order they are summed."""

    def make(kind, num_requests=5, gamma=3, vocab_size=37, base=F32, weights=F32, rank=6, cell=8, ids=None, **options):
        def eighths(*shape):
            return torch.randint(-8, 9, shape, generator=generator).to(device, weights) / 8

        draw = torch.randn(num_requests, gamma, vocab_size + HIDDEN, generator=generator).to(device)
        head = None if kind is None else MarkovHead(ids or vocab_size, rank, kind, HIDDEN, vocab_size)
        if head is not None:
            head.to(device)
            for parameter in head.parameters():
                parameter.data = eighths(*parameter.shape)
        temperature = torch.tensor([1.0, 0.0, 0.7, 2.0, 0.25]).repeat(num_requests // 5 + 1)[:num_requests].to(device)
        anchors = torch.randint(vocab_size, (num_requests,), generator=generator).to(device)
        uniforms = Uniforms.draw(num_requests, gamma, generator=generator)
        uniforms = Uniforms(
            **{field.name: getattr(uniforms, field.name).to(device) for field in dataclasses.fields(uniforms)}
        )
        hidden = draw[..., vocab_size:].to(base)
        options = {"temperature": temperature, "hidden": hidden, "cell": cell, "keep_logits": True, **options}
        return Case((2 * draw[..., :vocab_size]).to(base), anchors, head, uniforms, options)

    return make


@torch.no_grad()
def laws(case):
    """Yield, for each position, the float64 weights of the reference, given the tokens sent back: target ids."""
    head, options = case.head, case.options
    state = None if head is None else head.initial_state(len(case.anchors), case.anchors.device)
    previous = case.anchors.long()
    for k in range(case.base_logits.shape[1]):
        latent = None
        if head is not None:
            latent, state = reference.latent_step(head, previous, options["hidden"][:, k], state)
        w2 = None if head is None else head.markov_w2.weight
        logits = reference.corrected_logits(case.base_logits[:, k], latent, w2)
        if options["keep_logits"]:
            logits = logits.to(case.base_logits.dtype)
        weights, _, row_sum = row_weights(logits.double(), options["temperature"])
        previous = torch.where(row_sum.isnan(), 0, (yield weights))


def away(case):
    """Return the case with every draft uniform moved away from the breakpoints of the law that it meets."""
    ids, cell = case.options.get("draft_to_target"), case.options["cell"]
    walk, moved, tokens = laws(case), [], None
    for k in range(case.base_logits.shape[1]):
        weights = walk.send(tokens)
        moved.append(away_from_breakpoints(weights, case.uniforms.draft[:, k], cell))
        drawn = sample_two_level(weights, moved[-1], cell=cell)
        tokens = drawn if ids is None else ids[drawn]
    uniforms = dataclasses.replace(case.uniforms, draft=torch.stack(moved, dim=1))
    return dataclasses.replace(case, uniforms=uniforms)


def assert_equal_blocks(found, expected, latents=1e-6):
    """Assert equal tokens and kept fields, and laws equal within the rounding of float32 sums."""
    assert torch.equal(found.tokens, expected.tokens)
    assert found.tokens.dtype == torch.int64
    torch.testing.assert_close(found.temperature, expected.temperature, rtol=0, atol=0, equal_nan=True)
    valid = ~expected.row_sum.isnan()
    for name in ("token_probs", "row_sum"):
        got, want = getattr(found, name), getattr(expected, name)
        assert got.dtype == want.dtype == F32
        assert torch.equal(got.isnan(), ~valid)
        torch.testing.assert_close(got[valid], want[valid], rtol=2e-5, atol=0)
    torch.testing.assert_close(found.row_max[valid], expected.row_max[valid], rtol=0, atol=4 * latents)
    for name in ("logits", "latent"):
        got, want = getattr(found, name), getattr(expected, name)
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=0, atol=latents * (4 if name == "logits" else 1), equal_nan=True)
    assert found.markov_w2 is expected.markov_w2
    assert found.base_logits is expected.base_logits
    assert found.draft_to_target is expected.draft_to_target


@KINDS
@KEPT
@pytest.mark.parametrize(("base", "weights"), [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)])
def test_blocks_are_those_of_the_reference(kind, keep_logits, base, weights, case):
    one = away(case(kind, num_requests=17, gamma=2, base=base, weights=weights, keep_logits=keep_logits))
    found, expected = one.run(kernels.draft_block, config=SMALL), one.run(reference.draft_block)
    assert_equal_blocks(found, expected, latents=0.0 if kind in (None, "vanilla") else 1e-6)
    assert found.tokens.unique().numel() > 8


@KEPT
@pytest.mark.parametrize(
    ("kind", "num_requests", "vocab_size", "cell", "config"),
    [
        ("vanilla", 1, 37, 256, None),
        ("vanilla", 3, 37, 5, SMALL),
        ("vanilla", 3, 37, 1, SMALL),
        (None, 3, 37, 1, SMALL),
        (None, 2, 37, 40, dataclasses.replace(SMALL, block_v=64, block_r=1, pick_rows=1)),
        ("vanilla", 2, 700, 100, SMALL),
        ("vanilla", 2, 8193, 256, None),
        (None, 2, 8193, 4096, dataclasses.replace(SMALL, block_v=1024, block_r=2)),
        ("vanilla", 2, 1, 1, SMALL),
    ],
)
def test_any_vocabulary_cell_and_tile(kind, num_requests, vocab_size, cell, config, keep_logits, case):
    one = away(case(kind, num_requests, 2, vocab_size, cell=cell, keep_logits=keep_logits))
    assert_equal_blocks(one.run(kernels.draft_block, config=config), one.run(reference.draft_block), latents=0.0)


def test_a_real_vocabulary(case):
    one = away(case("vanilla", 2, 1, 151_936, BF16, BF16, rank=16, cell=256))
    config = dataclasses.replace(SMALL, block_v=4096, pick_rows=1)
    assert_equal_blocks(one.run(kernels.draft_block, config=config), one.run(reference.draft_block), latents=0.0)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("rank", [1, 16, 17, 120, 1000])
def test_any_rank(kind, rank, case):
    if kind != "vanilla" and rank == 1000:
        pytest.skip("the rank of a product is that of the vanilla head")
    for dtype in (BF16, F32):
        one = away(case(kind, 2, 2, 37, dtype, F32 if kind == "rnn" else dtype, rank=rank, keep_logits=False))
        one.base_logits.mul_(8)
        one = away(one)
        assert_equal_blocks(one.run(kernels.draft_block, config=SMALL), one.run(reference.draft_block), latents=1e-5)


@KINDS
@KEPT
def test_a_drafter_with_its_own_vocabulary_emits_target_ids(kind, keep_logits, case, device):
    ids = torch.arange(37, device=device) * 3 + 1
    one = case(kind, ids=110, keep_logits=keep_logits, draft_to_target=ids)
    one.base_logits[1, 0, 3] = math.nan  # yields token 0, not the target id of draft id 0
    one = away(one)
    found = one.run(kernels.draft_block, config=SMALL)
    assert_equal_blocks(found, one.run(reference.draft_block))
    assert found.tokens[1, 0] == 0
    assert int((found.tokens % 3 == 1).sum()) == found.tokens.numel() - 1


@KINDS
@KEPT
def test_every_stride_gives_the_same_bits_and_padding_is_not_read(kind, keep_logits, case):
    one = case(kind, keep_logits=keep_logits)
    expected = one.run(kernels.draft_block, config=SMALL)

    def padded(tensor, value=math.inf):
        wide = torch.full((*(n + 1 for n in tensor.shape[:-1]), tensor.shape[-1] + 5), value, dtype=tensor.dtype)
        wide = wide.to(tensor.device)[tuple(slice(n) for n in tensor.shape)]
        return wide.copy_(tensor)

    def turned(tensor):
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    for form in (padded, turned, lambda tensor: padded(turned(tensor))):
        with torch.no_grad():
            for parameter in () if one.head is None else one.head.parameters():
                parameter.data = form(parameter)
        assert one.head is None or not one.head.markov_w2.weight.is_contiguous()
        uniforms = dataclasses.replace(one.uniforms, draft=form(one.uniforms.draft))
        ids = torch.stack((one.anchors, one.anchors), dim=1).int()[:, 0]
        options = {"hidden": form(one.options["hidden"]), "temperature": form(one.options["temperature"])}
        changed = {"base_logits": form(one.base_logits), "anchors": ids, "uniforms": uniforms, **options}
        found = one.run(kernels.draft_block, config=SMALL, **changed)
        for name in ("tokens", "token_probs", "row_max", "row_sum", "logits", "latent"):
            got, want = getattr(found, name), getattr(expected, name)
            assert (got is None and want is None) or torch.equal(got, want), name


@KINDS
@KEPT
def test_no_request(kind, keep_logits, case):
    one = case(kind, num_requests=0, keep_logits=keep_logits)
    assert_equal_blocks(one.run(kernels.draft_block), one.run(reference.draft_block))


@pytest.mark.parametrize("kind", [None, "rnn"])
@KEPT
def test_a_row_that_is_no_distribution_harms_no_other(kind, keep_logits, case):
    one = case(kind, num_requests=9, gamma=3, keep_logits=keep_logits)
    one.base_logits[0, 1, 36] = math.nan
    one.base_logits[1, 0, 0] = math.inf
    one.base_logits[2, 2] = -math.inf
    one.base_logits[3, :, 1:] = -math.inf  # a distribution
    one.base_logits[8, 1, 5:30] = -math.inf
    one.options["temperature"] = torch.tensor([1.0, 0.0, 0.5, 1.0, -1.0, math.nan, math.inf, 0.0, 1.0]).to(
        one.anchors.device
    )
    one = away(one)
    found = one.run(kernels.draft_block, config=SMALL)
    assert_equal_blocks(found, one.run(reference.draft_block))
    assert found.token_probs.isnan().sum().item() == 1 + 1 + 1 + 3 * 3
    assert (found.tokens[found.token_probs.isnan()] == 0).all()


@KEPT
def test_greedy_takes_the_lowest_id_on_ties_in_every_chunk_and_cell(keep_logits, case):
    one = case("vanilla", num_requests=4, gamma=1, cell=24, keep_logits=keep_logits, temperature=0.0)
    one.base_logits.clamp_(max=1.0)
    one.head.markov_w1.weight.data.zero_()
    for request, ties in enumerate(([5, 6, 36], [15, 16], [23, 24, 25], [36])):
        one.base_logits[request, 0, ties] = 3.0
    found = one.run(kernels.draft_block, config=SMALL)
    assert found.tokens[:, 0].tolist() == [5, 15, 23, 36]
    assert (found.token_probs == 1).all()
    assert (found.row_sum == 1).all()
    assert (found.row_max == 3).all()
    assert (found.log_norm == 0).all()


@KEPT
def test_boundary_uniforms_draw_no_token_of_zero_weight(keep_logits, case):
    one = case("vanilla", num_requests=4, gamma=1, keep_logits=keep_logits, temperature=1.0)
    one.base_logits[:, :, :9] = one.base_logits[:, :, 30:] = -math.inf
    top = 1 - 2.0**-24
    one.uniforms.draft[:, 0] = torch.tensor([[0, 0], [0, top], [top, 0], [top, top]]).to(one.anchors.device)
    assert one.run(kernels.draft_block, config=SMALL).tokens[:, 0].tolist() == [9, 15, 24, 29]


@pytest.mark.parametrize(("keep_logits", "num_requests"), [(True, 2000), (False, 1000)])
def test_arbitrary_uniforms_differ_within_rounding_of_a_breakpoint_only(keep_logits, num_requests, case):
    one = case("vanilla", num_requests, gamma=1, keep_logits=keep_logits)
    one.options["temperature"].fill_(0.7)
    weights = next(laws(one))
    # A third of the uniforms on a breakpoint, as near as float32 has it: those are the ones that may differ.
    cells = torch.nn.functional.pad(weights, (0, 3)).view(num_requests, 5, 8).sum(2)
    breakpoints = (cells.cumsum(1) / cells.sum(1, keepdim=True))[::3, 2]
    one.uniforms.draft[::3, 0, 0] = breakpoints.float().clamp(max=1 - 2.0**-24)
    config = dataclasses.replace(SMALL, block_v=64, block_r=32, pick_rows=64 if keep_logits else 32)
    found, expected = one.run(kernels.draft_block, config=config), one.run(reference.draft_block)
    differ = found.tokens[:, 0] != expected.tokens[:, 0]
    distance = distance_to_breakpoints(weights, one.uniforms.draft[:, 0], 8)
    assert (distance[differ] < 2e-6).all()
    near = int((distance < 2e-6).sum())
    assert near >= num_requests // 3
    assert int(differ.sum()) <= near // 2


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_ids_that_only_the_device_sees_are_memory_safe(kind, case, monkeypatch, device):
    monkeypatch.setattr(kernels, "check_draft_arguments", lambda *arguments: None)
    ids = (torch.arange(37) + torch.arange(37).ge(20) * 2**40).to(device)
    one = case(kind, num_requests=4, gamma=2, keep_logits=False, draft_to_target=ids)
    one.base_logits[3, 0, 30] = 99.0  # draws an id that W1 lacks
    expected = one.run(kernels.draft_block, config=SMALL)
    one.anchors[:3] = torch.tensor([-1, 37, 2**50]).to(one.anchors.device)
    found = one.run(kernels.draft_block, config=SMALL)
    assert found.tokens[:3, 0].tolist() == [0, 0, 0]
    assert found.token_probs[:3, 0].isnan().all()
    assert torch.equal(found.tokens[3], expected.tokens[3])
    assert found.tokens[3].tolist() == [30 + 2**40, 0]
    assert found.token_probs[3].isnan().tolist() == [False, True]


@pytest.mark.parametrize("kind", [None, "vanilla", "gated"])
def test_recomputed_rows_are_the_law_of_the_draw(kind, case):
    one = away(case(kind, num_requests=4, keep_logits=False))
    found, kept = (
        one.run(kernels.draft_block, config=SMALL),
        one.run(kernels.draft_block, config=SMALL, keep_logits=True),
    )
    assert torch.equal(found.tokens, kept.tokens)
    logits = reference.corrected_logits(found.base_logits, found.latent, found.markov_w2)
    torch.testing.assert_close(logits, kept.logits, rtol=0, atol=2e-6)
    for k in range(3):
        weights, _, total = row_weights(logits[:, k], found.temperature)
        drawn = weights.gather(1, found.tokens[:, k, None])[:, 0] / total
        torch.testing.assert_close(drawn, found.token_probs[:, k], rtol=1e-5, atol=0)


BAD = {
    "shape": {"base_logits": torch.zeros(5, 37)},
    "no token": {"base_logits": torch.zeros(5, 3, 0)},
    "long": {"base_logits": torch.zeros(5, 33, 37)},
    "integers": {"base_logits": torch.zeros(5, 3, 37, dtype=torch.int64)},
    "anchors": {"anchors": torch.zeros(4, dtype=torch.int64)},
    "real anchors": {"anchors": torch.zeros(5)},
    "far anchors": {"anchors": torch.full((5,), 37)},
    "uniforms": {"uniforms": Uniforms.draw(5, 2)},
    "temperature": {"temperature": -1.0},
    "temperatures": {"temperature": torch.ones(4)},
    "name": {"temperature": "warm"},
    "hidden": {"hidden": None},
    "width": {"hidden": torch.zeros(5, 3, HIDDEN + 1)},
    "map": {"draft_to_target": torch.zeros(37, dtype=torch.int64)},
    "far map": {"draft_to_target": torch.arange(37) + 1},
    "cell": {"cell": 0},
    "head": {"head": MarkovHead(36, 6, "gated", HIDDEN)},
}


@pytest.mark.parametrize("changed", BAD.values(), ids=BAD)
def test_errors_are_those_of_the_reference(changed, case):
    one = case("gated")
    if one.anchors.device.type != "cpu":
        pytest.skip("the values of CPU tensors")
    with pytest.raises((ValueError, TypeError)) as expected:
        one.run(reference.draft_block, **changed)
    with pytest.raises(type(expected.value)) as found:
        one.run(kernels.draft_block, **changed)
    assert str(found.value) == str(expected.value)


def test_float64_is_for_the_reference(case):
    one = case("gated")
    with pytest.raises(TypeError, match=r"base_logits: got dtype float64"):
        one.run(kernels.draft_block, base_logits=one.base_logits.double())
    with pytest.raises(TypeError, match=r"hidden: got dtype float64"):
        one.run(kernels.draft_block, hidden=one.options["hidden"].double())
    with pytest.raises(TypeError, match=r"uniforms.draft: got dtype float64"):
        one.run(kernels.draft_block, uniforms=dataclasses.replace(one.uniforms, draft=one.uniforms.draft.double()))
    one.head.gate_proj.weight = nn.Parameter(one.head.gate_proj.weight.double())
    with pytest.raises(TypeError, match=r"head.gate_proj.weight: got dtype float64"):
        one.run(kernels.draft_block)


def test_uniforms_moved_away_make_the_same_draw_in_float32_and_float64(generator):
    weights = torch.rand(300, 37, generator=generator, dtype=torch.float64) ** 9
    uniforms = torch.rand(300, 2, generator=generator)
    uniforms[:9] = torch.tensor([0.0, 1 - 2.0**-24, 0.5]).repeat(3)[:, None]
    moved = away_from_breakpoints(weights, uniforms, 8)
    assert (distance_to_breakpoints(weights, moved, 8) >= MARGIN).all()
    still = distance_to_breakpoints(weights, uniforms, 8) >= MARGIN + 2.0**-22
    assert still.sum() > 250
    assert torch.equal(moved[still], uniforms[still])
    drawn = sample_two_level(weights, moved, cell=8)
    assert torch.equal(drawn, sample_two_level(weights.float(), moved, cell=8))

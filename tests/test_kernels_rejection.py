"""The verification kernels against their reference: tokens exactly, over every kind of draft, row and request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings

pytest.importorskip("triton", reason="Triton exists on Linux only")

from recording import record
from verification_rounds import (
    DRAFT_TEMPERATURE,
    FILTERS,
    LENGTHS,
    SOURCES,
    TEMPERATURE,
    Round,
    deciding_laws,
    make_round,
    nearness,
    same,
)

import dsspark
from dsspark import DraftBlock, Filters, PackedBatch, Uniforms
from dsspark.kernels import filters as filter_kernels
from dsspark.kernels import rejection as kernels
from dsspark.kernels.acceptance import RESIDUAL
from dsspark.kernels.rejection import Config, verify
from dsspark.kernels.resampling import resample_kernel
from dsspark.reference import rejection as reference
from dsspark.reference.verification import pack
from dsspark.testing.boundary import edge_failures
from dsspark.testing.sampler_audit import sampler_cases

SMALL = Config(block_v=8, block_w=16)
"""Forces several tiles, and several chunks in a cell, on a vocabulary of 37."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled here, not interpreted")
    return request.param


@pytest.fixture(autouse=True)
def many_rows_a_program_of_the_filters(monkeypatch):
    """Search the filters of many rows at once where a program costs milliseconds."""
    if not torch.cuda.is_available():
        wide = filter_kernels.Config(block_r=64, block_v=64, block_s=64)
        monkeypatch.setattr(filter_kernels, "choose_config", lambda vocab_size: wide)


def moved(value, device):
    """Return a dataclass, a tensor or a number on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (DraftBlock, PackedBatch, Uniforms, Filters, Round)):
        return type(value)(**{name: moved(field, device) for name, field in vars(value).items()})
    return {name: moved(field, device) for name, field in value.items()} if isinstance(value, dict) else value


def check(made, device, config=None):
    same(moved(made, device).run(verify, config=config), made.run(reference.verify))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("dtype", "cell", "config"),
    [(torch.float32, 12, None), (torch.bfloat16, 12, SMALL), (torch.float16, 5, None)],
    ids=["fp32", "bf16-small", "fp16"],
)
def test_every_source_of_q(source, dtype, cell, config, generator, device):
    made = make_round(
        source,
        lengths=LENGTHS * 5,
        temperature=TEMPERATURE.repeat(5),
        draft_temperature=DRAFT_TEMPERATURE.repeat(5),
        dtype=dtype,
        cell=cell,
        generator=generator,
    )
    check(made, device, config)
    rejected = made.run(reference.verify).num_accepted < torch.tensor(LENGTHS * 5)
    assert int((rejected & (made.options["temperature"] > 0)).sum()) >= 8  # draws from a residual


@pytest.mark.parametrize("source", ["stored", "point", "mapped", "mapped-recomputed", "smaller", "larger"])
def test_the_mass_of_each_cell_is_that_of_the_residual(source, generator, device, monkeypatch):
    made = make_round(source, temperature=1.0, draft_temperature=0.7, generator=generator, lengths=[4] * 32)
    launches = record(monkeypatch, kernels)
    moved(made, device).run(verify)
    (resample,) = [launch.arguments for launch in launches if launch.kernel is resample_kernel]
    rejected = (resample["ids_ptr"][:, 0] == RESIDUAL.value).cpu()
    assert int(rejected.sum()) >= 8
    laws = deciding_laws(made, made.run(reference.verify).num_accepted)[rejected]
    cells = torch.nn.functional.pad(laws, (0, -37 % 12)).view(len(laws), -1, 12).sum(dim=2)
    assert (resample["first_ptr"].cpu()[rejected] - cells).abs().max() < 1e-6


@pytest.mark.parametrize(("cell", "source"), [(256, "stored"), (4096, "mapped"), (64, "recomputed")])
def test_a_vocabulary_with_a_tail_of_one(cell, source, generator, device):
    made = make_round(
        source,
        lengths=[2, 0, 1, 2],
        block_size=2,
        vocab=8193,
        cell=cell,
        dtype=torch.bfloat16,
        temperature=torch.tensor([1.0, 0.7, 0.0, 2.0]),
        draft_temperature=torch.tensor([1.0, 1.0, 0.5, 1.5]),
        generator=generator,
    )
    check(made, device, Config(block_v=2048, block_w=1024))


@pytest.mark.parametrize("index", range(len(FILTERS)))
@pytest.mark.parametrize("source", ["stored", "point", "mapped"])
def test_filters(index, source, generator, device):
    check(make_round(source, filters=FILTERS[index], generator=generator), device, SMALL)
    check(make_round(source, filters=FILTERS[index], generator=generator, dtype=torch.bfloat16), device)


def test_filters_out_of_range_make_their_request_invalid(generator, device):
    made = make_round(generator=generator)
    filters = Filters(
        top_k=torch.tensor([-1, 2, 2, 2, 2, 2, 2, 2]),
        top_p=torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, torch.nan, 0.0, 0.0, 0.0, 0.0]),
    )
    made = replace(made, options={**made.options, "filters": filters})
    result = moved(made, device).run(verify)
    assert result.valid.tolist() == [False, False, True, False, False, True, True, True]
    assert torch.equal(result.tokens[0].cpu(), torch.full((5,), -1))
    nothing = replace(made, options={**made.options, "filters": Filters()})
    same(moved(nothing, device).run(verify), replace(made, options={**made.options, "filters": None}).run(verify))


def test_arbitrary_uniforms_differ_only_within_rounding_of_a_breakpoint(generator, device):
    lengths = [3, 4, 2, 4] * 75
    made = make_round(
        lengths=lengths, temperature=0.8, draft_temperature=1.0, cell=8, generator=generator, settle=False
    )
    found, expected = moved(made, device).run(verify), made.run(reference.verify)
    differs = (found.tokens.cpu() != expected.tokens).any(dim=1)
    assert int(differs.sum()) <= 1
    assert (nearness(made)[differs] < 1e-5).all()
    assert found.valid.all()


@pytest.mark.parametrize("source", ["stored", "recomputed", "mapped"])
def test_strides_and_padding_of_infinity_do_not_matter(source, generator, device):
    made = moved(make_round(source, generator=generator), device)
    expected = made.run(verify)

    def padded(tensor):
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), torch.inf, dtype=tensor.dtype, device=device)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    def apart(tensor):
        return torch.stack((tensor, torch.full_like(tensor, torch.nan)), dim=-1)[..., 0]

    for form in (padded, apart, lambda tensor: tensor.mT.contiguous().mT):
        names = ("logits", "base_logits", "latent", "markov_w2", "token_probs", "row_max", "row_sum")
        draft = made.draft
        forms = {name: form(getattr(draft, name)) for name in names if getattr(draft, name) is not None}
        forms["tokens"] = draft.tokens.t().contiguous().t()
        if draft.draft_to_target is not None:
            forms["draft_to_target"] = torch.stack((draft.draft_to_target, draft.draft_to_target), dim=1)[:, 1]
        uniforms = made.uniforms
        uniforms = Uniforms(draft=uniforms.draft, accept=apart(uniforms.accept), final=apart(uniforms.final))
        options = {**made.options, "temperature": apart(made.options["temperature"])}
        other = Round(form(made.rows), made.batch, replace(draft, **forms), uniforms, options).run(verify)
        same(other, expected, logprobs=0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("filters", [None, Filters(top_k=9)], ids=["plain", "filtered"])
def test_only_rows_that_decide_an_emitted_token_count(poison, filters, generator, device):
    made = moved(make_round(lengths=[3] * 8, block_size=3, filters=filters, generator=generator), device)
    clean = made.run(verify)
    assert clean.valid.all()
    assert len(set(clean.num_accepted.tolist())) > 1
    for k in range(4):
        rows = made.rows.clone()
        rows[made.batch.cu_seqlens[:-1].long() + k, 7] = poison
        result = replace(made, rows=rows).run(verify)
        spared = clean.num_accepted < k
        assert torch.equal(result.valid, spared)
        assert torch.equal(result.tokens[spared], clean.tokens[spared])
        assert torch.equal(result.logprobs[spared], clean.logprobs[spared])
        for name, empty in (("tokens", -1), ("logprobs", 0), ("num_accepted", 0), ("num_emitted", 0)):
            assert (getattr(result, name)[~spared] == empty).all()


@pytest.mark.parametrize("filters", [None, Filters(top_k=5)], ids=["plain", "filtered"])
def test_rows_of_minus_infinity_and_bad_temperatures_are_invalid(filters, generator, device):
    temperature = torch.tensor([1.0, 1.0, -1.0, torch.nan, 0.0, torch.inf, 0.0, 1e-30])
    for lengths in ([0] * 8, [2] * 8):
        made = make_round(lengths=lengths, block_size=2, generator=generator)
        rows = made.rows.clone()
        for r in (1, 6):
            rows[made.batch.cu_seqlens[r] : made.batch.cu_seqlens[r + 1]] = -torch.inf
        made = replace(made, rows=rows, options={"temperature": temperature, "cell": 12, "filters": filters})
        result = moved(made, device).run(verify)
        assert result.valid.tolist() == [True, False, False, False, True, False, False, True]
        same(result, made.run(reference.verify))


def test_masked_rows_and_equal_rows(generator, device):
    made = make_round("stored", generator=generator)
    rows = made.rows.clone()
    rows[:, 5:30] = -torch.inf
    rows[::3] = torch.where(torch.arange(37) % 5 == 2, 1.0, -torch.inf)  # ties, and p = 0 nearly everywhere
    made = replace(made, rows=rows)
    emitted = moved(made, device).run(verify).tokens.cpu()
    for r, length in enumerate(LENGTHS):
        for k in range(length + 1):
            if emitted[r, k] >= 0:
                assert rows[int(made.batch.cu_seqlens[r]) + k, emitted[r, k]] > -torch.inf


def test_greedy_takes_the_lowest_id_on_ties(generator, device):
    made = moved(make_round(lengths=[2, 0, 1], block_size=2, temperature=0.0, draft_temperature=1.0,
                            generator=generator), device)  # fmt: skip
    rows = torch.zeros_like(made.rows)
    rows[:, [9, 17, 36]] = 2.0
    for tokens, expected in (([9, 9], [9, 9, 9]), ([17, 9], [9, -1, -1]), ([9, 36], [9, 9, -1])):
        point = DraftBlock.point(torch.tensor([tokens] * 3, device=device))
        for config in (None, SMALL):
            result = replace(made, rows=rows, draft=point).run(verify, config=config)
            assert result.tokens[0].tolist() == expected
            assert result.tokens[1].tolist() == [9, -1, -1]
            assert (result.logprobs == 0).all()


def test_placeholders_are_rejected_and_tokens_without_a_law_are_invalid(device):
    tokens = torch.tensor([[1], [-1], [40], [2**40]], device=device)
    rows = torch.full((8, 37), -torch.inf, device=device)
    rows[:, 4] = 0.0
    zeros = torch.zeros(4, dtype=torch.int64)
    batch = moved(pack(zeros, tokens.cpu(), zeros + 1, zeros), device)
    uniforms = moved(Uniforms(draft=torch.zeros(4, 1, 2), accept=torch.zeros(4, 1), final=torch.zeros(4, 2)), device)
    result = verify(rows, batch, DraftBlock.point(tokens), uniforms)
    assert result.tokens.tolist() == [[4, -1]] * 4
    assert result.valid.all()
    broken = DraftBlock.from_logits(tokens.cpu(), torch.zeros(4, 1, 37))
    assert verify(rows, batch, moved(broken, device), uniforms).valid.tolist() == [True, False, False, False]


def test_an_empty_residual_is_drawn_from_p(generator, device):
    made = make_round(lengths=[1] * 32, temperature=1.0, draft_temperature=1.0, generator=generator, settle=False)
    even = torch.where(torch.arange(37) < 5, -torch.inf, 0.0)  # 1 / 32 exactly, in p as in q
    draft = DraftBlock.from_logits(torch.full((32, 4), 7), even.expand(32, 4, 37))
    draft = replace(draft, token_probs=torch.ones(32, 4))  # so that it is rejected all the same
    accept = torch.full((32, 4), 0.5)
    made = replace(made, rows=even.expand(64, 37), draft=draft, uniforms=replace(made.uniforms, accept=accept))
    assert (made.run(reference.verify).num_accepted == 0).all()
    check(made, device)
    check(made, device, SMALL)


def test_a_request_does_not_depend_on_its_neighbours(generator, device):
    made = make_round(generator=generator)
    together = moved(made, device).run(verify)
    for r, length in enumerate(LENGTHS):
        start, end = int(made.batch.cu_seqlens[r]), int(made.batch.cu_seqlens[r + 1])
        zero = torch.zeros(1, dtype=torch.int64)
        draft = replace(
            made.draft, **{n: v[r : r + 1] for n, v in vars(made.draft).items() if isinstance(v, torch.Tensor)}
        )
        batch = pack(zero, draft.tokens, torch.tensor([length]), zero)
        uniforms = Uniforms(**{name: value[r : r + 1] for name, value in vars(made.uniforms).items()})
        options = {**made.options, "temperature": TEMPERATURE[r : r + 1]}
        alone = moved(Round(made.rows[start:end], batch, draft, uniforms, options), device).run(verify)
        assert torch.equal(alone.tokens[0], together.tokens[r])
        assert torch.equal(alone.logprobs[0], together.logprobs[r])


def test_empty_batches_roomy_batches_and_all_lengths_zero(generator, device):
    for source in ("stored", "recomputed"):
        none = make_round(source, lengths=[], temperature=1.0, draft_temperature=1.0, generator=generator, settle=False)
        assert moved(none, device).run(verify).tokens.shape == (0, 5)
        check(make_round(source, lengths=[0] * 8, generator=generator), device)
    made = make_round(generator=generator)
    zeros = torch.zeros(8, dtype=torch.int64)
    roomy = pack(zeros, made.draft.tokens, torch.tensor(LENGTHS), zeros, capacity=len(made.rows) + 4)
    rows = torch.cat((made.rows, torch.full((4, 37), torch.nan)))
    for filters in (None, Filters(top_k=37)):
        options = {**made.options, "filters": filters}
        found = moved(replace(made, rows=rows, batch=roomy, options=options), device).run(verify)
        same(found, made.run(reference.verify))


def test_an_overflow_that_only_the_device_sees(generator, device, monkeypatch):
    made = moved(make_round(lengths=[1] * 8, block_size=1, generator=generator), device)
    longer = made.batch.cu_seqlens.clone()
    longer[-1] = 99
    partly = replace(made.batch, cu_seqlens=longer)
    assert replace(made, batch=partly).run(verify).valid.tolist() == [True] * 7 + [False]
    monkeypatch.setattr(kernels, "check_verify_arguments", lambda *_: None)  # what it would have read
    for filters in (None, Filters(top_p=0.5)):
        wholly = replace(made.batch, num_tokens=made.batch.num_tokens + 1)
        result = replace(made, batch=wholly, options={**made.options, "filters": filters}).run(verify)
        assert not result.valid.any()
        assert (result.tokens == -1).all()
        assert (result.num_emitted == 0).all()
    outside = replace(made.batch, cu_seqlens=made.batch.cu_seqlens - 2)
    assert replace(made, batch=outside).run(verify).valid.tolist() == [False] + [True] * 7


@pytest.mark.parametrize("source", ["stored", "recomputed"])
def test_p_equal_to_q_accepts_everything_at_the_largest_uniform(source, generator, device):
    """The drafts of the kernel, verified on their own logits: the two laws are the same to the last bit."""
    markov = pytest.importorskip("dsspark.kernels.markov")
    head = None
    if source == "recomputed":
        head = dsspark.MarkovHead(37, 6).to(device)
        for weight in head.parameters():
            # numpy, which interprets, sums products of other shapes in another order: eighths are exact in any.
            eighths = torch.randint(-8, 9, weight.shape, generator=generator) / 8
            weight.data = (eighths if device == "cpu" else torch.randn(weight.shape, generator=generator)).to(device)
    base = torch.randn(8, 4, 37, generator=generator).to(device)
    uniforms = moved(Uniforms.draw(8, 4, generator), device)
    anchors = torch.arange(8, device=device)
    draft = markov.draft_block(base, anchors, head, uniforms, keep_logits=True)
    other = markov.draft_block(base, anchors, head, uniforms, keep_logits=source == "stored")
    assert torch.equal(draft.tokens, other.tokens)
    zeros = torch.zeros(8, dtype=torch.int64)
    batch = moved(pack(zeros, draft.tokens.cpu(), zeros + 4, zeros), device)
    rows = torch.randn(40, 37, generator=generator).to(device)
    for k in range(4):
        rows[batch.cu_seqlens[:-1].long() + k] = draft.logits[:, k]
    top = replace(uniforms, accept=torch.full((8, 4), 1 - 2.0**-24, device=device))
    assert (verify(rows, batch, other, top).num_accepted == 4).all()


def test_the_edges_of_the_acceptance_test_and_of_the_draws():
    assert edge_failures(verify, cell=2) == []


@pytest.mark.parametrize("num_requests", [1, 2])
def test_the_emitted_law_is_the_targets_on_integers(num_requests):
    @settings(max_examples=3, database=None, phases=[Phase.generate])
    @given(sampler_cases(num_requests, whole=False))
    def law(case):
        assert case.compare(verify).equal

    law()


BAD = [
    {"rows": torch.zeros(4)},
    {"rows": torch.zeros(27, 37, dtype=torch.int64)},
    {"rows": torch.zeros(27, 0)},
    {"rows": torch.zeros(9, 37)},
    {"draft": DraftBlock.point(torch.zeros(3, 1, dtype=torch.int64))},
    {"uniforms": Uniforms.draw(2, 2)},
    {"options": {"temperature": -1.0}},
    {"options": {"temperature": torch.ones(3)}},
    {"options": {"cell": -2}},
    {"options": {"filters": Filters(top_k=torch.ones(3, dtype=torch.int64))}},
]


@pytest.mark.parametrize("change", BAD, ids=range(len(BAD)))
def test_bad_arguments_are_the_errors_of_the_reference(change, generator):
    made = replace(make_round(generator=generator), **change)
    with pytest.raises((ValueError, TypeError)) as expected:
        made.run(reference.verify)
    with pytest.raises(type(expected.value)) as found:
        made.run(verify)
    assert str(found.value) == str(expected.value)


def test_dtypes_that_only_the_reference_takes_are_named(generator):
    made = make_round(generator=generator)
    for change, name in (
        ({"rows": made.rows.double()}, "target_logits: got dtype float64"),
        ({"draft": DraftBlock.from_logits(made.draft.tokens, made.draft.logits.double())}, "draft.logits: got dtype"),
    ):
        with pytest.raises(TypeError, match=name):
            replace(made, **change).run(verify)
    with pytest.raises(ValueError, match=r"draft\.logits: got shape"):
        replace(made, draft=replace(made.draft, logits=made.draft.logits[:, :2])).run(verify)

"""Every component inside `torch.compile(fullgraph=True)`: no graph break, and the bits of eager code."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import dsspark
from dsspark.ops import TRACEABLE

V, GAMMA, R, HIDDEN, RANK = 23, 3, 4, 6, 4
CELL = 5


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    """Return the function compiled into one graph; a break is an error. Anything that traces without a code generator will do."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def tensors_of(value) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [x for f in dataclasses.fields(value) for x in tensors_of(getattr(value, f.name))]
    return [x for item in value for x in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def same(found, expected) -> None:
    """Fail unless two results have the same type and the same tensors, bit for bit."""
    assert type(found) is type(expected)
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    assert pairs
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def equal_when_compiled(function, *arguments, **options) -> None:
    """Fail unless the function compiles into one graph, through an operator of ours, and returns what it returns uncompiled."""
    graphs = []

    def look(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(function, fullgraph=True, backend=look, **options)(*arguments)
    assert any("dsspark" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    torch._dynamo.reset()
    same(compiled(function, **options)(*arguments), function(*arguments))


class Inputs:
    """The tensors of a small round."""

    def __init__(self, kind="vanilla", requests=R, dtype=torch.float32, head=True):
        g = torch.Generator().manual_seed(11)
        self.head = dsspark.MarkovHead(V, RANK, kind, HIDDEN) if head else None
        if self.head is not None:
            with torch.no_grad():
                for parameter in self.head.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=g))
        self.base = torch.randn(requests, GAMMA, V, generator=g).to(dtype)
        self.hidden = torch.randn(requests, GAMMA, HIDDEN, generator=g)
        self.anchors = torch.randint(0, V, (requests,), generator=g)
        self.previous = torch.randint(0, V, (requests, GAMMA), generator=g)
        self.weight = torch.randn(1, HIDDEN + RANK, generator=g)
        self.bias = torch.randn(1, generator=g)
        self.w1 = torch.randn(V, RANK, generator=g)
        self.uniforms = dsspark.Uniforms.draw(requests, GAMMA, g)
        self.survival = torch.rand(requests, GAMMA, generator=g).cumprod(1)
        self.table = dsspark.CostTable.from_points([1, 6, 40], [1.0, 1.1, 4.0])
        self.lengths = torch.arange(requests) % (GAMMA + 1)
        self.positions = torch.arange(requests) + 2
        self.temperature = torch.tensor([1.0, 0.0, 0.7, 1.3])[torch.arange(requests) % 4]
        self.target = torch.randn(requests * (GAMMA + 1), V, generator=g).to(dtype)
        self.generator = g

    def packed(self, tokens):
        return dsspark.pack(self.anchors, tokens, self.lengths, self.positions, capacity=len(self.target))


BACKENDS = ["auto", "reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_confidence_and_survival(backend):
    x = Inputs()
    temperatures = torch.tensor([1.0, 1.5, 0.5])

    def function(hidden, previous, w1, weight, bias):
        logits = dsspark.confidence_logits(hidden, previous, w1, weight, bias, backend=backend)
        return (
            logits,
            dsspark.survival(logits, temperatures, backend=backend),
            dsspark.survival(logits, backend=backend),
        )

    equal_when_compiled(function, x.hidden, x.previous, x.w1, x.weight, x.bias)
    equal_when_compiled(
        lambda hidden, weight: dsspark.confidence_logits(hidden, x.previous, None, weight, backend=backend),
        x.hidden,
        x.weight[0, :HIDDEN],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scheduler(backend):
    x = Inputs()

    def function(survival):
        lengths = dsspark.schedule(survival, x.table, max_tokens=9, backend=backend)
        budget = dsspark.plan_budget(survival, x.table, backend=backend)
        return (
            lengths,
            budget,
            dsspark.admit(survival, budget, backend=backend),
            dsspark.admit(survival, 3, backend=backend),
        )

    equal_when_compiled(function, x.survival)
    assert int(function(x.survival)[1]) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_pack(backend):
    x = Inputs()

    def function(anchors, tokens, lengths, positions):
        return dsspark.pack(anchors, tokens, lengths, positions, capacity=12, backend=backend)

    equal_when_compiled(function, x.anchors, x.previous, x.lengths, x.positions)


def test_pack_without_a_capacity_has_a_size_that_only_the_data_know():
    x = Inputs()

    def function(lengths):
        batch = dsspark.pack(x.anchors, x.previous, lengths, x.positions)
        return batch.tokens * 2, batch.num_tokens

    found = compiled(function)
    for lengths in (x.lengths, 1 - x.lengths.clamp(max=1)):
        same(found(lengths), function(lengths))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_attention(backend):
    x = Inputs()
    batch = x.packed(x.previous)
    g = x.generator
    query = torch.randn(len(batch.tokens), 4, 16, generator=g)
    keys, values = (torch.randn(6, 4, 2, 16, generator=g) for _ in range(2))
    block_table = torch.arange(3 * R).view(R, 3).to(torch.int32) % 6
    context_lens = (x.positions + x.lengths + 1).to(torch.int32)

    def function(query, keys, values, batch):
        return dsspark.ragged_attention(
            query, keys, values, batch, block_table, context_lens, scale=0.3, backend=backend
        )

    equal_when_compiled(function, query, keys, values, batch)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_block(kind, keep_logits, backend):
    x = Inputs(kind or "vanilla", dtype=torch.bfloat16, head=kind is not None)

    def function(base, anchors, uniforms, hidden, temperature):
        return dsspark.draft_block(
            base,
            anchors,
            x.head,
            uniforms,
            temperature=temperature,
            hidden=hidden,
            keep_logits=keep_logits,
            cell=CELL,
            backend=backend,
        )

    equal_when_compiled(function, x.base, x.anchors, x.uniforms, x.hidden, x.temperature)


def test_draft_block_with_a_vocabulary_of_its_own():
    x = Inputs(head=False)
    ids = torch.arange(0, 2 * V, 2)

    def function(base):
        return dsspark.draft_block(base, x.anchors, None, x.uniforms, temperature=0.5, draft_to_target=ids, cell=CELL)

    equal_when_compiled(function, x.base)


FILTERS = {
    "none": None,
    "numbers": dsspark.Filters(top_k=5, top_p=0.8, min_p=0.05),
    "tensors": dsspark.Filters(top_k=torch.tensor([3, 0, 9, 1]), top_p=torch.linspace(0.3, 1.0, 4)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", list(FILTERS))
def test_verify(filters, backend):
    x = Inputs(dtype=torch.bfloat16)
    draft = dsspark.draft_block(x.base, x.anchors, None, x.uniforms, cell=CELL)

    def function(target, batch, draft, uniforms, temperature):
        return dsspark.verify(
            target,
            batch,
            draft,
            uniforms,
            temperature=temperature,
            filters=FILTERS[filters],
            cell=CELL,
            backend=backend,
        )

    equal_when_compiled(function, x.target, x.packed(draft.tokens), draft, x.uniforms, x.temperature)


@pytest.mark.parametrize("keep_logits", [True, False])
def test_a_whole_round_is_one_graph(keep_logits):
    """Draft, confidence, schedule, pack, verify: results of one are arguments of the next inside the graph."""
    x = Inputs()

    def function(base, hidden, anchors, uniforms, target, table):
        draft = dsspark.draft_block(
            base, anchors, x.head, uniforms, temperature=x.temperature, keep_logits=keep_logits, cell=CELL
        )
        previous = torch.cat((anchors[:, None], draft.tokens[:, :-1]), dim=1)
        logits = dsspark.confidence_logits(hidden, previous, x.w1, x.weight, x.bias)
        lengths = dsspark.schedule(dsspark.survival(logits), table)
        batch = dsspark.pack(anchors, draft.tokens, lengths, x.positions, capacity=len(target))
        result = dsspark.verify(target, batch, draft, uniforms, temperature=x.temperature, cell=CELL)
        return draft.log_norm, lengths, batch, result

    equal_when_compiled(function, x.base, x.hidden, x.anchors, x.uniforms, x.target, x.table)


def test_one_graph_serves_every_number_of_requests():
    """dynamic=True: shapes of the operators are computed from shapes, so a second size compiles nothing."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def function(base, anchors, uniforms):
        return dsspark.draft_block(base, anchors, None, uniforms, cell=CELL).tokens

    found = torch.compile(function, fullgraph=True, backend=count, dynamic=True)
    for requests in (4, 7, 9):
        x = Inputs(requests=requests)
        same(found(x.base, x.anchors, x.uniforms), function(x.base, x.anchors, x.uniforms))
    assert len(graphs) == 1


def gradients(function, *arguments):
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    function(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def test_gradients_of_the_confidence_head():
    """Through logits and survival, into hidden states, W1, weight, bias and temperatures, against autograd of the reference."""
    x = Inputs()

    def function(hidden, w1, weight, bias, temperatures):
        logits = dsspark.confidence_logits(hidden, x.previous, w1, weight, bias)
        return dsspark.survival(logits, temperatures)

    arguments = (x.hidden, x.w1, x.weight, x.bias, torch.tensor([1.0, 1.5, 0.5]))
    for found, expected in zip(gradients(compiled(function), *arguments), gradients(function, *arguments), strict=True):
        assert bool(expected.abs().sum() > 0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    def plain(hidden, weight):
        return dsspark.survival(dsspark.confidence_logits(hidden, x.previous, None, weight))

    arguments = (x.hidden, x.weight[0, :HIDDEN])
    for found, expected in zip(gradients(compiled(plain), *arguments), gradients(plain, *arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_confidence_head_as_a_module():
    x, head = Inputs(), dsspark.ConfidenceHead(HIDDEN, RANK)

    def function(hidden, w1):
        return head(hidden, x.previous, w1)

    equal_when_compiled(function, x.hidden, x.w1)
    found, expected = (gradients(run, x.hidden, x.w1) for run in (compiled(function), function))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_operators_keep_their_promises_to_the_compiler():
    """Schemas without hidden writes or aliases, fakes with the real shapes, dtypes and strides."""
    x = Inputs()
    ops = torch.ops.dsspark
    batch = x.packed(x.previous)
    parts = [batch.tokens, batch.positions, batch.request_ids, batch.cu_seqlens, batch.num_tokens]
    uniforms = [x.uniforms.draft, x.uniforms.accept, x.uniforms.final]
    point = dsspark.DraftBlock.point(x.previous)
    draft = [point.tokens, point.token_probs, point.row_max, point.row_sum, point.temperature]
    head = [x.head.markov_w1.weight.detach(), x.head.markov_w2.weight.detach()]
    nothing = [None] * 5
    calls = [
        (ops.confidence_logits, (x.hidden, x.previous, x.w1, x.weight, x.bias, "auto")),
        (ops.survival, (x.survival, None, "auto")),
        (ops.schedule, (x.survival, x.table.sps, None, "auto")),
        (ops.plan_budget, (x.survival, x.table.sps, 9, "auto")),
        (ops.admit, (x.survival, None, 3, "auto")),
        (ops.pack, (x.anchors, x.previous, x.lengths, x.positions, 20, "auto")),
        (ops.draft_block, (x.base, x.anchors, "vanilla", head, uniforms, None, 1.0, None, None, False, CELL, "auto")),
        (
            ops.verify,
            (x.target, parts, draft, *nothing, uniforms, None, 1.0, None, None, None, None, None, None, CELL, "auto"),
        ),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_code_generator_takes_the_operators():
    """Inductor, not only a tracer: the caller's arithmetic around the operators. In a process of its own, where `torch.empty` is torch's."""
    code = """
import torch, dsspark

def function(logits, anchors, tokens, lengths, positions):
    survival = dsspark.survival(logits * 2.0 + 1.0)
    batch = dsspark.pack(anchors, tokens, lengths, positions, capacity=16)
    return survival * 0.5, batch.tokens + 1

ids = torch.arange(4)
arguments = torch.linspace(-2, 2, 12).view(4, 3), ids, ids[:, None].expand(4, 3), ids, ids
for found, expected in zip(torch.compile(function, fullgraph=True)(*arguments), function(*arguments), strict=True):
    torch.testing.assert_close(found, expected)  # fused arithmetic of the caller's may round differently
"""
    # Without Inductor's pool of compiling processes and its trials of vector instructions: each of them imports torch once more.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, env=environment)


def test_every_traceable_form_has_the_signature_of_its_function():
    import inspect

    for name, function in TRACEABLE.items():
        public = list(inspect.signature(getattr(dsspark, name)).parameters.values())
        traceable = list(inspect.signature(function).parameters.values())
        assert [(p.name, p.kind) for p in traceable] == [(p.name, p.kind) for p in public]
        assert [p.default for p in traceable[:-1]] == [p.default for p in public[:-1]]


def test_eager_calls_use_no_operator(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("an operator ran outside of a compiler")

    for name in TRACEABLE:
        monkeypatch.setitem(TRACEABLE, name, refuse)
    monkeypatch.setattr("dsspark.ops.confidence._survival_op", refuse)
    assert dsspark.survival(torch.zeros(1, 2)).tolist() == [[0.5, 0.25]]


def test_errors_of_the_arguments_reach_the_caller():
    function = compiled(lambda logits: dsspark.survival(logits))
    with pytest.raises(ValueError, match="confidence_logits: got shape"):
        function(torch.zeros(2, 3, 1))

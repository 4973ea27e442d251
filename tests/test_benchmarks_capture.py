"""A CUDA graph can hold every kernel contender: nothing of them reads a value on the host. Checked without a GPU, on fake CUDA tensors.

A fake tensor has a device, a shape and no values, so whatever would wait for a GPU (an `.item()`, a mask as an index, a branch on a
tensor) raises. Triton's launches are left out: they neither read nor wait.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

pytest.importorskip("triton", reason="Triton exists on Linux only")

from triton.runtime import interpreter

import dsspark
from benchmarks import harness
from benchmarks.cases import KERNEL, REFERENCE
from benchmarks.sizes import Size
from dsspark.kernels.losses import _SlotLosses, choose_config

SIZE = Size(num_requests=32, block_size=3, vocab_size=512, rank=16, hidden_size=16, samples=64, context=32)
GRAPHS = [task for task in harness.TIMED if harness._reason(task, SIZE, KERNEL + harness.GRAPH) is None]


def faked(value, mode):
    """Return tensors, heads, tables and what holds them as fake tensors of a GPU."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value).to("cuda:0")
    if isinstance(value, dsspark.CostTable):
        table = dsspark.CostTable.__new__(dsspark.CostTable)
        object.__setattr__(table, "sps", faked(value.sps, mode))
        object.__setattr__(table, "provenance", {})
        return table
    if isinstance(value, dsspark.MarkovHead):
        head = SimpleNamespace(kind=value.kind, rank=value.rank, gate_proj=None, joint_proj=None)
        head.initial_state, head.named_parameters = lambda *size: None, lambda: ()
        for name in ("markov_w1", "markov_w2"):  # plain attributes: a Parameter would forget the fake device
            setattr(head, name, SimpleNamespace(weight=faked(getattr(value, name).weight, mode)))
        return head
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: faked(entry, mode) for name, entry in vars(value).items()})
    if dataclasses.is_dataclass(value):
        fields = {field.name: faked(getattr(value, field.name), mode) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def run_on_fake_cuda(task, name, monkeypatch):
    """Run a contender of a task on fake tensors of a GPU."""
    case = harness.TIMED[task][1](SIZE, "cpu")
    return on_fake_cuda(case.contenders[name].run, case.inputs, monkeypatch)


def on_fake_cuda(run, inputs, monkeypatch):
    """Run `run` on fakes of its inputs."""
    # The poison of the root conftest fills what is allocated; a launch would look for the values.
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)
    monkeypatch.setattr(torch, "empty_like", torch._C._VariableFunctions.empty_like)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **named: None)
    with FakeTensorMode() as mode:
        return run(faked(inputs, mode))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # the launcher asks how it is aligned
# A round is these, one after the other.
@pytest.mark.parametrize("task", [task for task in GRAPHS if task not in ("round", "losses")])
def test_a_graph_can_hold_the_kernels_of(task, monkeypatch):
    run_on_fake_cuda(task, KERNEL, monkeypatch)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_graph_can_hold_the_losses(monkeypatch):
    """Without autograd's engine, which aborts the process on a device that this torch was not built for."""

    def run(x):
        ctx = SimpleNamespace()
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        losses = _SlotLosses.forward(ctx, x.draft, x.target, x.labels, choose_config(x.draft.shape[1]))
        return _SlotLosses.backward(ctx, *losses)

    gradient = on_fake_cuda(run, harness.TIMED["losses"][1](SIZE, "cpu").inputs, monkeypatch)[0]
    assert gradient.device.type == "cuda"
    assert gradient.shape == (SIZE.num_requests * SIZE.block_size, SIZE.vocab_size)


def test_every_task_but_the_fit_is_captured():
    assert set(harness.TIMED) - set(GRAPHS) == {"calibration"}


@pytest.mark.parametrize(("task", "name"), [("calibration", KERNEL), ("rejection", REFERENCE)])
def test_what_reads_values_is_seen(task, name, monkeypatch):
    """The fit checks its arguments' values; the reference branches on them."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
        run_on_fake_cuda(task, name, monkeypatch)

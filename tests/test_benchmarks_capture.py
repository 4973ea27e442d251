"""A CUDA graph can hold every kernel contender: nothing of them reads a value on the host. Checked without a GPU, on fake CUDA tensors.

A fake tensor has a device, a shape and no values, so whatever would wait for a GPU (an `.item()`, a mask as an index, a branch on a
tensor) raises. Triton's launches are left out: they neither read nor wait.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

pytest.importorskip("triton", reason="Triton exists on Linux only")

from triton.runtime import interpreter

from benchmarks import harness
from benchmarks.cases import KERNEL, REFERENCE, moved_to
from benchmarks.sizes import Size

SIZE = Size(num_requests=32, block_size=3, vocab_size=512, rank=16, hidden_size=16, samples=64, context=32)
GRAPHS = [
    task
    for task in harness.TIMED
    if harness._reason(task, SIZE, KERNEL + harness.GRAPH) is None
]


def run_on_fake_cuda(task, name, monkeypatch):
    """Run a contender of a task on fake tensors of a GPU."""
    case = harness.TIMED[task][1](SIZE, "cpu")
    # The poison of the root conftest fills what is allocated; a launch would look for the values.
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)
    monkeypatch.setattr(torch, "empty_like", torch._C._VariableFunctions.empty_like)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **named: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return case.contenders[name].run(moved_to(case.inputs, "cuda"))


@pytest.mark.parametrize("task", GRAPHS)
def test_a_graph_can_hold_the_kernels_of(task, monkeypatch):
    run_on_fake_cuda(task, KERNEL, monkeypatch)


def test_every_task_but_the_fit_is_captured():
    assert set(harness.TIMED) - set(GRAPHS) == {"calibration"}


@pytest.mark.parametrize(("task", "name"), [("calibration", KERNEL), ("rejection", REFERENCE)])
def test_what_reads_values_is_seen(task, name, monkeypatch):
    """The fit checks its arguments' values; the reference branches on them."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
        run_on_fake_cuda(task, name, monkeypatch)

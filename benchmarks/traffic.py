"""Bytes moved by interpreted kernels, by tensor: the figure of merit of memory-bound kernels, countable without a GPU.

Every load and store of Triton's interpreter is hooked; the lanes whose mask is set count with the size of their element, each time
they are touched. What a GPU's caches would spare is not spared here.

    with count_traffic(w2=w2, logits=logits) as traffic:
        dsspark.draft_block(..., backend="triton")
    traffic.read["w2"], traffic.written[OTHER], traffic.total, traffic.launches

`python -m benchmarks.traffic` counts every component, kernels and eager code alike, and writes the table "moved / floor"
(`benchmarks.traffic_table`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

OTHER = "other"
"""Tensors that were not named: statistics, results, small arguments."""


@dataclass
class Traffic:
    """Bytes by tensor name.

    Attributes:
        read: loaded; an atomic counts here and in `written`.
        written: stored.
        launches: kernels launched over a grid.
    """

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    launches: int = 0

    @property
    def total(self) -> int:
        """All bytes moved."""
        return self.read.total() + self.written.total()


@contextlib.contextmanager
def count_traffic(**tensors: Tensor) -> Iterator[Traffic]:
    """Count the bytes that interpreted kernels move within the block.

    Args:
        tensors: CPU tensors to tell apart, by name; a tensor's storage counts as a whole. Everything else is `OTHER`.

    Raises:
        ValueError: for a tensor that is not on the CPU, and two names for one storage.
    """
    spans = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, expected the CPU, where kernels are interpreted"
            )
        if storage.data_ptr() in [start for start, _ in spans.values()]:
            raise ValueError(f"{name}: got the storage of another name, expected tensors that share no memory")
        spans[name] = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    traffic = Traffic()

    def count(counters: list[Counter[str]], pointers: Any, mask: Any) -> None:
        size = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        rest = addresses.size
        for name, (start, stop) in spans.items():
            lanes = int(((addresses >= start) & (addresses < stop)).sum())
            rest -= lanes
            for counter in counters if lanes else []:
                counter[name] += lanes * size
        for counter in counters if rest else []:
            counter[OTHER] += rest * size

    execute = interpreter.GridExecutor.__call__

    def counted_launch(executor: Any, *args: Any, **named: Any) -> Any:
        traffic.launches += 1
        with _disable_current_modes():  # what the interpreter does with torch is no eager operation of ours
            return execute(executor, *args, **named)

    builder = interpreter.interpreter_builder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def counted_load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        count([traffic.read], pointers, mask)
        return load(pointers, mask, *rest, **named)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        count([traffic.written], pointers, mask)
        return store(pointers, value, mask, *rest, **named)

    def counted_atomic(operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        count([traffic.read, traffic.written], pointers, mask)
        return atomic(operation, pointers, value, mask, *rest, **named)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", counted_launch),
        mock.patch.object(builder, "create_masked_load", counted_load),
        mock.patch.object(builder, "create_masked_store", counted_store),
        mock.patch.object(builder, "create_atomic_rmw", counted_atomic),
    ):
        yield traffic


if __name__ == "__main__":
    # Triton's own library must see the switch too, and this module has just imported it: begin again.
    command = [sys.executable, "-m", "benchmarks.traffic_table", *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)

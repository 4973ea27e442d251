"""What each kernel reads and writes, by argument: the figures of the data-movement diagrams. Counted in the interpreter, like all traffic.

    python -m benchmarks.movement       count the kernels at the table's sizes, write results/movement.json

Only loads and stores of kernels count here; `benchmarks.traffic` adds the few eager operations of the launchers (a fill, an offset).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import interpreter

from benchmarks.cases import KERNEL
from benchmarks.provenance import RESULTS, provenance
from benchmarks.sizes import TRAFFIC, Size
from benchmarks.tasks import TASKS
from benchmarks.traffic import OTHER, count_traffic

PATH = RESULTS / "movement.json"

Launches = dict[str, dict[str, Any]]
"""Kernel -> launches, bytes read and bytes written by argument, in the order of the first launch."""


def _pointers(executor: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a launch by argument, without the ending _ptr; of two views of one storage the first."""
    known = {name: value for name, value in named.items() if name in executor.arg_names}
    found: dict[str, Tensor] = {}
    for name, value in inspect.getcallargs(executor.fn, *args, **known).items():
        storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
        if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() not in storages:
            found[name.removesuffix("_ptr")] = value
    return found


@contextlib.contextmanager
def count_launches() -> Iterator[Launches]:
    """Count, kernel by kernel and argument by argument, what is launched within the block.

    Yields:
        Kernel name -> {"launches": n, "read": {argument: bytes}, "written": {argument: bytes}}.
    """
    launches: Launches = {}
    execute = interpreter.GridExecutor.__call__

    def counted(executor: Any, *args: Any, **named: Any) -> Any:
        with count_traffic(**_pointers(executor, args, named)) as traffic:
            result = execute(executor, *args, **named)
        entry = launches.setdefault(executor.fn.__name__, {"launches": 0, "read": {}, "written": {}})
        entry["launches"] += 1
        for side in ("read", "written"):
            for name, count in getattr(traffic, side).items():
                if count:
                    entry[side][name] = entry[side].get(name, 0) + count
        return result

    with mock.patch.object(interpreter.GridExecutor, "__call__", counted):
        yield launches


def total(launches: Launches) -> int:
    """Return all bytes moved."""
    return sum(count for entry in launches.values() for side in ("read", "written") for count in entry[side].values())


def count_task(name: str, size: Size) -> dict[str, Any]:
    """Return the record of one task: its size, its floor, what moved, and its launches.

    Raises:
        RuntimeError: for a load or store that belongs to no argument of its kernel.
    """
    case = TASKS[name][1](size, "cpu")
    with count_launches() as launches:
        case.contenders[KERNEL].run(case.inputs)
    stray = [kernel for kernel, entry in launches.items() if OTHER in entry["read"] or OTHER in entry["written"]]
    if stray:
        raise RuntimeError(f"{name}: {', '.join(stray)} touch memory of none of their arguments")
    return {
        "size": size.label,
        "floor": case.floor_bytes,
        "moved": total(launches),
        "launches": launches,
    }


def main() -> int:
    """Count every task at the sizes of the traffic table and write the file."""
    torch.set_num_threads(1)
    tasks = {name: count_task(name, TRAFFIC[component]) for name, (component, _) in TASKS.items()}
    facts = {key: text for key, text in provenance("cpu").items() if key in ("date", "commit", "torch", "triton")}
    PATH.write_text(json.dumps({"provenance": facts, "tasks": tasks}, indent=1) + "\n", encoding="utf-8")
    for name, record in tasks.items():
        print(f"{name}: {record['moved']:,} bytes, {record['moved'] / record['floor']:.3f} of the floor")
    return 0


def read(path: Path = PATH) -> dict[str, Any]:
    """Return what `main` wrote."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton must see the switch when it is imported: begin again
        command = [sys.executable, "-m", "benchmarks.movement"]
        raise SystemExit(subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)
    raise SystemExit(main())

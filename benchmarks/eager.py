"""Bytes moved, operations and peak memory of eager code, counted by a dispatch mode: no clock, no GPU.

Each operation counts its inputs once and its outputs once, as if it were one kernel that reads and writes nothing twice: for most of
ATen that is so, for sorts and products it is a floor, which favours the eager side. Views are free; a gather reads what it returns.
Three operations are several kernels inside, which a dispatch mode cannot see; `HIDDEN` says how often they pass over their input.

    with count_eager() as eager:
        verify_public(...)
    eager.total, eager.operations, eager.peak
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Hidden:
    """What an operation does to its first argument inside.

    Attributes:
        kernels: the ATen operations it is made of, which `tests/test_benchmarks_traffic.py` compares with the profiler's.
        reads: how often the argument, or something as large, is read.
        writes: how often something as large is written.
    """

    kernels: tuple[str, ...]
    reads: int
    writes: int


HIDDEN = {
    "aten::multinomial": Hidden(("aminmax", "sum", "exponential_", "div", "argmax"), reads=5, writes=2),
    "aten::logsumexp": Hidden(("amax", "sub", "exp_", "sum"), reads=4, writes=2),
    "aten::logsumexp.out": Hidden(("amax", "sub", "exp_", "sum"), reads=4, writes=2),
}
_GATHERS = (
    "aten::index.",
    "aten::gather",
    "aten::embedding",
    "aten::index_select",
    "aten::take",
    "aten::masked_select",
)
_SCATTERS = ("aten::scatter", "aten::index_put", "aten::index_copy", "aten::index_fill", "aten::_index_put")
_FILLS = ("aten::fill_", "aten::zero_", "aten::exponential_", "aten::uniform_", "aten::normal_", "aten::random_")
_FREE = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::lift_fresh", "aten::is_same_size", "aten::set_")


@dataclass
class EagerTraffic:
    """What eager operations did.

    Attributes:
        read: bytes by operation.
        written: likewise.
        operations: how many of them moved anything: kernel launches, were this a GPU, not counting what is hidden.
        live: bytes allocated in the block and still alive.
        peak: the largest `live` ever was, what is hidden included.
    """

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    live: int = 0
    peak: int = 0

    @property
    def total(self) -> int:
        """All bytes moved."""
        return self.read.total() + self.written.total()


def touched(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor once touches: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(values: object) -> int:
    return sum(touched(tensor) for tensor in _tensors(values))


def moved(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor], out: object
) -> tuple[int, int]:
    """Return the bytes that one operation reads and writes.

    Args:
        name: its schema's name and overload.
        args, kwargs: its arguments.
        written: the arguments that it writes in place.
        out: its result.
    """
    inputs = _tensors((args, kwargs))
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    fresh = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in storages]
    if name in HIDDEN:
        large = touched(inputs[0])
        return HIDDEN[name].reads * large, HIDDEN[name].writes * large + _bytes(fresh)
    if name.startswith(_FREE) or not (fresh or written or name.startswith("aten::_local_scalar")):
        return 0, 0
    if name.startswith(_GATHERS):
        return _bytes(fresh) + _bytes(inputs[1:]), _bytes(fresh)
    if name.startswith(_SCATTERS):
        # What is written is as large as what is scattered; a scalar value as large as its index.
        source = _bytes(inputs[1:])
        target = max((tensor.numel() for tensor in inputs[1:]), default=0) * inputs[0].element_size()
        copied = 0 if written else touched(inputs[0])
        return source + copied, target + copied
    if name.startswith(_FILLS):
        return 0, _bytes(written)
    if name.startswith("aten::copy_"):
        return touched(inputs[1]), touched(inputs[0])
    return _bytes(inputs), _bytes(fresh) + _bytes(written)


class _Counting(TorchDispatchMode):
    def __init__(self, traffic: EagerTraffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        given = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
        pairs = [
            (a, v) for a, v in zip(schema.arguments, given, strict=False) if a.alias_info and a.alias_info.is_write
        ]
        writes = [v for a, v in pairs if not a.is_out]
        read_by = {key: v for key, v in kwargs.items() if key not in {a.name for a, _ in pairs if a.is_out}}
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        read, written = moved(name, args, read_by, _tensors(writes), out)  # an `out=` is written and not read
        self.traffic.read[name] += read
        self.traffic.written[name] += written
        self.traffic.operations += bool(read or written)
        for tensor in _tensors(out):
            self._account(tensor, before)
        hidden = touched(_tensors(args)[0]) if name in HIDDEN else 0
        self.traffic.peak = max(self.traffic.peak, self.traffic.live + hidden)
        return out

    def _account(self, tensor: Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in before or key in self.known:
            return
        self.known.add(key)
        self.traffic.live += size
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.traffic.live -= size


@contextlib.contextmanager
def count_eager() -> Iterator[EagerTraffic]:
    """Count what the eager operations within the block move and allocate; interpreted or compiled kernels are not seen."""
    traffic = EagerTraffic()
    with torch.no_grad(), _Counting(traffic):
        yield traffic

"""Argument checks shared by every component: each error names the argument, what was got, what was expected and a remedy.

Only what the host already knows is checked here (shapes, dtypes, devices, Python numbers). Values that live in a tensor are
never read, so no check synchronises with a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT_DTYPES = (torch.int64, torch.int32)


def check_tensor(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: got {type(value).__name__}, expected a torch.Tensor; convert it with torch.as_tensor(...)"
        )


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | str]) -> None:
    """Raise `ValueError` unless `tensor` has the shape `expected`; a string stands for a free size and names it."""
    check_tensor(name, tensor)
    shape = tuple(tensor.shape)
    matches = len(shape) == len(expected) and all(
        isinstance(want, str) or got == want for got, want in zip(shape, expected, strict=True)
    )
    if not matches:
        wanted = ", ".join(str(size) for size in expected)
        raise ValueError(f"{name}: got shape {list(shape)}, expected [{wanted}]; reshape or slice it to match")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise `TypeError` unless the dtype of `tensor` is one of `allowed`."""
    check_tensor(name, tensor)
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(
            f"{name}: got dtype {str(tensor.dtype).removeprefix('torch.')}, expected one of {names}; convert it with .to(...)"
        )


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise `ValueError` unless both tensors are on the same device."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name}: got device {tensor.device}, expected {other.device} as {other_name}; move it with .to({str(other.device)!r})"
        )


def check_range(name: str, value: float, low: float, high: float, remedy: str) -> None:
    """Raise `ValueError` unless low <= value <= high (a NaN fails)."""
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, expected a value in [{low}, {high}]; {remedy}")


def check_block_size(name: str, block_size: int) -> None:
    """Raise `ValueError` unless a draft block has between 1 and 32 positions."""
    check_range(name, block_size, 1, 32, "draft between 1 and 32 tokens a round")


def check_cell(cell: int) -> None:
    """Raise `ValueError` unless `cell` is a positive number of tokens."""
    if isinstance(cell, bool) or not isinstance(cell, int) or cell < 1:
        raise ValueError(f"cell: got {cell!r}, expected a positive int; leave it at dsspark.CELL outside tests")


def as_temperature(temperature: float | Tensor, num_requests: int, like: Tensor) -> Tensor:
    """Return the temperature of each request, [R], on the device of `like`.

    A Python number is checked here; a tensor is not read (a negative, infinite or NaN entry makes its own request invalid).
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if isinstance(temperature, Tensor):
        check_dtype("temperature", temperature, FLOAT_DTYPES)
        if temperature.dim() > 0:
            check_shape("temperature", temperature, (num_requests,))
        check_device("temperature", temperature, "the logits", like)
        return temperature.to(dtype).expand(num_requests)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature: got {type(temperature).__name__}, expected a float or a tensor [R]")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}, expected a finite number >= 0; 0 means greedy")
    return torch.full((num_requests,), float(temperature), dtype=dtype, device=like.device)

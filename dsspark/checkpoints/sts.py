"""Files of Sequential Temperature Scaling: JSON with one temperature a position, under either of the two public keys."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from dsspark._checks import check_shape
from dsspark.checkpoints.fields import read_json

KEYS = ("temperatures", "sts_temperatures")


def load_sts(path: Path | str, block_size: int) -> Tensor:
    """Return the temperatures of a file, [gamma] float32.

    Args:
        path: JSON with `temperatures` or `sts_temperatures`.
        block_size: gamma, as many temperatures as there must be.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for neither key, both with different values, another length, or a temperature that is no positive finite number.
    """
    path = Path(path)
    raw = read_json(path)
    found = {key: raw[key] for key in KEYS if key in raw}
    if not found:
        raise ValueError(
            f"{path}: key {KEYS[0]!r}: found nothing, expected {block_size} temperatures (or under {KEYS[1]!r})"
        )
    key, values = next(iter(found.items()))
    if any(other != values for other in found.values()):
        raise ValueError(f"{path}: key {KEYS[1]!r}: found {found[KEYS[1]]}, expected {values} as under {KEYS[0]!r}")
    if not isinstance(values, list) or len(values) != block_size:
        count = len(values) if isinstance(values, list) else type(values).__name__
        raise ValueError(
            f"{path}: key {key!r}: found {count} temperatures, expected {block_size}, one a drafted position; "
            "was it fitted for another block size?"
        )
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{path}: key {key!r}[{index}]: found {value!r}, expected a positive finite number")
    return torch.tensor(values, dtype=torch.float32)


def save_sts(path: Path | str, temperatures: Tensor, key: str = KEYS[0]) -> None:
    """Write temperatures [gamma] so that `load_sts` returns the same bits.

    Args:
        path: of the file.
        temperatures: T_k, such as `fit_sts(...).temperatures`.
        key: "temperatures" or "sts_temperatures".

    Raises:
        ValueError: for another key or shape.
    """
    check_shape("temperatures", temperatures, ("gamma",))
    if key not in KEYS:
        raise ValueError(f"key: got {key!r}, expected one of {list(KEYS)}")
    Path(path).write_text(json.dumps({key: temperatures.tolist()}) + "\n", encoding="utf-8")

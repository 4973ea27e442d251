"""The tensors of a checkpoint folder: one safetensors file or shards with an index, mapped, and read only where asked."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsspark._checks import FLOAT_DTYPES
from dsspark.checkpoints.fields import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 6
"""Wrong tensors that an error lists."""


class TensorFolder:
    """Names, shapes and tensors of a folder. A tensor is a view of the mapped file until something writes to it.

    Args:
        folder: with `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        FileNotFoundError: if there is neither.
        ValueError: if the index is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            weight_map = read_json(folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{folder / INDEX}: key 'weight_map': found {weight_map!r}, expected an object")
            self._files: dict[str, str] = weight_map
        elif (folder / SINGLE).is_file():
            self._files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{folder}: found neither {SINGLE} nor {INDEX}, expected one of them")

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape, which only its header is read for."""
        shape: list[int] = self._slice(name).get_shape()
        return shape

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        self._slice(name)
        tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
        return tensor

    def check(self, expected: Mapping[str, tuple[int, ...]], others: Sequence[str] = ()) -> None:
        """Raise unless every expected tensor is there in its shape, and none of `others`.

        Args:
            expected: shape of each name.
            others: names in the folder that should not be there.

        Raises:
            ValueError: naming each wrong key, what was found and what was expected.
        """
        wrong = [f"key {name!r}: found {self.shape(name)}, expected no such tensor" for name in others]
        for name, shape in expected.items():
            if name not in self._files:
                wrong.append(f"key {name!r}: found nothing, expected {list(shape)}")
            elif self.shape(name) != list(shape):
                wrong.append(f"key {name!r}: found {self.shape(name)}, expected {list(shape)}")
        if wrong:
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(f"{self.folder}: {'; '.join(wrong[:SHOWN])}{more}")

    def floats(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the tensors of `names`, ours to theirs, each of which must hold floats.

        Raises:
            ValueError: for another dtype: a quantised checkpoint.
        """
        state = {ours: self.read(theirs) for ours, theirs in names.items()}
        for ours, tensor in state.items():
            if tensor.dtype not in FLOAT_DTYPES:
                raise ValueError(
                    f"{self.folder}: key {names[ours]!r}: found dtype {tensor.dtype}, expected one of {list(FLOAT_DTYPES)}; "
                    "quantised checkpoints must be dequantised first"
                )
        return state

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise FileNotFoundError(f"{path}: found no file, expected the shard that {INDEX} names")
            try:
                self._open[file] = safe_open(path, framework="pt")
            except Exception as error:  # safetensors has its own exception, which is no ValueError
                raise ValueError(f"{path}: found no safetensors file ({error})") from error
        return self._open[file]

    def _slice(self, name: str) -> Any:
        handle = self._handle(self._files[name])
        if name not in handle.keys():  # noqa: SIM118 - safe_open is no mapping
            raise ValueError(
                f"{self.folder / self._files[name]}: key {name!r}: found nothing, expected what {INDEX} says"
            )
        return handle.get_slice(name)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write config.json and one model.safetensors; a file that is mapped by a loaded model is replaced, not overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX).exists():
        raise FileExistsError(
            f"{folder / INDEX}: found an index of shards, expected a folder without; choose another folder"
        )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / SINGLE
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
        os.replace(path, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")

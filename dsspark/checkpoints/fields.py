"""Reading values out of a JSON configuration: every error names the file, the key, what was found and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: found no file, expected one; a checkpoint is a folder with config.json")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: found no JSON ({error}), expected an object") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: found a {type(value).__name__}, expected an object")
    return value


class Fields:
    """Typed access to the keys of a configuration.

    A key may live in several places (SpecForge moved its own from the top level into `dflash_config`): all of them are read, and two
    that differ are an error.

    Args:
        path: for the errors.
        *places: (prefix of the keys, object), in order.
    """

    def __init__(self, path: Path, *places: tuple[str, Mapping[str, Any]]) -> None:
        self.path, self.places = path, places

    def error(self, key: str, found: object, expected: str) -> ValueError:
        """Return the error for a key."""
        where = found if isinstance(found, str) and found.startswith("nothing") else repr(found)
        return ValueError(f"{self.path}: key {key!r}: found {where}, expected {expected}")

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return any(place.get(key) is not None for _, place in self.places)

    def raw(self, key: str, expected: str) -> tuple[str, Any]:
        """Return the key's full name and its value.

        Raises:
            ValueError: if it is missing, or differs between places.
        """
        name, value = self.places[0][0] + key, _MISSING
        for prefix, place in self.places:
            found = place.get(key)
            if found is None:
                continue
            if value is not _MISSING and value != found:
                raise self.error(prefix + key, found, f"{value!r} as in {name!r}")
            name, value = (prefix + key, found) if value is _MISSING else (name, value)
        if value is _MISSING:
            raise self.error(name, "nothing", expected)
        return name, value

    def integer(self, key: str, low: int, high: int | None = None) -> int:
        """Return an integer from `low` to `high`."""
        expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        name, value = self.raw(key, expected)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise self.error(name, value, expected)
        return value

    def number(self, key: str) -> float:
        """Return a positive number."""
        name, value = self.raw(key, "a positive number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.error(name, value, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        name, value = self.raw(key, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, key: str, options: Sequence[str]) -> str:
        """Return one of the options, whatever its case."""
        name, value = self.raw(key, f"one of {list(options)}")
        if not isinstance(value, str) or value.lower() not in options:
            raise self.error(name, value, f"one of {list(options)}")
        return value.lower()

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of increasing integers, not empty."""
        expected = "a list of increasing integers"
        name, value = self.raw(key, expected)
        whole = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not whole or not value or value != sorted(set(value)):
            raise self.error(name, value, expected)
        return tuple(value)

    def must_be(self, key: str, allowed: Sequence[Any], remedy: str) -> None:
        """Raise if the key is there with a value that is not allowed: something this package does not compute."""
        for prefix, place in self.places:
            if key in place and place[key] not in allowed:
                raise self.error(prefix + key, place[key], f"{allowed[0]!r}; {remedy}")

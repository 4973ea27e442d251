"""How tokens become characters that are safe to show: in a terminal, an escape sequence of a prompt must stay text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from itertools import groupby
from typing import Literal

Kind = Literal["accepted", "corrected", "bonus", "target", "prompt"]
Piece = tuple[int, Kind]

_NUM_BYTES = 256
_HARMLESS = "\n\t"
_BIDI_CONTROLS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
END_MARK = "\N{END OF PROOF}"
"""Stands for a special token: the model's end of text."""


def _visible(character: str) -> str:
    """Return a character that neither moves the cursor nor turns the text round."""
    code = ord(character)
    if character in _HARMLESS:
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return chr(0x2421)
    return _REPLACEMENT if 0x80 <= code < 0xA0 or code in _BIDI_CONTROLS else character


def to_spans(pieces: Iterable[Piece]) -> list[tuple[str, Kind]]:
    """Return the text of the tokens as (characters, kind) runs.

    A character of several bytes has the kind of its last byte; bytes that are no UTF-8 become replacement characters, and control
    characters become their pictures.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    characters: list[tuple[str, Kind]] = []
    kind: Kind = "target"
    for token, kind in pieces:
        if token < _NUM_BYTES:
            text = decoder.decode(bytes([token]))
        else:
            text = decoder.decode(b"", final=True) + END_MARK
            decoder.reset()
        characters.extend((_visible(character), kind) for character in text)
    characters.extend((character, kind) for character in decoder.decode(b"", final=True))
    runs = groupby(characters, key=lambda pair: pair[1])
    return [("".join(character for character, _ in run), key) for key, run in runs]


def harmless(text: bytes) -> str:
    """Return bytes of a user's as text that is safe to show."""
    return "".join(characters for characters, _ in to_spans((byte, "prompt") for byte in text))

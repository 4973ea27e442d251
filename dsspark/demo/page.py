"""The pieces that report.html is made of: numbers, tables, figures and cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def number(value: float, form: str = ".2f") -> str:
    """Return a number, or a dash for one that does not exist."""
    return format(value, form) if value == value else "–"


def percent(value: float, form: str = ".1f") -> str:
    """Return a share in per cent."""
    return f"{number(100 * value, form)} %" if value == value else "–"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; the first cell of each row heads it."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(text)}</td>" for text in rest) + "</tr>"
        for first, *rest in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if headings else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>\n{body}\n</tbody></table></div>'


def figure(svg: str, caption: str) -> str:
    """Return a figure with its caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def figures(*figures: str) -> str:
    """Return figures side by side, as many as fit."""
    return f'<div class="figures">{"".join(figures)}</div>'


def card(value: str, name: str, meaning: str) -> str:
    """Return a card: a value, its name and what it means."""
    return (
        f'<div class="card"><strong>{escape(value)}</strong><b>{escape(name)}</b><span>{escape(meaning)}</span></div>'
    )


def flat(content: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield the leaves of nested settings as (path, text); of a list of records, such as a loss curve, its last one."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key} / ")
        elif isinstance(value, list) and value and isinstance(value[-1], dict):
            yield from flat(value[-1], f"{prefix}{key}, last of {len(value)} / ")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in value)
        else:
            yield f"{prefix}{key}", f"{value:.4g}" if isinstance(value, float) else str(value)

"""Charts of result files: bars on a logarithmic axis, and lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from docs.builder.svg import Canvas

Bar = tuple[str, float, str]
"""A name, a value, and the text at the end of its bar."""


def bars(title: str, rows: Sequence[Bar], *, start: float, styles: Sequence[int] = ()) -> str:
    """Draw values from `start` on along a logarithmic axis; one value a row.

    Args:
        title: what is shown.
        rows: name, value, text.
        start: where bars begin: 1 for ratios.
        styles: the colour of each row, 1 to 5; the first colour if empty.
    """
    left, right = 210.0, 650.0
    top = max(max(value for _, value, _ in rows), start * 2)
    scale = (right - left) / math.log10(top / start)
    canvas = Canvas(760, 44 + 28 * len(rows), title)
    canvas.text(8, 12, title, "head", anchor="start")
    for power in range(math.ceil(math.log10(start)), math.floor(math.log10(top)) + 1):
        x = left + scale * (power - math.log10(start))
        canvas.line([(x, 30), (x, 34 + 28 * len(rows))], "grid")
    for index, (name, value, text) in enumerate(rows):
        y = 44 + 28 * index
        length = max(2.0, scale * math.log10(max(value, start) / start))
        canvas.text(left - 10, y, name, anchor="end")
        canvas.rect(left, y - 9, length, 18, f"bar-{styles[index] if styles else 1}", radius=2, tip=f"{name}: {text}")
        canvas.text(left + length + 8, y, text, anchor="start")
    return canvas.svg()


def lines(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    x_name: str,
    y_range: tuple[float, float],
    show: Callable[[float], str] = lambda value: f"{value:g}",
    diagonal: bool = False,
) -> str:
    """Draw one line a series, at most five; y is written by `show`.

    Args:
        title: what is shown.
        series: a name and its points (x, y).
        x_name: of the horizontal axis.
        y_range: bottom and top.
        show: how a number of the vertical axis is written.
        diagonal: draw y = x too, the line of a perfect prediction.
    """
    canvas = Canvas(760, 300, title)
    left, right, top, bottom = 60.0, 560.0, 34.0, 256.0
    every = [x for _, points in series for x, _ in points]
    low, high = min(every), max(every)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (right - left) * ((x - low) / (high - low) if high > low else 0.5)
        return across, bottom - (bottom - top) * (y - y_range[0]) / (y_range[1] - y_range[0])

    canvas.text(8, 12, title, "head", anchor="start")
    for step in range(5):
        value = y_range[0] + step * (y_range[1] - y_range[0]) / 4
        y = place(low, value)[1]
        canvas.line([(left, y), (right, y)], "grid")
        canvas.text(left - 8, y, show(value), "small", anchor="end")
    ticks = sorted(set(every))
    for value in ticks if len(ticks) <= 16 else [low, (low + high) / 2, high]:
        canvas.text(place(value, y_range[0])[0], bottom + 16, f"{value:g}", "small")
    canvas.text((left + right) / 2, bottom + 34, x_name, "small")
    if diagonal:
        canvas.line([place(low, low), place(high, high)], "barrier")
    for index, (name, points) in enumerate(series):
        color = index % 5 + 1
        canvas.line([place(x, y) for x, y in points], f"line-{color}")
        for x, y in points:
            canvas.circle(*place(x, y), 3, f"bar-{color}", tip=f"{name}: {x:g}, {show(y)}")
        canvas.rect(right + 20, top + 22 * index + 1, 14, 10, f"bar-{color}", radius=2)
        canvas.text(right + 40, top + 22 * index + 6, name, anchor="start")
    return canvas.svg()

"""Small charts as inline SVG: colours come from the page's style sheet, so they follow light and dark; text stays text.

Every series has its own mark and dash besides its colour, and every chart a description that a screen reader speaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 44, 46
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MARK = 4.0
_CHARACTER = 6.6
"""About how wide a character of a label is."""


@dataclass(frozen=True)
class Series:
    """A named row of values; NaN leaves a gap."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What a chart says besides its data.

    Attributes:
        title: above the chart.
        description: spoken by a screen reader, after the title.
        x_label, y_label: written at the axes.
        percent: the values are shares, shown in per cent.
        y_max: the top of the axis; from the data if None.
        log_x: a logarithmic x axis.
        diagonal: draw y = x.
    """

    title: str
    description: str
    x_label: str
    y_label: str
    percent: bool = False
    y_max: float | None = None
    log_x: bool = False
    diagonal: bool = False


def nice_ticks(top: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to at least `top`, about `count` of them."""
    if not top > 0 or not math.isfinite(top):
        return [0.0, 1.0]
    rough = top / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in _STEPS if factor * magnitude >= rough * (1 - 1e-9)) * magnitude
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def _top(series: Sequence[Series], axes: Axes) -> list[float]:
    finite = [value for one in series for value in one.values if math.isfinite(value)]
    return nice_ticks(axes.y_max if axes.y_max is not None else max(finite, default=1.0))


def _label(value: float, percent: bool) -> str:
    return f"{100 * value:.3g}%" if percent else f"{value:,.4g}"


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - value / top * (HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _mark(x: float, y: float, index: int) -> str:
    """Return the mark of a series: circle, square, diamond, triangle."""
    m = _MARK
    shape = index % 4
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{m}"/>'
    if shape == 1:
        return f'<rect x="{x - m:.1f}" y="{y - m:.1f}" width="{2 * m}" height="{2 * m}"/>'
    corners = (
        [(0.0, -m - 1), (m + 1, 0.0), (0.0, m + 1), (-m - 1, 0.0)]
        if shape == 2
        else [(0.0, -m - 1), (m + 1, m), (-m - 1, m)]
    )
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}"/>'


def _legend(series: Sequence[Series]) -> list[str]:
    """Return the key along the top, in as many lines as it takes."""
    parts, x, y = [], float(_LEFT), 12.0
    for index, one in enumerate(series):
        width = 20 + _CHARACTER * len(one.name)
        if x > _LEFT and x + width > WIDTH - _RIGHT:
            x, y = float(_LEFT), y + 16
        parts.append(f'<g class="s{index}">{_mark(x + 5, y - 4, index)}</g>')
        parts.append(_text(x + 14, y, one.name, "start"))
        x += width + 8
    return parts


def _frame(axes: Axes, ticks: Sequence[float], series: Sequence[Series], marks: list[str]) -> str:
    """Return the title and the whole SVG: grid, labels, key, data."""
    grid = []
    for tick in ticks:
        y = _y(tick, ticks[-1])
        grid.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(_text(_LEFT - 7, y + 4, _label(tick, axes.percent), "end"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    labels = [
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, axes.x_label, extra=' class="axis"'),
        _text(12, middle, axes.y_label, extra=f' class="axis" transform="rotate(-90 12 {middle:.1f})"'),
    ]
    body = "\n".join((*grid, *labels, *_legend(series), *marks))
    return (
        f"<b>{escape(axes.title)}</b>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{axes.title}. {axes.description}")}">\n'
        f"{body}\n</svg>"
    )


def _x_positions(x: Sequence[float], log: bool) -> list[float]:
    places = [math.log2(value) for value in x] if log else list(x)
    low, span = min(places), (max(places) - min(places)) or 1.0
    room = WIDTH - _RIGHT - _LEFT - 24
    return [_LEFT + 12 + (place - low) / span * room for place in places]


def line_chart(
    axes: Axes, x: Sequence[float], series: Sequence[Series], tick_labels: Sequence[str] | None = None
) -> str:
    """Return a chart of lines with marks.

    Args:
        axes: title, labels and scales.
        x: where the values stand, increasing.
        series: one value for each x.
        tick_labels: below each x; "" for none; the number itself if None.
    """
    ticks = _top(series, axes)
    places = _x_positions(x, axes.log_x)
    parts = []
    if axes.diagonal:
        ends = [(places[0], x[0]), (places[-1], x[-1])]
        (x1, v1), (x2, v2) = ends
        parts.append(
            f'<line class="diagonal" x1="{x1:.1f}" y1="{_y(v1, ticks[-1]):.1f}" x2="{x2:.1f}" y2="{_y(v2, ticks[-1]):.1f}"/>'
        )
    for place, value, text in zip(places, x, tick_labels or [f"{value:g}" for value in x], strict=True):
        parts.append(_text(place, HEIGHT - _BOTTOM + 17, text))
    for index, one in enumerate(series):
        points = [
            (place, _y(value, ticks[-1]))
            for place, value in zip(places, one.values, strict=True)
            if math.isfinite(value)
        ]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<g class="s{index}"><polyline points="{path}"/>')
        parts.extend(_mark(px, py, index) for px, py in points)
        parts.append("</g>")
    return _frame(axes, ticks, series, parts)


def bar_chart(axes: Axes, groups: Sequence[str], series: Sequence[Series], numbers: bool = True) -> str:
    """Return a chart of bars side by side.

    Args:
        axes: title, labels and scales.
        groups: below each group of bars.
        series: one value for each group.
        numbers: write each value above its bar.
    """
    ticks = _top(series, axes)
    room = (WIDTH - _LEFT - _RIGHT) / len(groups)
    width = min(0.8 * room / len(series), 46)
    parts = []
    for position, group in enumerate(groups):
        middle = _LEFT + room * (position + 0.5)
        parts.append(_text(middle, HEIGHT - _BOTTOM + 17, group))
        for index, one in enumerate(series):
            value = one.values[position]
            if not math.isfinite(value):
                continue
            left, y = middle + width * (index - len(series) / 2), _y(value, ticks[-1])
            parts.append(
                f'<g class="s{index}"><rect x="{left + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" '
                f'height="{HEIGHT - _BOTTOM - y:.1f}"/></g>'
            )
            if numbers:
                parts.append(
                    _text(left + width / 2, y - 4, _label(value, axes.percent) if axes.percent else f"{value:.2f}")
                )
    return _frame(axes, ticks, series, parts)

"""The demo's charts: ticks, bars and lines in the right places."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from dsspark.demo.figures import HEIGHT, WIDTH, Axes, Series, bar_chart, line_chart, nice_ticks

AXES = Axes(title="<T>", description="D & d", x_label="x", y_label="y")


def svg_of(text):
    return ElementTree.fromstring(text[text.index("<svg") :])


@pytest.mark.parametrize("top", [0.013, 0.5, 1.0, 5.14, 8.0, 37.0, 12345.0])
def test_ticks_are_few_round_and_reach_the_top(top):
    ticks = nice_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top * (1 - 1e-9) > ticks[-2]
    assert 3 <= len(ticks) <= 7


@pytest.mark.parametrize("top", [0.0, -1.0, math.nan, math.inf])
def test_ticks_of_nothing_are_a_unit_axis(top):
    assert nice_ticks(top) == [0.0, 1.0]


def test_bars_are_as_high_as_their_values_and_a_missing_one_is_left_out():
    root = svg_of(bar_chart(AXES, ["a", "b"], [Series("s", [1.0, 2.0]), Series("t", [4.0, math.nan])]))
    bars = [g.find("rect") for g in root.iter("g") if g.find("rect") is not None and len(g) == 1]
    heights = [float(bar.get("height")) for bar in bars if float(bar.get("height")) > 9]
    assert len(heights) == 3
    assert heights[0] * 4 == pytest.approx(heights[1], rel=0.01)
    assert heights[0] * 2 == pytest.approx(heights[2], rel=0.01)


def test_lines_rise_with_their_values_inside_the_frame():
    root = svg_of(line_chart(AXES, [1, 2, 4], [Series("s", [0.0, 1.0, 3.0]), Series("gap", [1.0, math.nan, 2.0])]))
    lines = [[tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in root.iter("polyline")]
    assert [len(line) for line in lines] == [3, 2]
    xs, ys = zip(*lines[0], strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys, reverse=True)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in lines for x, y in line)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "<T>. D & d"

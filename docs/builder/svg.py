"""A small canvas for the diagrams: shapes with style names, whose colours are in `docs/_static/dsspark.css`, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]


class Canvas:
    """An SVG that grows by calls; every size is in pixels of its full width.

    Args:
        width: of the drawing.
        height: of the drawing.
        title: what the drawing shows, for those who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, *, radius: float = 4, tip: str = ""
    ) -> None:
        """Draw a box."""
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius}"'
        self._parts.append(f'<rect {shape} class="{style}">{f"<title>{escape(tip)}</title>" if tip else ""}</rect>')

    def text(self, x: float, y: float, text: str, style: str = "label", *, anchor: str = "middle") -> None:
        """Write a line of text; y is its middle."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central"'
        self._parts.append(f'<text {place} class="{style}">{escape(text)}</text>')

    def block(self, x: float, y: float, lines: Sequence[str], style: str = "label", *, anchor: str = "middle") -> None:
        """Write lines of text, 16 pixels apart, around the height y."""
        for index, line in enumerate(lines):
            self.text(x, y + 16 * (index - (len(lines) - 1) / 2), line, style, anchor=anchor)

    def line(self, points: Sequence[Point], style: str = "stroke", *, arrow: bool = False) -> None:
        """Draw straight lines from point to point, with a head at the last one."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{style}"{self._marker(arrow)}/>')

    def curve(self, start: Point, end: Point, style: str, *, width: float = 1.5, arrow: bool = False) -> None:
        """Draw a curve that leaves and arrives horizontally."""
        middle = (start[0] + end[0]) / 2
        path = f"M{start[0]:.1f},{start[1]:.1f} C{middle:.1f},{start[1]:.1f} {middle:.1f},{end[1]:.1f} {end[0]:.1f},{end[1]:.1f}"
        self._parts.append(f'<path d="{path}" class="{style}" stroke-width="{width:.2f}"{self._marker(arrow)}/>')

    def polygon(self, points: Sequence[Point], style: str) -> None:
        """Draw a filled shape."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" class="{style}"/>')

    def circle(self, x: float, y: float, radius: float, style: str, *, tip: str = "") -> None:
        """Draw a dot."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{style}">{title}</circle>')

    def _marker(self, arrow: bool) -> str:
        return ' marker-end="url(#arrow)"' if arrow else ""

    def svg(self) -> str:
        """Return the drawing as an element of a page."""
        head = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        head += '<path d="M0,0 L8,4 L0,8 z" class="arrowhead"/></marker>'
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" style="max-width:{self.width:g}px"'
        name = f"<title>{escape(self.title)}</title><defs>{head}</defs>"
        open_tag = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" {size}>'
        return f"{open_tag}{name}{''.join(self._parts)}</svg>"


def in_bytes(count: float) -> str:
    """Return a number of bytes for people: 16.8 MB is 16,800,000 bytes."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"

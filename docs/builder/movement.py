"""What each kernel moves, as bands whose width is their bytes: drawn from `benchmarks/results/movement.json`."""

from __future__ import annotations

from typing import Any

from docs.builder.svg import Canvas, in_bytes

NAMES = {
    "base": "U",
    "latent": "latents",
    "w1": "W₁",
    "w2": "W₂",
    "logits": "logits",
    "draft_logits": "logits of the draft",
    "hidden": "h",
    "keys": "keys",
    "values": "values",
    "query": "queries",
    "out": "results",
    "tops": "maxima a chunk",
    "totals": "sums a chunk",
    "first": "sums a chunk",
    "second": "sums a chunk (2)",
    "sums": "bins",
}
"""Arguments of kernels that have a shorter or a clearer name on paper."""
SMALL = 0.002
"""Bands below this share of all bytes are drawn together."""
Band = tuple[str, float]


def _bands(moved: dict[str, int], whole: float) -> list[Band]:
    """Return names and bytes, largest first; what is small is one band."""
    ranked = sorted(moved.items(), key=lambda item: -item[1])
    kept = [(NAMES.get(name, name), float(count)) for name, count in ranked if count >= SMALL * whole]
    rest = [count for _, count in ranked if count < SMALL * whole]
    if len(rest) == 1:
        kept.append((NAMES.get(ranked[-1][0], ranked[-1][0]), float(rest[0])))
    elif rest:
        kept.append((f"{len(rest)} small ones", float(sum(rest))))
    return kept


def movement(task: dict[str, Any]) -> str:
    """Draw a record of `benchmarks.movement`: what is read on the left, the kernels in order, what is written on the right."""
    launches: dict[str, dict[str, Any]] = task["launches"]
    whole = float(task["moved"])
    thickest = max(max(entry[side].values(), default=0) for entry in launches.values() for side in ("read", "written"))
    scale = 46.0 / thickest
    places, y = [], 52.0
    for kernel, entry in launches.items():
        sides = [_bands(entry[side], whole) for side in ("read", "written")]
        height = max(_height(bands, scale) for bands in sides)
        places.append((kernel, entry["launches"], sides, y, max(height, 44.0)))
        y += max(height, 44.0) + 22
    canvas = Canvas(800, y + 24, "What the kernels read and write")
    for x, text, anchor in ((230.0, "read", "end"), (400.0, "kernel", "middle"), (570.0, "written", "start")):
        canvas.text(x, 16, text, "head", anchor=anchor)
    for kernel, count, (read, written), top, height in places:
        canvas.rect(310, top, 180, height, "box", radius=8)
        canvas.block(400, top + height / 2, [kernel, f"{count} launch{'es' if count > 1 else ''}"])
        _side(canvas, read, top, height, scale, 310, 240, "flow-in")
        _side(canvas, written, top, height, scale, 490, 560, "flow-out")
    floor = task["floor"]
    text = f"{in_bytes(whole)} moved by kernels; {in_bytes(floor)} have to move: {whole / floor:.2f} times the floor ({task['size']})"
    canvas.text(400, y + 6, text, "strong")
    return canvas.svg()


def _height(bands: list[Band], scale: float) -> float:
    return sum(max(20.0, count * scale + 4) for _, count in bands)


def _side(
    canvas: Canvas, bands: list[Band], top: float, height: float, scale: float, edge: float, outer: float, style: str
) -> None:
    """Draw the bands of one side of a kernel, from its edge outwards, each with its name and bytes."""
    y = top + (height - _height(bands, scale)) / 2
    outwards = 8 if outer > edge else -8
    for name, count in bands:
        room, width = max(20.0, count * scale + 4), max(1.5, count * scale)
        canvas.rect(min(edge, outer), y + (room - width) / 2, abs(outer - edge), width, style, radius=0)
        anchor = "start" if outer > edge else "end"
        canvas.text(outer + outwards, y + room / 2, f"{name}  {in_bytes(count)}", anchor=anchor)
        y += room

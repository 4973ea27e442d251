"""The pictures of the cycle, of ragged packing, of the two-level draw and of the causal barrier.

Each draws what the code really returns: a round of the shipped models, `dsspark.pack`, the draw of the reference, a delayed scheduler.
"""

from __future__ import annotations

import itertools

import torch

import dsspark
from docs.builder.example import character, example_round
from docs.builder.svg import Canvas
from dsspark.reference.sampling import sample_two_level

STEPS = (
    ("1 draft", ("backbone,", "Markov head"), "tokens, q [R, γ]"),
    ("2 survival", ("confidence", "head, STS"), "a [R, γ]"),
    ("3 schedule", ("Algorithm 1 or", "delayed"), "lengths [R]"),
    ("4 pack, run", ("the target,", "one ragged pass"), "p [N, V]"),
    ("5 verify", ("accept, resample", "or bonus"), "tokens [R, γ+1]"),
)


def cycle() -> str:
    """Draw the five steps as a loop, and one real round of three requests below it."""
    width, box, gap = 800, 132, 30
    canvas = Canvas(width, 372, "The decoding cycle: draft, survival, schedule, pack and run the target, verify")
    for index, (name, lines, result) in enumerate(STEPS):
        x = 5 + index * (box + gap)
        canvas.rect(x, 20, box, 84, f"fill-{index % 4 + 1}", radius=8)
        canvas.text(x + box / 2, 40, name, "head")
        canvas.block(x + box / 2, 72, lines)
        canvas.text(x + box / 2, 118, result, "small mono")
        if index:
            canvas.line([(x - gap + 2, 62), (x - 3, 62)], arrow=True)
    last, first = 5 + 4 * (box + gap) + box / 2, 5 + box / 2
    canvas.line([(last, 130), (last, 148), (first, 148), (first, 130)], arrow=True)
    canvas.text(
        width / 2, 148 + 13, "the last emitted token is the next anchor; both caches are rolled back to it", "small"
    )
    _round_rows(canvas, 200)
    return canvas.svg()


def _round_rows(canvas: Canvas, top: float) -> None:
    """Draw the drafts of each request with their survival, and what became of them."""
    shown = example_round()
    report, tokens = shown.report, shown.report.proposal.draft.tokens
    canvas.text(8, top, "One round of the shipped models, survival below each draft:", "head", anchor="start")
    cell = 54
    for r, (anchor, length) in enumerate(zip(shown.anchors.tolist(), report.lengths.tolist(), strict=True)):
        y = top + 18 + 50 * r
        accepted = int(report.verification.num_accepted[r])
        canvas.rect(8, y, 40, 24, "fill-5")
        canvas.text(28, y + 12, character(anchor), "mono")
        for k, token in enumerate(tokens[r].tolist()):
            x = 60 + k * cell
            style = "empty" if k >= length else "fill-3" if k < accepted else "fill-bad" if k == accepted else "box"
            canvas.rect(x, y, 40, 24, style)
            canvas.text(x + 20, y + 12, character(token), "mono" if k < length else "small mono")
            canvas.text(x + 20, y + 34, f"{float(report.survival[r, k]):.2f}", "small")
        emitted = [character(token) for token in report.verification.tokens[r, : accepted + 1].tolist()]
        x = 60 + tokens.shape[1] * cell + 16
        canvas.line([(x - 8, y + 12), (x + 22, y + 12)], arrow=True)
        for k, text in enumerate(emitted):
            last = k == accepted
            style = ("fill-1" if accepted == length else "fill-2") if last else "fill-3"
            canvas.rect(x + 30 + 30 * k, y, 26, 24, style)
            canvas.text(x + 43 + 30 * k, y + 12, text, "mono")


def packing() -> str:
    """Draw the verified drafts of the round as rows, and the flat batch they become."""
    shown = example_round()
    batch, lengths = shown.batch, shown.report.lengths.tolist()
    rows, block = len(lengths), shown.report.proposal.draft.tokens.shape[1]
    count = int(batch.num_tokens)
    cell = 42
    width = max(96 + cell * count, 96 + cell * (block + 1) + 230) + 10
    canvas = Canvas(width, 36 * rows + 178, f"Ragged packing: {rows} requests become one batch of {count} tokens")
    for r, length in enumerate(lengths):
        y = 12 + 36 * r
        canvas.text(8, y + 13, f"request {r}", anchor="start")
        for k in range(block + 1):
            style = f"fill-{r % 4 + 1}" if k <= length else "empty"
            canvas.rect(96 + cell * k, y, cell - 6, 26, style)
            if k <= length:
                token = int(batch.tokens[int(batch.cu_seqlens[r]) + k])
                canvas.text(96 + cell * k + (cell - 6) / 2, y + 13, character(token), "mono")
        note = f"anchor and {length} of {block} drafts"
        canvas.text(96 + cell * (block + 1) + 8, y + 13, note, "small", anchor="start")
    top = 36 * rows + 44
    middle = 96 + cell * min(count, block) / 2
    canvas.line([(middle, 36 * rows + 12), (middle, top - 6)], arrow=True)
    note = f"pack: {count} rows instead of {rows * (block + 1)} of a padded batch"
    canvas.text(middle + 14, 36 * rows + 24, note, "small", anchor="start")
    for name, values, y in (
        ("tokens", [character(token) for token in batch.tokens.tolist()], top),
        ("request_ids", batch.request_ids.tolist(), top + 40),
        ("positions", batch.positions.tolist(), top + 66),
    ):
        canvas.text(8, y + 13, name, "mono small", anchor="start")
        for i, value in enumerate(values):
            x = 96 + cell * i
            if name == "tokens":
                canvas.rect(x, y, cell - 6, 26, f"fill-{int(batch.request_ids[i]) % 4 + 1}")
            canvas.text(x + (cell - 6) / 2, y + 13, str(value), "mono" if name == "tokens" else "small mono")
    canvas.text(8, top + 112, "cu_seqlens", "mono small", anchor="start")
    for start in batch.cu_seqlens.tolist():
        x = 93 + cell * start
        canvas.line([(x, top - 4), (x, top + 100)], "grid")
        canvas.text(x, top + 112, str(start), "small mono")
    return canvas.svg()


WEIGHTS = (2, 1, 3, 1, 1, 4, 2, 1, 6, 3, 2, 5, 1, 1, 2, 1)
CELL, UNIFORMS = 4, (0.55, 0.40)


def sampling() -> str:
    """Draw the two comparisons of a draw: which cell, then which token of it; the answer is the reference's."""
    weights = torch.tensor([WEIGHTS], dtype=torch.float32)
    token = int(sample_two_level(weights, torch.tensor([UNIFORMS]), cell=CELL))
    masses = [sum(WEIGHTS[i : i + CELL]) for i in range(0, len(WEIGHTS), CELL)]
    chosen = token // CELL
    inside = WEIGHTS[chosen * CELL : (chosen + 1) * CELL]
    canvas = Canvas(760, 262, "The two-level draw: one number picks a cell, another a token in it")
    x0, length = 20.0, 720.0
    edges = [x0 + length * mass / sum(masses) for mass in itertools.accumulate(masses, initial=0)]
    canvas.text(x0, 14, f"{len(WEIGHTS)} weights in cells of {CELL}; u₀ picks the cell", "head", anchor="start")
    _intervals(canvas, 46, edges, [f"cell {c}: {mass}" for c, mass in enumerate(masses)], chosen, UNIFORMS[0], "u₀")
    inner = [x0 + length * mass / sum(inside) for mass in itertools.accumulate(inside, initial=0)]
    canvas.line([(edges[chosen], 88), (x0, 190)], "grid")
    canvas.line([(edges[chosen + 1], 88), (x0 + length, 190)], "grid")
    labels = [f"token {chosen * CELL + i}: {weight}" for i, weight in enumerate(inside)]
    canvas.text(x0 + length / 2, 138, "only this cell is looked at; u₁ picks the token", "head")
    _intervals(canvas, 190, inner, labels, token % CELL, UNIFORMS[1], "u₁")
    canvas.text(
        x0 + length / 2, 250, f"token {token}: the first whose running mass exceeds u₁ times the cell's", "small"
    )
    return canvas.svg()


def _intervals(
    canvas: Canvas, y: float, edges: list[float], labels: list[str], chosen: int, uniform: float, name: str
) -> None:
    for index, label in enumerate(labels):
        left, right = edges[index], edges[index + 1]
        canvas.rect(left, y, right - left, 42, "fill-3" if index == chosen else "box", radius=0)
        if right - left > 90:
            canvas.text((left + right) / 2, y + 21, label)
        else:
            canvas.text((left + right) / 2, y + 21, label.split(": ")[1], "small")
    x = edges[0] + uniform * (edges[-1] - edges[0])
    canvas.line([(x, y - 16), (x, y + 40)], "line-2", arrow=False)
    canvas.text(x + 6, y - 10, f"{name} = {uniform:.2f}", "ink-2", anchor="start")


SURVIVALS = ((0.9, 0.8), (0.9, 0.8), (0.3, 0.1), (0.9, 0.8), (0.2, 0.1), (0.9, 0.7))
"""Of one request, step by step: what the delayed scheduler of the picture sees."""


def barrier() -> str:
    """Draw six steps of a delayed scheduler: each budget comes from two steps before, across the barrier."""
    scheduler = dsspark.DelayedScheduler(
        dsspark.CostTable.from_points([1, 2, 3], [1.0, 1.3, 1.7]), block_size=2, delay=2
    )
    lengths = [int(scheduler.step(torch.tensor([survival]), ["request"])) for survival in SURVIVALS]
    step, left = 118, 96
    canvas = Canvas(
        left + step * len(SURVIVALS) + 4,
        330,
        "The causal barrier: a budget is planned from survivals of two steps before",
    )
    for y, text in ((58, "drafted"), (128, "survival a"), (210, "lengths")):
        canvas.text(8, y, text, "head", anchor="start")
    for t, (survival, length) in enumerate(zip(SURVIVALS, lengths, strict=True)):
        x = left + step * t
        canvas.text(x + step / 2 - 8, 18, f"step {t}", "head")
        canvas.rect(x, 40, step - 18, 36, "fill-1", radius=6)
        canvas.text(x + (step - 18) / 2, 58, "x₁ x₂", "mono")
        canvas.rect(x, 110, step - 18, 36, "fill-3", radius=6)
        canvas.text(x + (step - 18) / 2, 128, f"{survival[0]:.1f}, {survival[1]:.1f}", "mono")
        canvas.line([(x + (step - 18) / 2, 77), (x + (step - 18) / 2, 107)], arrow=True)
        canvas.rect(x, 192, step - 18, 36, "fill-4", radius=6)
        canvas.text(x + (step - 18) / 2, 210, f"{length} of 2", "mono")
        canvas.line([(x + (step - 18) / 2, 147), (x + (step - 18) / 2, 189)], arrow=True)
        if t >= scheduler.delay:
            past = x - scheduler.delay * step
            canvas.curve((past + step - 18, 134), (x - 1, 206), "line-2", width=2, arrow=True)
    own = left + step * (len(SURVIVALS) - 1)
    canvas.rect(own - 7, 31, step - 4, 122, "ring", radius=9)
    for y, text in (
        (262, "the budget K: a global search over survivals of two steps before; no record counts as 1"),
        (286, "who gets the K places: the current survivals, in a fixed order, and nothing else"),
        (310, "the barrier: nothing that follows from the tokens of a step may set its budget"),
    ):
        canvas.text(left + 60, y, text, "small", anchor="start")
    canvas.curve((left, 262), (left + 50, 262), "line-2", width=2, arrow=True)
    canvas.line([(left, 286), (left + 48, 286)], arrow=True)
    canvas.line([(left, 310), (left + 48, 310)], "barrier")
    return canvas.svg()

"""The demo's terminal: text as it is decoded, progress bars, and the findings as tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dsspark.demo.measure import Calibration
from dsspark.demo.results import Results, mean
from dsspark.demo.text import END_MARK, Kind, Piece, harmless, to_spans
from dsspark.demo.transcripts import Transcript

STYLES: dict[Kind, str] = {
    "accepted": "green",
    "corrected": "bold underline red",
    "bonus": "bold blue",
    "target": "",
    "prompt": "dim",
}
_MOST_PROMPT = 320
_REFRESH = 12


def legend() -> Text:
    """Return what the colours mean."""
    return Text.assemble(
        ("accepted", STYLES["accepted"]),
        " draft   ",
        ("corrected", STYLES["corrected"]),
        " by the target   ",
        ("bonus", STYLES["bonus"]),
        " token   ",
        f"{END_MARK} end of text",
    )


def styled(pieces: list[Piece]) -> Text:
    """Return the text of the tokens in their colours; markup in it stays text."""
    text = Text(overflow="fold")
    for characters, kind in to_spans(pieces):
        text.append(characters, STYLES[kind])
    return text


def transcript_view(transcript: Transcript) -> Group:
    """Return the prompt, and below it both texts side by side."""
    prompt = harmless(transcript.prompt.text)
    prompt = f"…{prompt[-_MOST_PROMPT:]}" if len(prompt) > _MOST_PROMPT else prompt
    table = Table(expand=True, show_lines=False)
    table.add_column("with the DSpark drafter", ratio=1, overflow="fold")
    table.add_column("the target alone", ratio=1, overflow="fold")
    table.add_row(styled(transcript.drafted), styled(transcript.alone))
    if transcript.drafted_rounds:
        count, alone = len(transcript.drafted), len(transcript.alone)
        table.add_section()
        left = f"{count} bytes in {transcript.drafted_rounds} passes of the target"
        right = f"{alone} bytes in {alone} passes of the target"
        if transcript.alone_seconds:
            left += f", {count / transcript.drafted_seconds:.0f} bytes/s"
            right += f", {alone / transcript.alone_seconds:.0f} bytes/s"
        table.add_row(Text(left, "italic"), Text(right, "italic") if alone else "")
    body = Text(prompt, STYLES["prompt"], overflow="fold")
    return Group(Panel(body, title=Text(transcript.prompt.title), title_align="left"), table)


@contextmanager
def live_transcript(console: Console) -> Iterator[Callable[[Transcript], None]]:
    """Show a transcript while it grows; where there is no terminal, once at its end."""
    latest: list[Transcript] = []
    if not console.is_terminal:
        yield lambda transcript: latest.__setitem__(slice(None), [transcript])
        if latest:
            console.print(transcript_view(latest[0]))
        return
    with Live(console=console, refresh_per_second=_REFRESH) as live:

        def update(transcript: Transcript) -> None:
            latest[:] = [transcript]
            live.update(transcript_view(transcript))

        yield update
        if latest:
            live.update(transcript_view(latest[0]))


class Stages:
    """The long parts, each with a bar; where there is no terminal, one line when it is done."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def stage(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that advances the bar."""
        start = time.perf_counter()
        columns = (TextColumn("{task.description:<44}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(text, total=total)
            yield lambda count: progress.advance(task, count)
        self.console.print(Text(f"{text:<56} {time.perf_counter() - start:5.1f} s", "dim"))


def _number(value: float, form: str = ".2f") -> str:
    return format(value, form) if value == value else "–"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, show_header=any(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    return table


def findings(results: Results) -> Group:
    """Return the tables of what was measured."""
    parts = [_tokens(results), _acceptance(results)]
    if results.calibration is not None:
        parts.append(_calibration(results.calibration))
    return Group(*parts, _schedule(results), _speed(results), _losslessness(results))


def _tokens(results: Results) -> Table:
    table = _table("Tokens a round: 1 + accepted drafts", "", "Markov head", "parallel only", "gain", "rounds")
    parallel = {**results.rounds_parallel_only.by_domain, "all": results.rounds_parallel_only.total}
    for name, statistics in {**results.rounds.by_domain, "all": results.rounds.total}.items():
        ours, theirs = statistics.tokens_per_round, parallel[name].tokens_per_round
        table.add_row(name, _number(ours), _number(theirs), _number(ours / theirs - 1, "+.0%"), str(statistics.rounds))
    return table


def _acceptance(results: Results) -> Table:
    total, parallel = results.rounds.total, results.rounds_parallel_only.total
    positions = [str(k + 1) for k in range(total.block_size)]
    table = _table("Acceptance by draft position (%)", "", *positions)
    for name, values in (
        ("given its prefix, Markov", total.conditional_acceptance),
        ("given its prefix, parallel", parallel.conditional_acceptance),
        ("whole prefix, Markov", total.cumulative_acceptance),
        ("whole prefix, parallel", parallel.cumulative_acceptance),
    ):
        table.add_row(name, *(_number(100 * value, ".0f") for value in values))
    return table


def _calibration(found: Calibration) -> Table:
    table = _table(
        "Calibration error of the survival (ECE, %)", "", *map(str, range(1, len(found.ece_after) + 1)), "mean"
    )
    for name, values in (
        ("before STS", found.ece_before),
        ("after STS", found.ece_after),
        ("a perfect head here", found.noise_floor),
    ):
        table.add_row(name, *(_number(100 * value, ".1f") for value in [*values, mean(values)]))
    return table


def _schedule(results: Results) -> Table:
    table = _table("What the schedulers verify: 1 + l", "requests", "Algorithm 1", "delayed")
    for point in results.sweep:
        table.add_row(str(point.num_requests), *(_number(budget) for budget in point.budgets.values()))
    return table


def _speed(results: Results) -> Table:
    table = _table("Wall-clock, one request at a time", "", "drafted", "alone", "ratio")
    for speed in results.speeds:
        name = f"temperature {speed.temperature:g}, {speed.policy}"
        table.add_row(name, f"{speed.drafted:.0f}/s", f"{speed.alone:.0f}/s", f"{speed.median:.2f}x")
    return table


def _losslessness(results: Results) -> Table:
    greedy, law = results.greedy, results.law
    same = f"{greedy.prompts - greedy.different} of {greedy.prompts} prompts"
    table = _table("Losslessness", "", "")
    table.add_row("greedy text equals the target's own", same)
    table.add_row(
        f"largest law error over {law.rows} real rows", f"{law.max_law_error:.1e} = {law.max_law_error_in_eps:.2f} eps"
    )
    table.add_row("largest threshold error", f"{law.max_threshold_ulps:.2f} ulps")
    return table

"""The directives of the pages: {trail}, {diagram}, {chart}, {recorded}, {measured}, {gpu-status} and {evaluation}."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from docs.builder import charts, diagrams, results, sources
from docs.builder.movement import movement

DIAGRAMS: dict[str, Callable[[], str]] = {
    "cycle": diagrams.cycle,
    "packing": diagrams.packing,
    "sampling": diagrams.sampling,
    "barrier": diagrams.barrier,
}
STEPS = ("reference", "kernel", "law", "measured")
"""Where a trail leads from its equation, in order."""


def figure(svg: str, caption: str = "", identity: str = "") -> nodes.Node:
    """Return a drawing as part of the page, so that it takes the page's colours; `identity` is what links name."""
    text = f"<figcaption>{caption}</figcaption>" if caption else ""
    name = f' id="{identity}"' if identity else ""
    return nodes.raw("", f'<figure class="diagram"{name}>{svg}{text}</figure>', format="html")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


CHARTS: dict[str, Callable[[], str]] = {
    **{
        f"acceptance-{domain}": lambda domain=domain: charts.lines(
            f"Acceptance given the accepted prefix, {domain}",
            results.acceptance(domain),
            x_name="draft position",
            y_range=(0.0, 1.0),
            show=_percent,
        )
        for domain in ("math", "code", "chat")
    },
    "budget": lambda: charts.lines(
        "Simulated budget 1 + l, V4-Flash-like",
        results.budgets(),
        x_name="doublings of the number of requests",
        y_range=(1.0, 6.0),
    ),
}
TABLES: dict[str, Callable[[], str]] = {
    "tokens a round": results.rounds_table,
    "calibration": results.calibration_table,
    "training": results.training_table,
    "effects": results.effects_table,
    "smollm2 rounds": results.smollm2_rounds_table,
    "smollm2 training": results.smollm2_training_table,
    "smollm2 speed": results.smollm2_speed_table,
}


class Trail(SphinxDirective):
    """From the equation above to its lines, its kernel, the test of its law and its measured figure."""

    option_spec: ClassVar[dict[str, Any]] = dict.fromkeys(STEPS, directives.unchanged_required)

    def run(self) -> list[nodes.Node]:
        """Return one list of links; a step that is missing is an error."""
        missing = [step for step in STEPS if step not in self.options]
        if missing:
            raise self.error(f"trail: no {', '.join(missing)}; an equation leads to all of {', '.join(STEPS)}")
        items = nodes.bullet_list(classes=["trail"])
        for step in STEPS:
            paragraph = nodes.paragraph("", "", nodes.inline(step, step, classes=["step"]))
            for target in self.options[step].split():
                by_task = step == "measured" and "::" not in target
                paragraph += self._measured(target) if by_task else self._source(target)
                paragraph += nodes.Text(" ")
            items += nodes.list_item("", paragraph)
        return [items]

    def _source(self, target: str) -> nodes.Node:
        return sources.link(self.env, target, target.partition("::")[2] or Path(target).name, self.get_location())

    def _measured(self, target: str) -> nodes.Node:
        """Return the link to the figures of a task, "task" on this page or "page:task"; a test that counts is a source."""
        page, _, task = target.rpartition(":")
        page = page or self.env.docname
        if page not in self.env.found_docs:
            raise self.error(f"trail: there is no page {page}")
        address = f"{self.env.app.builder.get_relative_uri(self.env.docname, page)}#{results.identity(task)}"
        return nodes.reference("", "bytes and times", internal=True, refuri=address)


class Diagram(SphinxDirective):
    """{diagram} NAME, or {diagram} movement TASK: a drawing; the content is its caption."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        name, _, task = self.arguments[0].partition(" ")
        caption = " ".join(self.content)
        if name in DIAGRAMS:
            return [figure(DIAGRAMS[name](), caption)]
        recorded = results.load(results.RESULTS / "movement.json")["tasks"]
        if name != "movement" or task not in recorded:
            raise self.error(
                f"diagram: got {self.arguments[0]!r}, expected {', '.join(DIAGRAMS)} or movement {recorded.keys()}"
            )
        return [figure(movement(recorded[task]), caption)]


class Chart(SphinxDirective):
    """{chart} NAME: lines from a committed file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the chart."""
        if self.arguments[0] not in CHARTS:
            raise self.error(f"chart: got {self.arguments[0]!r}, expected one of {', '.join(CHARTS)}")
        return [figure(CHARTS[self.arguments[0]]())]


class Recorded(SphinxDirective):
    """{recorded} NAME: a table from a committed file."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        if self.arguments[0] not in TABLES:
            raise self.error(f"recorded: got {self.arguments[0]!r}, expected one of {', '.join(TABLES)}")
        return list(self.parse_text_to_nodes(TABLES[self.arguments[0]]()))


class Measured(SphinxDirective):
    """{measured} TASK; TASK; ...: bytes of every contender, times on a processor, and on a GPU where there are any."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return figures and tables; a task that no file knows is an error."""
        tasks = [task.strip() for task in self.arguments[0].split(";")]
        found: list[nodes.Node] = []
        for task in tasks:
            bars = results.traffic_bars(task)
            if not bars:
                raise self.error(f"measured: traffic.json has no task {task!r}")
            colors = [{"kernel": 3, "reference": 1}.get(name, 5) for name, _, _ in bars]
            title = f"{task}: bytes moved over the fewest that have to move"
            found.append(figure(charts.bars(title, bars, start=1.0, styles=colors), identity=results.identity(task)))
        facts = results.described(results.load(results.RESULTS / "traffic.json")["provenance"])
        text = f"Counted, not timed, in Triton's interpreter ({facts}); how, and the sizes: {{doc}}`/benchmarks`."
        return [*found, *self.parse_text_to_nodes("\n\n".join([text, self._cpu(tasks), self._gpu(tasks)]))]

    def _tables(self, file: results.Record, tasks: list[str]) -> str:
        tables = [(task, results.times_table(file, task)) for task in tasks]
        return "\n\n".join(f"*{task}*\n\n{table}" for task, table in tables if table)

    def _cpu(self, tasks: list[str]) -> str:
        file = results.benchmarks(gpu=False)
        tables = "" if file is None else self._tables(file, tasks)
        if file is None or not tables:
            return "No time on a processor is recorded."
        return f"**On a processor** ({results.described(file['provenance'])}), references and eager forms:\n\n{tables}"

    def _gpu(self, tasks: list[str]) -> str:
        file = results.benchmarks(gpu=True)
        tables = "" if file is None else self._tables(file, tasks)
        if file is None or not tables:
            return f"**{results.NOT_YET}**: {{doc}}`/gpu` says how."
        return f"**On a GPU** ({results.described(file['provenance'])}):\n\n{tables}"


class GpuStatus(SphinxDirective):
    """{gpu-status}: the newest result file of a GPU, or that there is none."""

    def run(self) -> list[nodes.Node]:
        """Return one line."""
        file = results.benchmarks(gpu=True)
        text = (
            f"**{results.NOT_YET}**: no such file is committed."
            if file is None
            else results.described(file["provenance"])
        )
        return list(self.parse_text_to_nodes(text))


class Evaluation(SphinxDirective):
    """{evaluation}: the pages of `python -m dsspark evaluate` and `experiments`, or one line that says they have not run."""

    def run(self) -> list[nodes.Node]:
        """Return the pages with their headings turned into bold lines."""
        pages = results.evaluation_pages()
        for page in pages:
            self.env.note_dependency(str(page))
        none = "No result of `python -m dsspark evaluate` or `python -m dsspark experiments` is committed yet."
        return list(self.parse_text_to_nodes("\n\n".join(map(results.included, pages)) or none))


def setup(app: Any) -> None:
    """Register the directives."""
    for name, directive in (
        ("trail", Trail),
        ("diagram", Diagram),
        ("chart", Chart),
        ("recorded", Recorded),
        ("measured", Measured),
        ("gpu-status", GpuStatus),
        ("evaluation", Evaluation),
    ):
        app.add_directive(name, directive)

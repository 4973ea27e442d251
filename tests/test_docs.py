"""The pages say what the code does: every link lands on lines that exist, and every equation leads to its law and its figure."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from sphinx.errors import SphinxError

from docs.builder import charts, results
from docs.builder.directives import CHARTS, DIAGRAMS, TABLES
from docs.builder.links import broken_links, check
from docs.builder.movement import SMALL, movement
from docs.builder.sources import lines_of, listing, objects
from docs.builder.svg import in_bytes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md")) + sorted((DOCS / "components").glob("*.md"))
COMPONENTS = sorted((DOCS / "components").glob("*.md"))
HEADINGS = ["Equation", "Reference", "Kernel", "Properties", "Measured", "Limits"]
TRAIL = re.compile(r"^```\{trail\}\n(.*?)^```", re.DOTALL | re.MULTILINE)
SOURCE = re.compile(r"\{src\}`(?:[^`<]*<)?([^`>]+)>?`")


def trails(text):
    """Return the options of every trail of a page: step -> targets."""
    found = []
    for body in TRAIL.findall(text):
        options = dict(re.findall(r"^:(\w+): (.+)$", body, re.MULTILINE))
        found.append({step: targets.split() for step, targets in options.items()})
    return found


def broken(trail, text):
    """Return what is wrong with a trail of a page."""
    wrong = [step for step in ("reference", "kernel", "law", "measured") if not trail.get(step)]
    folders = {"reference": "dsspark/reference/", "kernel": "dsspark/kernels/", "law": ("tests/", "property_tests/")}
    for step, folder in folders.items():
        for target in trail.get(step, []):
            try:
                lines_of(target)
            except LookupError as error:
                wrong.append(str(error))
            if not target.startswith(folder) or (step == "law" and not target.partition("::")[2].startswith("test_")):
                wrong.append(f"{target} is no {step}")
    for target in trail.get("measured", []):
        if "::" in target:  # a test that counts, where no task is timed
            lines_of(target)
            continue
        page, _, task = target.rpartition(":")
        there = (DOCS / f"{page}.md").read_text(encoding="utf-8") if page else text
        measured = [
            results.identity(name.strip())
            for line in re.findall(r"\{measured\} (.+)", there)
            for name in line.split(";")
        ]
        if results.identity(task) not in measured:
            wrong.append(f"{target} is not measured there")
    return wrong


def test_every_component_has_a_page_with_the_fixed_headings():
    names = {path.stem for path in (ROOT / "dsspark" / "reference").glob("*.py")}
    assert {page.stem for page in COMPONENTS} == names & {
        path.stem for path in (ROOT / "dsspark" / "kernels").glob("*.py")
    } - {
        "__init__",
        "sampling",  # parts of two components, on their pages
        "filters",
    }
    for page in COMPONENTS:
        assert re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE) == HEADINGS, page.name


@pytest.mark.parametrize("page", COMPONENTS, ids=lambda page: page.name)
def test_every_equation_leads_to_lines_kernel_law_and_figure(page):
    text = page.read_text(encoding="utf-8")
    equation = text.split("## Reference")[0]
    order = re.findall(r"^(\$\$.*\S|```\{trail\})", equation, re.MULTILINE)
    kinds = ["equation" if line.startswith("$$") else "trail" for line in order]
    assert kinds == ["equation", "trail"] * (len(kinds) // 2)
    assert kinds
    assert [broken(trail, text) for trail in trails(text)] == [[]] * len(trails(text))


def test_a_trail_that_leads_nowhere_is_seen():
    trail = {
        "reference": ["dsspark/reference/markov.py::no_such_function"],
        "kernel": ["dsspark/reference/markov.py::draft_block"],
        "law": ["tests/helpers.py"],
        "measured": ["nothing"],
    }
    assert len(broken(trail, "```{measured} markov\n```")) == 4
    assert broken({}, "") == ["reference", "kernel", "law", "measured"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_function_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for target in SOURCE.findall(text):
        lines_of(target)
    for trail in trails(text):
        assert broken(trail, text) == []
    for path in re.findall(r"`((?:tests|property_tests|benchmarks|dsspark|docs)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / path).exists(), f"{page.name} shows {path}"


def test_every_page_is_in_the_table_of_contents():
    listed = re.search(
        r"```\{toctree\}.*?\n\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL
    ).group(1)
    names = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert set(listed.split()) == names


def test_a_source_page_has_the_lines_and_an_id_for_every_function():
    path = "dsspark/reference/sampling.py"
    page, text = listing(path), (ROOT / path).read_text(encoding="utf-8")
    assert page.count('class="number"') == len(text.splitlines())
    assert page.count("<span") == page.count("</span>")
    first, last = objects(path)["sample_two_level"]
    assert text.splitlines()[first - 1].startswith("def sample_two_level(")
    inside = page.split('id="sample_two_level"')[1]
    assert f'id="L{first}"' in inside.split(f'id="L{last}"')[0]
    assert "from_logits" in "".join(objects("dsspark/types.py"))  # methods too
    with pytest.raises(LookupError, match="has no nothing"):
        lines_of(f"{path}::nothing")
    with pytest.raises(LookupError, match="no such Python file"):
        lines_of("dsspark/../conftest.py")


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"/><a href="b.html#there"/><a href="https://x.org/#y"/>'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#gone"/><a href="c.html"/><a href="a.html?x=1#here"/>')
    assert broken_links(tmp_path) == ["a.html: b.html#there", "b.html: a.html#gone", "b.html: c.html"]
    with pytest.raises(SphinxError, match=r"b\.html: c\.html"):
        check(SimpleNamespace(builder=SimpleNamespace(name="html"), outdir=tmp_path), None)


# Drawings


def places(svg):
    """Return x, y, anchor and length of every text of a drawing, and its width and height."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    space = "{http://www.w3.org/2000/svg}"
    return (
        width,
        height,
        [
            (float(node.attrib["x"]), float(node.attrib["y"]), node.attrib["text-anchor"], node.text or "")
            for node in root.iter(f"{space}text")
        ],
    )


def outside(svg):
    """Return the texts of a drawing that leave its frame, at 6.2 pixels a character."""
    width, height, texts = places(svg)
    found = []
    for x, y, anchor, text in texts:
        length = 6.2 * len(text)
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        if left < 0 or left + length > width or not 0 < y < height:
            found.append(text)
    return found


MOVEMENT = results.load(results.RESULTS / "movement.json")["tasks"]


@pytest.mark.parametrize("draw", [*DIAGRAMS.values(), *CHARTS.values()], ids=[*DIAGRAMS, *CHARTS])
def test_drawings_are_well_formed_and_stay_in_their_frame(draw):
    assert outside(draw()) == []


@pytest.mark.parametrize("task", MOVEMENT)
def test_a_movement_diagram_shows_the_counted_bytes(task):
    svg = movement(MOVEMENT[task])
    assert outside(svg) == []
    shown = " ".join(text for *_, text in places(svg)[2])
    record = MOVEMENT[task]
    assert f"{in_bytes(record['moved'])} moved by kernels; {in_bytes(record['floor'])} have to move" in shown
    for kernel, entry in record["launches"].items():
        assert kernel in shown
        largest = max([*entry["read"].values(), *entry["written"].values()])
        assert in_bytes(largest) in shown or largest < SMALL * record["moved"]


def test_a_text_that_leaves_the_frame_is_seen():
    assert outside(charts.bars("a title " * 20, [("a", 2.0, "2")], start=1.0))


def test_every_table_of_a_result_file_has_rows():
    for name, table in TABLES.items():
        assert len(table().splitlines()) > 3, name


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (16_777_216, "16.8 MB"), (999_700, "1e+03 kB"), (2.5e9, "2.5 GB")],
)
def test_bytes_for_people(count, text):
    assert in_bytes(count).replace("1e+03", "1000") == text.replace("1e+03", "1000")


def test_results_of_a_gpu_are_the_newest_of_them(tmp_path):
    assert results.benchmarks(gpu=True, results=tmp_path) is None
    for name, gpu, date in (("cpu", None, "2026-12-01"), ("a", "H100", "2026-11-01"), ("b", "H200", "2026-11-02")):
        (tmp_path / name).mkdir()
        facts = {"date": date} | ({"gpu": gpu} if gpu else {})
        (tmp_path / name / "bench.json").write_text(
            f'{{"provenance": {str(facts).replace(chr(39), chr(34))}, "times": []}}'
        )
    assert results.benchmarks(gpu=True, results=tmp_path)["provenance"]["gpu"] == "H200"
    assert results.benchmarks(gpu=False, results=tmp_path)["provenance"]["date"] == "2026-12-01"


def test_results_of_an_evaluation_are_shown_where_there_are_any(tmp_path):
    assert results.evaluation_pages(tmp_path) == []
    (tmp_path / "evaluate").mkdir()
    page = tmp_path / "evaluate" / "evaluate.md"
    page.write_text("# Rounds\n\n![a](a.png)\n\n| x |\n| --- |\n")
    for name in ("a.png", "reliability_all.png"):
        (page.parent / name).write_bytes(b"")
    assert results.evaluation_pages(tmp_path) == [page]
    text = results.included(page)
    assert text.startswith("**Rounds**\n")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (DOCS / picture).resolve().parent == page.parent.resolve()
    assert text.count("a.png") == 1
    assert "![reliability all](" in text


def test_a_page_shows_gpu_times_only_if_they_are_committed():
    status = results.benchmarks(gpu=True)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert status is not None or not re.search(r"\d+(\.\d+)? (ms|us|µs) on an? (H100|H200|A100|B200)", text), (
            page.name
        )

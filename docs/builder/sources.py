"""Every Python file of the repository as a page, so that a link lands on the very lines: `source/<file>.html#<function>`.

The role {src}`dsspark/reference/markov.py::draft_block` links to a function, {src}`tests/test_markov.py` to a file.
"""

from __future__ import annotations

import ast
import functools
import html
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.util import logging
from sphinx.util.docutils import ReferenceRole

ROOT = Path(__file__).parents[2]
FOLDERS = ("dsspark", "tests", "property_tests", "benchmarks")


@functools.cache
def objects(path: str) -> dict[str, tuple[int, int]]:
    """Return the first and last line of each function, class, method and module constant of a file of the repository.

    Args:
        path: relative to the root of the repository.

    Returns:
        Name -> lines, counted from 1, decorators included; a method is "Class.method".
    """
    found: dict[str, tuple[int, int]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[prefix + node.name] = first, node.end_lineno or node.lineno
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = node.lineno, node.end_lineno or node.lineno

    visit(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "")
    return found


def lines_of(target: str) -> tuple[int, int]:
    """Return the first and last line of "file::object", or of "file".

    Raises:
        LookupError: if there is no such file or object.
    """
    path, _, name = target.partition("::")
    parts = Path(path).parts
    if not parts or parts[0] not in FOLDERS or ".." in parts or not (ROOT / path).is_file():
        raise LookupError(f"{target}: there is no such Python file under {', '.join(FOLDERS)}")
    if not name:
        return 1, len((ROOT / path).read_text(encoding="utf-8").splitlines())
    if name not in objects(path):
        raise LookupError(f"{target}: {path} has no {name}")
    return objects(path)[name]


def page_of(target: str) -> str:
    """Return the page of "file" or "file::object", from the root of the documentation, without its ending."""
    return "source/" + target.partition("::")[0].removesuffix(".py")


def uri(builder: Any, docname: str, target: str) -> str:
    """Return the link from a page to "file" or "file::object"."""
    name = target.partition("::")[2]
    return str(builder.get_relative_uri(docname, page_of(target))) + (f"#{name}" if name else "")


def link(env: Any, target: str, text: str, where: Any) -> nodes.Node:
    """Return a link to "file" or "file::object"; what does not exist is a warning, and the text stands alone."""
    try:
        first, last = lines_of(target)
    except LookupError as error:
        logging.getLogger(__name__).warning(str(error), location=where)
        return nodes.literal(text, text)
    node = nodes.reference("", "", internal=True, refuri=uri(env.app.builder, env.docname, target), classes=["src"])
    node["reftitle"] = f"{target.partition('::')[0]}, lines {first} to {last}"
    node += nodes.literal(text, text)
    return node


class SourceRole(ReferenceRole):
    """{src}`file::object` or {src}`text <file::object>`."""

    def run(self) -> tuple[list[nodes.Node], list[Any]]:
        """Return the link."""
        return [link(self.env, self.target, self.title, self.get_location())], []


def listing(path: str) -> str:
    """Return a file as HTML: lines with numbers and ids, each function in an element of its own, which a link can name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")
    opening: dict[int, list[str]] = {}
    closing: dict[int, int] = {}
    for name, (first, last) in objects(path).items():
        opening.setdefault(first, []).append(f'<span class="object" id="{html.escape(name)}">')
        closing[last] = closing.get(last, 0) + 1
    body = []
    for number, line in enumerate(lines[: len(text.splitlines())], start=1):
        body += opening.get(number, [])
        body.append(f'<a class="number" id="L{number}" href="#L{number}">{number:4d}</a> {line}\n')
        body.append("</span>" * closing.get(number, 0))
    return f'<h1>{html.escape(path)}</h1><div class="highlight source"><pre>{"".join(body)}</pre></div>'


def pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield the page of every Python file."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            yield page_of(path), {"title": path, "body": listing(path)}, "page.html"


def linkcode(domain: str, info: dict[str, str]) -> str | None:
    """Return the source page of an object of the API pages, which all lie in the root of the documentation."""
    value: Any = sys.modules.get(info["module"])
    for part in info["fullname"].split("."):
        value = getattr(value, part, None)
    value = inspect.unwrap(value) if callable(value) else None
    if value is None or not (getattr(value, "__module__", None) or "").startswith("dsspark"):
        return None
    path = Path(inspect.getsourcefile(sys.modules[value.__module__]) or "").relative_to(ROOT).as_posix()
    name = value.__qualname__
    return f"{page_of(path)}.html#{name}" if name in objects(path) else None


def setup(app: Any) -> None:
    """Register role and pages."""
    app.add_role("src", SourceRole())
    app.connect("html-collect-pages", pages)

"""Every example in a docstring of the references, and every Python block of the README and the docs, runs."""

from __future__ import annotations

import doctest
import functools
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import dsspark.reference
from dsspark.testing import audit

ROOT = Path(__file__).parents[1]
MODULES = [
    "dsspark.types",
    "dsspark.randomness",
    "dsspark.cost_table",
    "dsspark.serving.delayed",
    "dsspark.serving.delayed_device",
    *(f"dsspark.reference.{info.name}" for info in pkgutil.iter_modules(dsspark.reference.__path__)),
]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text):
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run_block(block):
    """Run a block as a program of its own."""
    exec(compile(block, "<example>", "exec"), {"__name__": "example"})


BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


def test_there_are_examples():
    attempted = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert attempted > 30
    assert len(BLOCKS) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_python_on_a_page_goes_unrun(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^ *(?:```+|~~~+|:::+) *(\S*)", text, re.MULTILINE)
    named = [name for name in fences if re.fullmatch(r"\{?(py.*|ipython.*|code|code-block|code-cell)\}?", name.lower())]
    assert named == ["python"] * len(blocks(text))
    assert ">>>" not in text


def test_a_wrong_example_fails():
    (block,) = blocks("text\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        run_block(block)
    (block,) = blocks("```python\nimport dsspark\ndsspark.no_such_name\n```\n")
    with pytest.raises(AttributeError):
        run_block(block)


@pytest.mark.parametrize("block", BLOCKS)
def test_readme_and_docs_blocks(block, tmp_path, monkeypatch):
    """As printed, but that an audit tries as many cases as the audits' own tests, not its default of thousands."""
    monkeypatch.chdir(tmp_path)
    for name, cases in (("audit_scheduler", 40), ("audit_sampler", 20)):
        monkeypatch.setattr(audit, name, functools.partial(getattr(audit, name), max_examples=cases))
    run_block(block)

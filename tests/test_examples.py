"""Every example in a docstring of the references, and every Python block of the README and the docs, runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import dsspark.reference

ROOT = Path(__file__).parents[1]
MODULES = [
    "dsspark.types",
    "dsspark.randomness",
    "dsspark.cost_table",
    "dsspark.serving.delayed",
    "dsspark.serving.delayed_device",
    *(f"dsspark.reference.{info.name}" for info in pkgutil.iter_modules(dsspark.reference.__path__)),
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


def test_there_are_examples():
    attempted = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert attempted > 30
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS)
def test_readme_and_docs_blocks(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<example>", "exec"), {"__name__": "example"})

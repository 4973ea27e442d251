"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

import dsspark

project = "dsspark"
author = "The dsspark authors"
copyright = "2026, The dsspark authors"
release = dsspark.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence", "substitution"]
html_theme = "furo"
html_math_renderer = "mathml"  # rendered at build time: the pages need neither scripts nor a network for it
html_title = "dsspark"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_custom_sections = ["Numerics", "Cost", "Source"]


def _measured_tables() -> dict[str, str]:
    """Return Markdown tables of what was measured when the shipped weights were trained."""
    path = Path(dsspark.__file__).parent / "weights" / "provenance.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    rounds = ["| domain | temperature | parallel only | with Markov head | gain |", "| --- | --- | --- | --- | --- |"]
    for domain, by_temperature in facts["tokens_per_round"].items():
        for temperature, by_drafter in by_temperature.items():
            alone, drafter = by_drafter["parallel_only"], by_drafter["drafter"]
            gain = 100 * (drafter / alone - 1)
            rounds.append(f"| {domain} | {temperature} | {alone:.2f} | {drafter:.2f} | {gain:+.0f} % |")
    errors = ["| position | STS temperature | ECE before | ECE after |", "| --- | --- | --- | --- |"]
    columns = (facts["sts_temperatures"], facts["ece_before"], facts["ece_after"])
    for k, (temperature, before, after) in enumerate(zip(*columns, strict=True), start=1):
        errors.append(f"| {k} | {temperature:.2f} | {100 * before:.2f} % | {100 * after:.2f} % |")
    return {"tokens_a_round": "\n".join(rounds), "calibration": "\n".join(errors)}


myst_substitutions = _measured_tables()


def _prepare_docstring(app, what, name, obj, options, lines):
    """Docstrings write LaTeX as the pages do, $...$ and $$...$$; reStructuredText wants roles and directives."""
    text = "\n".join(lines)

    def display(match: re.Match[str]) -> str:
        body = match.group(2).strip().replace("\n", f"\n{match.group(1)}   ")
        return f"\n{match.group(1)}.. math::\n\n{match.group(1)}   {body}\n"

    text = re.sub(r"^( *)\$\$(.+?)\$\$", display, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$([^$]+)\$", lambda match: f":math:`{' '.join(match.group(1).split())}`", text)
    # Napoleon wants a section's text to begin on the line below its name.
    text = re.sub(r"^(Numerics|Cost|Source|Raises|Args|Returns): (?=\S)", r"\1:\n    ", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def _inline_math(translator, node):
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _display_math(translator, node):
    translator.body.append(f"<p>{convert(node.astext(), display='block')}</p>")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
    app.connect("autodoc-process-docstring", _prepare_docstring, priority=400)  # before napoleon

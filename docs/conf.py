"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

import re

from docutils import nodes
from latex2mathml.converter import convert

import dsspark

project = "dsspark"
author = "The dsspark authors"
copyright = "2026, The dsspark authors"
release = dsspark.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
html_theme = "furo"
html_math_renderer = "mathml"  # rendered at build time: the pages need neither scripts nor a network for it
html_title = "dsspark"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_custom_sections = ["Numerics", "Cost", "Source"]


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

"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

import dsspark

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.builder.sources import linkcode as linkcode_resolve  # noqa: F401  Sphinx calls it by this name

project = "dsspark"
author = "The dsspark authors"
copyright = "2026, The dsspark authors"
release = dsspark.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode", "docs.builder"]
myst_enable_extensions = ["dollarmath"]
html_static_path = ["_static"]
html_css_files = ["dsspark.css"]
html_theme = "furo"
html_math_renderer = "mathml"  # rendered at build time: the pages need neither scripts nor a network for it
html_title = "dsspark"
exclude_patterns = ["_build", "builder"]
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


def _mathml(node, display):
    """Return an equation as MathML; a command that the converter does not know is a warning."""
    text = re.sub(r"\\arg\\(max|min)", r"\\mathrm{arg\\,\1}", node.astext())
    markup = convert(text, display=display)
    unknown = re.findall(r"\\[a-zA-Z]+", re.sub(r"<annotation.*?</annotation>", "", markup))
    if unknown:
        logging.getLogger(__name__).warning("equation: %s in %s", ", ".join(unknown), text)
    return markup


def _inline_math(translator, node):
    translator.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def _display_math(translator, node):
    translator.body.append(f'<p class="equation">{_mathml(node, "block")}</p>')
    raise nodes.SkipNode


def setup(app):
    """Register the renderer of equations and the LaTeX of docstrings."""
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
    app.connect("autodoc-process-docstring", _prepare_docstring, priority=400)  # before napoleon

"""What the documentation is built from: source pages, trails from an equation to its test, figures from result files, diagrams.

A Sphinx extension, used by `docs/conf.py` as "docs.builder". Whatever a page names and does not exist is a warning, and warnings
are errors.
"""

from __future__ import annotations

from typing import Any

from docs.builder import directives, links, sources


def setup(app: Any) -> dict[str, bool]:
    """Register everything with Sphinx."""
    sources.setup(app)
    directives.setup(app)
    app.connect("build-finished", links.check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

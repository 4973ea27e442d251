"""After a build: every link inside the site lands on a page and an element that exist, or the build fails."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sphinx.errors import SphinxError


@functools.cache
def _ids(page: Path) -> set[str]:
    return set(re.findall(r'\sid="([^"]+)"', page.read_text(encoding="utf-8")))


def broken_links(root: Path) -> list[str]:
    """Return the links of the pages under a folder, source pages aside, that lead to no file or to no element of a page."""
    _ids.cache_clear()
    found = []
    for page in sorted(root.rglob("*.html")):
        if page.relative_to(root).parts[0] == "source":
            continue
        for link in sorted(set(re.findall(r'href="([^"]+)"', page.read_text(encoding="utf-8")))):
            path, _, name = unquote(link).partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.is_file() or (name and target.suffix == ".html" and name not in _ids(target)):
                found.append(f"{page.relative_to(root)}: {link}")
    return found


def check(app: Any, error: Exception | None) -> None:
    """Raise `SphinxError` that names what is broken, once a build of pages is done."""
    if error is None and app.builder.name == "html":
        broken = broken_links(Path(app.outdir))
        if broken:
            raise SphinxError("links that lead nowhere:\n" + "\n".join(broken))

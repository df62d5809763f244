"""Hooks of MkDocs: pages of the files at the root of the repository, and docstrings that look as Markdown does."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/vulnerabilities.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file of `PAGES`, with links as the site has them."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_with_links_of_the_site(text, page)))
    return files


def _with_links_of_the_site(text: str, page: str) -> str:
    """Return ``text`` with links relative to ``page`` in the place of links relative to the root of the repository."""

    def on_site(link: re.Match[str]) -> str:
        target, fragment = link[1], link[2] or ""
        if target not in PAGES and not target.startswith("docs/"):
            return link[0]
        target = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({os.path.relpath(target, Path(page).parent)}{fragment})"

    return re.sub(r"\]\(([^):#]+)(#[^)]*)?\)", on_site, text)


def on_page_content(html: str, **_: Any) -> str:
    """In a docstring ``Example::`` stands before code."""
    return html.replace("::</p>", ":</p>")

"""Hooks of MkDocs: pages of the files at the root of the repository, and docstrings that look as Markdown does."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/vulnerabilities.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file of `PAGES`."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace links between the files of the repository by links between the pages of the site."""
    uri = page.file.src_uri
    folder = "" if uri in PAGES.values() else f"docs/{os.path.dirname(uri)}"

    def on_site(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link[1]))
        if target not in PAGES and not target.startswith("docs/"):
            return link[0]
        target = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({os.path.relpath(target, os.path.dirname(uri) or '.')}{link[2] or ''})"

    return re.sub(r"\]\(([^):#]+)(#[^)]*)?\)", on_site, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """End a sentence that introduces code by one colon: in a docstring it has two."""
    return html.replace("::</p>", ":</p>")

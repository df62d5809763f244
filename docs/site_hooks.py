"""Hooks of MkDocs: the README is the home page of the site, and docstrings look as Markdown does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add the home page: the README, with links as the site has them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """In a docstring ``Example::`` stands before code."""
    return html.replace("::</p>", ":</p>")

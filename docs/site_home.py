"""A hook of MkDocs: the README is the home page of the site, with links as the site has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add the home page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files

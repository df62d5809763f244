"""Where the files are that several tests use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent  # of the repository
SUPPORT = Path(__file__).parent
EXAMPLES = ROOT / "docs" / "examples"
STAND_IN = str(SUPPORT / "stand_in")  # for PYTHONPATH: processes then have a made-up accelerator

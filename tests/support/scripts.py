"""Definitions of a script, and lines that call them in a pool of one worker."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

from nn_parallel import ParallelExecutor

HEADER = """
import functools, os, sys, threading
import torch
from nn_parallel import ParallelExecutor
"""


def run_script(code: str, folder: Path) -> list[str]:
    """Return the lines that a script prints."""
    (folder / "script.py").write_text(HEADER + code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"], capture_output=True, text=True, timeout=90, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()


def values(main: dict[str, Any], definitions: str, lines: list[str]) -> str:
    """Return the values of the lines, and what that prints. A line after ``!`` is run and has no value."""
    exec(compile(definitions, "<string>", "exec", dont_inherit=True), main)  # this file has a `__future__` import
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), ParallelExecutor(num_workers=1, devices="cpu") as ex:
        main.update(ex=ex, call=lambda fn, *args: ex.run(fn, *args)[0])
        for line in lines:
            exec(line[2:] if line.startswith("! ") else f"print({line})", main)
    return " ".join(printed.getvalue().splitlines())

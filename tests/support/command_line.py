"""The command line, run as a user runs it: without what this process has set."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT


def run_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nn_parallel", *arguments],
        env=clean_environment() | environ,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )


def clean_environment() -> dict[str, str]:
    hidden = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    return clean | {"PYTHONPATH": str(ROOT)}

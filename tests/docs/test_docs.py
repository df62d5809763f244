"""Every snippet of README and docs runs, and prints what stands under it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nn_parallel
from tests.support.notebook import run_cells
from tests.support.paths import ROOT

PACKAGE = Path(nn_parallel.__file__).parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(
        *(code, expected),
        id=f"{document.name}-{number}",
        marks=() if document.name == "README.md" else pytest.mark.slow,
    )
    for document in DOCUMENTS
    for number, (code, expected) in enumerate(SNIPPET.findall(document.read_text()), 1)
]


@pytest.mark.parametrize(("code", "expected"), SNIPPETS)
def test_snippet(code: str, expected: str, tmp_path: Path) -> None:
    """It runs as a script of its own; what it prints, an uncaught error too, is what the page shows."""
    (tmp_path / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert _comparable(done.stdout) == _comparable(expected)
    assert done.returncode == ("Traceback" in expected)


def _comparable(text: str) -> str:
    """Without what differs from run to run, and between machines and Pythons: folders, process ids, ports, ..."""
    # Torch looks up the name of each client of a store, and warns if the name server of the machine does not answer.
    text = re.sub(r"\[W[^\n]*The hostname of the client socket cannot be retrieved[^\n]*\n", "", text)
    text = re.sub(r"\n[ |]*[~^]+(?=\n)", "", text)  # the marks under a line of a traceback
    text = re.sub(r'File "[^"]*/([^/"]+)"', r'File "\1"', text)
    text = re.sub(r"\(pid \d+ on [^)]*\)", "(pid N on HOST)", text)
    text = re.sub(r" at /\S*/(\w+\.py:\d+)", r" at \1", text)
    return re.sub(r"RuntimeError: \[.*", "RuntimeError: [...]", text)


@pytest.mark.slow
def test_the_notebook() -> None:
    """Its cells, in a kernel, print what stands under them."""
    notebook = json.loads((ROOT / "docs" / "guide" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if "outputs" in cell]
    expected = [("".join(text for output in cell["outputs"] for text in output["text"]), None) for cell in cells]
    assert run_cells(*("".join(cell["source"]) for cell in cells)) == expected


def test_links_lead_somewhere() -> None:
    """Relative links of README and docs name files that exist."""
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_environment_variable_is_told() -> None:
    """What the package reads or sets by name stands in the reference."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = "".join(
        (PACKAGE / "_engine/ranks" / name).read_text() for name in ("environment.py", "membership.py", "watchdog.py")
    )
    named = set(re.findall(r'"((?:[A-Z0-9]+_)+[A-Z0-9]+|RANK)"', sources))
    assert len(named) > 30
    assert {name for name in named if f"`{name}`" not in page} == set()


def test_every_public_name_is_in_the_reference() -> None:
    """On one of its pages."""
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = re.findall(r"^::: nn_parallel\.(\w+)$", pages, re.MULTILINE)
    assert sorted(documented) == sorted([*nn_parallel.__all__, "testing"])


def test_the_figures_are_those_of_the_recorded_run() -> None:
    """The table of the performance page is made, not typed, and each topic that can be measured is in it or plotted."""
    program = (
        "from pathlib import Path; from benchmarks import page; "
        "measured_in, figures = page.read_results(Path('docs/project/performance.json')); "
        "print(page.BEGIN, page.table(measured_in, figures), page.END, sep='\\n'); "
        "print(*sorted({figure.topic for figure in figures}))"
    )
    *made, topics = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT
    ).stdout.splitlines()
    assert "\n".join(made) in (ROOT / "docs" / "project" / "performance.md").read_text()
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {
        "__init__",
        "__main__",
        "harness",
        "peers",
        "cluster",
        "page",
        "soak",  # which has a plot of its own
        "day",  # which has a table of its own
    }
    assert set(topics.split()) == there


@pytest.mark.slow
def test_a_goal_is_met_or_not() -> None:
    """By the median of the ratios of neighbours, and without a reference by the median; at the goal it is met."""
    program = """
from benchmarks.harness import Figure
for ratios, goal in (([9, 1, 2], 2), ([9, 1, 2.01], 2), ([1, 9, 1], None)):
    print(Figure("f", [3 * ratio for ratio in ratios], goal, "r", [3.0] * 3).is_met)
print(Figure("f", [1, 4, 10], 4).is_met, Figure("f", [1, 4, 10], 3.9).is_met)
print(Figure("f", [1.0, 40.0, 9.0], 1, "r", [2.0, 20.0, 9.0]).ratio)  # not 9 / 9, the medians'
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.split() == ["True", "False", "None", "True", "False", "1.0"]


def test_no_machine_is_named() -> None:
    """No path of a machine and no registry's host in what is published."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, timeout=30).stdout.split()
    pattern = re.compile("/" + "work/|/" + "root/|pypi" + r"[.-]|index-" + "url")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ""} and path.is_file():
            assert not pattern.search(path.read_text(errors="replace")), name
    assert "RES_OPTIONS" in os.environ

"""The style of the package: openings of docstrings, banned names, and one assignment a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.docs.test_house import MODULES

QUESTIONS = {"Whether", "What", "Which", "Where", "Who", "How", "When"}
VARIABLES = {"told", "found", "met", "here", "theirs", "stands"}  # they do not say what they hold
FUNCTIONS = {
    "told",
    "found",
    "stored",
    "whole",
    "ending",
    "late",
    "of",
    "before",
    "met",
}  # they do not say what is done


def faults_of(code: str) -> Iterator[str]:
    """Find what the page of the language bans."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if docstring.split(maxsplit=1)[:1] and docstring.split(maxsplit=1)[0] in QUESTIONS:
                yield f"line {node.lineno}: the docstring opens as a question: {docstring.splitlines()[0]}"
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") in FUNCTIONS:
            yield f"line {node.lineno}: a function is called {node.name}"
        if isinstance(node, ast.arg) and node.arg in VARIABLES:
            yield f"line {node.lineno}: an argument is called {node.arg}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VARIABLES:
            yield f"line {node.lineno}: a variable is called {node.id}"
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            yield f"line {node.lineno}: several assignments in one"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_words(module: str) -> None:
    """Docstrings open with a verb or a noun; names say what they stand for; a line assigns one thing."""
    assert list(faults_of(MODULES[module].read_text())) == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('def f():\n    """Whether it is."""', "opens as a question"),
        ('class C:\n    """What it knows."""', "opens as a question"),
        ("def _of(x): ...", "a function is called _of"),
        ("def f(told): ...", "an argument is called told"),
        ("for here in range(3): ...", "a variable is called here"),
        ("a, b = 1, 2", "several assignments"),
    ],
)
def test_the_test_of_words_sees(code: str, fault: str) -> None:
    """One of each kind."""
    (seen,) = faults_of(code)
    assert fault in seen

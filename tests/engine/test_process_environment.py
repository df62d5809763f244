"""Environment, directory, import path and resource tracker of the script reach its workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_script, values


def test_the_environment_the_directory_and_the_path_are_brought_up_to_date(
    main: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only changes of the parent are taken over: a variable that a task has set stays."""
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("BY_VALUE_A", "1")
    monkeypatch.delenv("BY_VALUE_B", raising=False)
    (tmp_path / "found_later.py").write_text("def f(): return 5\n")
    main["folder"] = str(tmp_path)
    definitions = """
def look(): return os.environ.get("BY_VALUE_A"), os.environ.get("BY_VALUE_B"), os.getcwd() == folder
def put(): os.environ["BY_VALUE_B"] = "worker's"
"""
    lines = [
        *("call(look)", "call(put)", "call(look)", "! os.environ['BY_VALUE_A'] = '2'", "call(look)", "call(look)"),
        *("! del os.environ['BY_VALUE_A']", "! os.chdir(folder)", "call(look)"),
        *("! sys.path.append(folder)", "! import found_later", "call(found_later.f)", "call(look)"),
    ]
    a, b, c = "('1', None, False)", "('1', \"worker's\", False)", "('2', \"worker's\", False)"
    d = '(None, "worker\'s", True)'
    assert values(main, definitions, lines) == f"{a} None {b} {c} {c} {d} 5 {d}"
    del sys.modules["found_later"]


def test_the_end_of_a_worker_leaves_shared_memory_of_the_script(tmp_path: Path) -> None:
    """Before Python 3.13 each process that opens it hands it to its resource tracker, which removes it at the end."""
    code = """
from multiprocessing import shared_memory
def fill(name):
    memory = shared_memory.SharedMemory(name=name)
    memory.buf[0] += 1
    memory.close()
def pool(): return ParallelExecutor(num_workers=1, devices="cpu")
with pool() as before:
    before.run(len, "")  # this worker is there before this process has a tracker
    memory = shared_memory.SharedMemory(create=True, size=10)
    before.run(fill, memory.name)
for _ in range(2):
    with pool() as ex: ex.run(fill, memory.name)
print(memory.buf[0])
memory.close()
memory.unlink()
"""
    assert run_script(code, tmp_path) == ["3"]

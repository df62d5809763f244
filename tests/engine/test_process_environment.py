"""Workers have the attributes and the environment of the script, as a fork of it would."""

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


@pytest.mark.slow
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


ATTRIBUTES = """
import os, resource, signal, time
from nn_parallel import ParallelExecutor

def see():
    signals = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    return (status["Umask"], os.sched_getaffinity(0), os.nice(0), limits, signals, time.strftime("%Z"), time.tzname,
            os.getresuid(), os.getresgid(), os.getgroups())

def change():
    os.umask(0o077)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    os.environ["TZ"] = "America/New_York"
    time.tzset()
    if os.getuid() == 0:
        os.setgroups([65533])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
"""


@pytest.mark.slow
def test_a_new_pool_inherits_what_a_fork_of_the_script_would(tmp_path: Path) -> None:
    """Limits, affinity, umask, blocked signals, time zone; and work of a program that dropped root runs without."""
    code = f"""{ATTRIBUTES}
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    print(ex.submit(see).result() == see())
change()
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    print(ex.submit(see).result() == see() or (ex.submit(see).result(), see()))
    try:
        ex.submit(os._exit, 3).result()
    except Exception as error:
        print(type(error).__name__)
    print(ex.submit(see).result() == see())
"""
    assert run_script(code, tmp_path) == ["True", "True", "WorkerDiedError", "True"]


@pytest.mark.slow
def test_sigchld_may_be_blocked_in_the_script(tmp_path: Path) -> None:
    """As in a program that waits for it by `signal.sigwait`: deaths of workers are seen, and the pool ends."""
    code = """
import os, signal
from nn_parallel import ParallelExecutor
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
with ParallelExecutor(num_workers=1, devices="cpu") as ex:
    print(type(ex.submit(os._exit, 3).exception(60)).__name__)
    print(signal.SIGCHLD in ex.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result())
print("end")
"""
    assert run_script(code, tmp_path) == ["WorkerDiedError", "True", "end"]

"""The house rules: layers, public names, sizes."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nn_parallel
import nn_parallel._engine
from tests.support import processes
from tests.support.paths import ROOT

PACKAGE = Path(nn_parallel.__file__).parent

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in PACKAGE.rglob("*.py")
}
MAX_BODY_LINES = 65
VOCABULARY = {"errors", "world", "_version"}  # what the engine may know of the shelf
ROOMS = {"_engine", "_engine.ranks", "_engine.pool", "_engine.by_value", "_engine.ray"}  # their __init__ only describe


def _mapped() -> list[str]:
    """Return the files of the engine as its docstring maps them, from the bottom up."""
    mapped, room = list[str](), ""
    for inner, names, colon in re.findall(
        r"^ {4}( {4})?(\w+(?:, \w+)*)(:?)(?: .*)?$", nn_parallel._engine.__doc__ or "", re.MULTILINE
    ):
        if inner:
            mapped += [f"{room}.{name}" for name in names.split(", ")]
        elif colon or names == "shared":
            room = "_engine" if names == "shared" else f"_engine.{names}"
    return mapped


def test_every_file_of_the_engine_is_mapped_once() -> None:
    """A new file must say where it stands."""
    assert sorted(_mapped()) == sorted(name for name in MODULES if name.startswith("_engine") and name not in ROOMS)


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("_engine")))
def test_each_file_of_the_engine_knows_only_those_before_it(module: str) -> None:
    """No import points upwards or to the shelf, those inside functions and under TYPE_CHECKING included."""
    mapped = _mapped()
    below = set() if module in ROOMS else {*mapped[: mapped.index(module)]}
    assert _imported(module) <= below | VOCABULARY


ELSEWHERE = {  # the tests of a module that has no file of its name, and why
    "__main__": "api/test_command_line.py",  # by its command
    "ranks.membership": "api/test_ddp.py",  # the bodies of public functions
    "ranks.run_on_ranks": "api/test_ranks.py",
    "ranks.stop_signals": "api/training/test_preemption.py",
    "pool.backend": "api/test_executor.py",
    "ranks.links": "engine/ranks/test_liveness.py",  # by what it tells
    "ranks.status_board": "engine/ranks/test_calls.py",
    "ranks.times": "engine/ranks/test_deadlock.py",
    "ranks.nccl": "engine/test_accelerators.py",  # needs an accelerator, a made-up one at least
    "pool.protocols": "engine/pool/test_pool.py",  # by those who implement them
    "pool.supervisor": "engine/pool/test_pool.py",  # by the calls of its pool
    "pool.messages": "engine/pool/test_worker.py",  # records
    "training.shares": "api/training/test_data.py",
}


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name and name not in {*ROOMS, "_version"}))
def test_each_module_has_a_file_of_tests(module: str) -> None:
    """It is ``test_<module>.py``, in the folder of its room; a module of the shelf and its body have one together."""
    *room, name = module.removeprefix("_engine.").split(".")
    name = name if module == "__main__" else name.removeprefix("_")
    place = ".".join([*room, name])
    if place == "training.__init__" or module == "training":
        return
    wanted = (
        [Path(ELSEWHERE[place])]
        if place in ELSEWHERE
        else [Path(folder, *room, f"test_{name}.py") for folder in ("unit", "engine", "api")]
    )
    there = [path for path in wanted if (ROOT / "tests" / path).exists()]
    assert there, f"no {' nor '.join(map(str, wanted))}"


def test_what_has_its_tests_elsewhere_is_there() -> None:
    """A module that has gone, or has got a file of its own, is taken out of the list."""
    modules = {name.removeprefix("_engine.").replace("._", ".") for name in MODULES}
    assert ELSEWHERE.keys() <= modules


def test_each_folder_of_tests_is_a_package() -> None:
    """Else pytest puts the folder on the path, where its names hide those of others."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


PUBLIC = [  # files outside the engine, from the bottom up
    *("_version", "errors", "world", "devices", "gpus", "ddp", "ranks", "data_parallel", "executor"),
    *("training.collectives", "training._random_numbers", "training.model", "training.logs", "training._to_device"),
    *("training._draws", "training._shares", "training.preemption", "training._loader_workers", "training.data"),
    *("training.batch_size", "training._shards", "training._checkpoint_file", "training._states", "training._saving"),
    *("training.checkpoint", "training.profiling", "training", "doctor", "testing", "", "__main__"),
]


def test_every_public_file_has_a_place() -> None:
    """A new one must say where it stands."""
    assert sorted(PUBLIC) == sorted(name for name in MODULES if not name.startswith("_engine"))


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_file_knows_only_those_before_it(module: str) -> None:
    """And the engine."""
    assert {name for name in _imported(module) if not name.startswith("_engine")} <= {*PUBLIC[: PUBLIC.index(module)]}


def test_no_file_is_called_as_a_public_name() -> None:
    """``import nn_parallel.on_rank`` would give a function, and not the module."""
    assert {name.split(".")[0] for name in MODULES} & set(nn_parallel.__all__) == set()


def test_public_names_do_not_show_the_engine() -> None:
    """What a user reads in a repr, a pickle or an error names a public file."""
    hidden = [name for name in nn_parallel.__all__ if "._" in getattr(nn_parallel, name).__module__]
    assert hidden == []


def _imported(module: str) -> set[str]:
    return {name for node in ast.walk(ast.parse(MODULES[module].read_text())) for name in _imports(node, module)}


def _imports(node: ast.AST, module: str) -> set[str]:
    """The modules of this package that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "nn_parallel"}
    if not isinstance(node, ast.ImportFrom):
        return set()
    if node.level == 0:
        inside = (node.module or "").split(".")[0] == "nn_parallel"
        return {(node.module or "").partition(".")[2]} if inside else set()
    package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    base = [part for part in package if part][: len([p for p in package if p]) - node.level + 1]
    if node.module:
        base += node.module.split(".")
    named = (".".join([*base, alias.name]) for alias in node.names)
    return {name if name in MODULES else ".".join(base) for name in named}


def test_the_layer_test_sees_upward_imports() -> None:
    """The check above can fail: an import inside a function of a lower file is found."""
    tree = ast.parse(
        "def f():\n    from ... import world\n    from ..ranks.blocks import block\n    from .worker import work"
    )
    found = {name for node in ast.walk(tree) for name in _imports(node, "_engine.pool.channel")}
    assert found == {"world", "_engine.ranks.blocks", "_engine.pool.worker"}


def test_bodies_of_functions_stay_short() -> None:
    """No body has more than 65 lines, from the line after the docstring to the last one; inner functions count."""
    functions = [
        (module, node)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [
        f"{module}.{function.name} has {length} lines"
        for module, function in functions
        if (length := _body_length(function)) > MAX_BODY_LINES
    ] == []


def _body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    has_docstring = ast.get_docstring(function) is not None
    before = function.body[0].end_lineno if has_docstring else function.body[0].lineno - 1
    return function.end_lineno - before


def test_no_loop_stands_in_a_block_with_a_lock() -> None:
    """Ctrl-C could leave the lock taken, as the docstring of `RLock` (interrupts) says."""
    trees = {path: ast.parse(path.read_text()) for path in MODULES.values()}
    locks = {
        _last_name(target)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if _last_name(node.value.func) in {"Lock", "RLock", "Condition"}
        for target in node.targets
    }
    assert locks >= {"lock", "_task_lock", "_changed"}
    assert [
        f"{path.relative_to(PACKAGE)}:{block.lineno}"
        for path, tree in trees.items()
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and any(_last_name(item.context_expr) in locks for item in block.items)
        for statement in block.body
        for node in ast.walk(statement)
        if isinstance(node, ast.For | ast.While) or (isinstance(node, ast.comprehension) and node.ifs)
    ] == []


def _last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def test_the_public_names_are_all_there() -> None:
    """``__all__`` is what a user may import, and each of them has a docstring; what is defined here says so."""
    assert len(set(nn_parallel.__all__)) == len(nn_parallel.__all__)  # their order is for the linter to see
    public = {
        name for name, value in vars(nn_parallel).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(nn_parallel.__all__)
    for name in nn_parallel.__all__:
        assert inspect.getdoc(getattr(nn_parallel, name)), name


def test_every_function_gives_an_example() -> None:
    """Public functions, decorators and the methods of the executor show how they are called."""
    executor = nn_parallel.ParallelExecutor
    documented = [getattr(nn_parallel, name) for name in nn_parallel.__all__ if name[0].islower()]
    documented += [executor, executor.run, executor.submit, executor.map]
    missing = [item.__name__ for item in documented if "Example::" not in (inspect.getdoc(item) or "")]
    assert missing == ["cleanup_ddp"]


@pytest.mark.parametrize("module", ["_engine.ranks.environment", "devices", "world", "ddp"])
def test_examples_in_docstrings(module: str) -> None:
    """Examples with a prompt give what they show."""
    import doctest

    loaded = importlib.import_module(f"nn_parallel.{module}")
    failed, tried = doctest.testmod(loaded)
    assert failed == 0
    assert tried


def test_tests_mind_their_own_shared_memory() -> None:
    """What a process left in /dev/shm that was killed as it sent a tensor counts; what others have there does not."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    abandoned, others = f"torch_{ended.pid}_1_0", [f"torch_{os.getpid()}_1_0", f"x_{ended.pid}"]
    paths = [Path("/dev/shm", name) for name in (abandoned, *others)]
    try:
        for path in paths:
            path.touch()
        found = processes.abandoned_in_shared_memory()
    finally:
        for path in paths:
            path.unlink()
    assert abandoned in found
    assert found.isdisjoint(others)

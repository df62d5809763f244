"""A pytest plugin for tests that run on several ranks. It is installed with the package.

A test that is marked with ``@pytest.mark.ranks(2)`` runs on two ranks at the same time. Each rank is a process on the
CPU. The processes belong to a pool, which is kept for the next test. The test gets the same fixtures and parameters as
a test in pytest's own process, and pytest rewrites its asserts in the same way::

    @pytest.mark.ranks(2)
    def test_the_sum_is_that_of_all_ranks() -> None:
        total = torch.ones(1) * (initialize_ddp().rank + 1)
        dist.all_reduce(total)
        assert total.item() == 3

The test fails if it fails on any rank. The report shows each different traceback once, below the names of the ranks
that have raised it. The output of the ranks is captured as usual; each line begins with its rank. If rank 0 skips the
test, the test is skipped.

Fixtures are set up in pytest's own process, and their values are sent to the ranks. If a value cannot be pickled, for
instance ``capsys``, the test fails with the message of a `TransferError` that names the fixture. The fixture
``monkeypatch`` is not sent; each rank makes its own. With ``--pdb``, the first rank that fails gets the terminal.
"""

from __future__ import annotations

import bdb
import contextlib
import fcntl
import os
import pdb
from collections.abc import Callable, Generator, Iterator
from typing import IO, Any

import cloudpickle
import pytest

from ._engine.devices import count
from ._engine.failures import rank_names, summary
from ._engine.ranks.context import current_world
from .errors import ParallelError, RankError, RemoteTraceback
from .executor import ParallelExecutor

_TRACEBACKS = pytest.StashKey[str]()  # the text for the report of a failed test, see `_told_by_all`
_POOLS = pytest.StashKey[dict[int, ParallelExecutor]]()  # maps each number of ranks to the pool of this size
_held: list[IO[str]] = []  # the open terminal, from the moment this rank locks it for debugging until the next test


def pytest_configure(config: pytest.Config) -> None:
    """Begin without pools. `pool_of` starts a pool when a test needs a number of ranks that no pool has yet."""
    config.stash[_POOLS] = {}


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End the ranks after the last test.

    When the ranks end, they write their coverage data, which pytest-cov reads after this hook.
    """
    try:
        return (yield)
    finally:
        for pool in session.config.stash[_POOLS].values():
            pool.shutdown()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call the test on every rank, if it has the mark ``ranks``."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        pool = pool_of(pyfuncitem.config, *marker.args, **marker.kwargs)
        with _by_value(pyfuncitem.module), _debugging(pyfuncitem.config) as terminal:
            reasons = pool.run(_call, pyfuncitem.obj, terminal, **fixtures)
    except RankError as error:
        pyfuncitem.stash[_TRACEBACKS] = _told_by_all(error)
        if terminal:
            # The debugger has already run on a rank. pytest must not start a second debugger in this process, and it
            # starts none after `BdbQuit`.
            raise bdb.BdbQuit from None
        raise error.exceptions[0] from None  # not the group, because `xfail(raises=...)` checks the type
    except (ParallelError, TypeError, ValueError) as error:  # a fixture cannot be sent, or the mark is wrong
        pytest.fail(str(error), pytrace=False)
    if reasons[0] is not None:
        pytest.skip(reasons[0])
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the tracebacks of the ranks in the report, instead of the traceback of this process.

    The traceback of this process ends where it calls the ranks, and does not show where the test has failed.
    """
    report = yield
    if report.when == "call" and report.failed and (tracebacks := item.stash.get(_TRACEBACKS, None)):
        report.longrepr = tracebacks
    return report


def pool_of(config: pytest.Config, n: Any = None) -> ParallelExecutor:
    """Return the pool for tests with the mark ``ranks(n)``. Start the pool if there is none with ``n`` ranks."""
    n = count("n of @pytest.mark.ranks(n)", n)
    pools = config.stash[_POOLS]
    if n not in pools:
        pools[n] = ParallelExecutor(num_workers=n, devices="cpu", prefix_output=True, pass_device=False)
    return pools[n]


@contextlib.contextmanager
def _debugging(config: pytest.Config) -> Iterator[str | None]:
    """With ``--pdb``, let the ranks use the terminal during the ``with`` block, and yield the terminal's name.

    Yield None without ``--pdb``, or if there is no terminal.
    """
    capture = config.pluginmanager.getplugin("capturemanager") if config.option.usepdb else None
    if capture is None:
        yield None
        return
    capture.suspend(in_=True)
    try:
        yield os.ttyname(0) if os.isatty(0) else None
    finally:
        capture.resume()


def _debug(error: Exception, terminal: str) -> None:
    """Debug a test on the terminal, at the place where the test has failed on this rank.

    Only the first rank that fails gets the lock of the terminal. Any other failed rank waits in this function for the
    lock. After the debugger, the first rank raises ``error``, and the pool then ends the call on the waiting ranks.
    """
    stdin = open(terminal)  # noqa: SIM115  # kept open until the next test, because closing it would release the lock
    fcntl.flock(stdin, fcntl.LOCK_EX)
    _held.append(stdin)
    with open(terminal, "w") as stdout:
        print(f"\nOn rank {current_world().rank}: {summary(error)}", file=stdout)
        debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


def _call(test: Callable[..., object], terminal: str | None, /, **fixtures: Any) -> str | None:
    """Run the test on this rank. If the test skips itself, return the reason, otherwise None."""
    while _held:
        _held.pop().close()
    with contextlib.ExitStack() as undo:
        for name, value in fixtures.items():
            if isinstance(value, pytest.MonkeyPatch):
                fixtures[name] = undo.enter_context(pytest.MonkeyPatch.context())
        try:
            test(**fixtures)
        except pytest.skip.Exception as skipped:
            return str(skipped.msg)
        except Exception as error:
            if terminal:
                _debug(error, terminal)
            raise
    return None


@contextlib.contextmanager
def _by_value(module: Any) -> Iterator[None]:
    """During the ``with`` block, pickle the functions of ``module`` by value.

    The ranks then get the asserts of the functions as pytest has rewritten them. If the functions were pickled by name,
    the ranks would import the module without pytest, and its asserts would not be rewritten.
    """
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _told_by_all(error: RankError) -> str:
    """Return a text that shows each different traceback once, below the names of the ranks that have it."""
    ranks_of = dict[str, list[int]]()  # maps each traceback to the ranks that have it
    for rank, failure in error.failures.items():
        cause = failure.__cause__
        text = cause.tb if isinstance(cause, RemoteTraceback) else f"{type(failure).__name__}: {failure}\n"
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"On {rank_names(ranks)}:\n\n{text}" for text, ranks in ranks_of.items())

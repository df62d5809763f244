"""Tests that run on several ranks: a plugin for pytest, which installing the package installs.

A test that is marked with ``@pytest.mark.ranks(2)`` runs on two ranks at once, each a process on the CPU, in a pool
that is kept for the next test. It gets the same fixtures and parameters, and has the same rewritten asserts, as a test
in pytest's own process::

    @pytest.mark.ranks(2)
    def test_the_sum_is_that_of_all_ranks() -> None:
        total = torch.ones(1) * (initialize_ddp().rank + 1)
        dist.all_reduce(total)
        assert total.item() == 3

The test fails if it fails on any rank: the report shows each failure once, with the ranks that have it and their
traceback there. What the ranks print is captured as usual, each line with its rank before it. A test that rank 0 skips
is skipped. Fixtures are set up in pytest's own process, and their values are sent to the ranks: what cannot be pickled,
as ``capsys``, is a `TransferError` that names it. ``monkeypatch`` is each rank's own. With ``--pdb`` the first rank
that fails gets the terminal.
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

_TOLD = pytest.StashKey[str]()
_POOLS = pytest.StashKey[dict[int, ParallelExecutor]]()
_held: list[IO[str]] = []  # on a rank, the terminal that it debugs on


def pytest_configure(config: pytest.Config) -> None:
    """There are no ranks yet."""
    config.stash[_POOLS] = {}


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End the ranks after the last test. They write what they have covered then, and pytest-cov reports after this."""
    try:
        return (yield)
    finally:
        for pool in session.config.stash[_POOLS].values():
            pool.shutdown()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call the test on every rank, if it is marked so."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        pool = pool_of(pyfuncitem.config, *marker.args, **marker.kwargs)
        with _by_value(pyfuncitem.module), _debugging(pyfuncitem.config) as terminal:
            reasons = pool.run(_call, pyfuncitem.obj, terminal, **fixtures)
    except RankError as error:
        pyfuncitem.stash[_TOLD] = _told_by_all(error)
        if terminal:
            raise bdb.BdbQuit from None  # or pytest would debug our own frames now
        raise error.exceptions[0] from None  # of its own type, as a test that is expected to fail may ask for
    except (ParallelError, TypeError, ValueError) as error:  # of a fixture that cannot be sent, of the marker
        pytest.fail(str(error), pytrace=False)
    if reasons[0] is not None:
        pytest.skip(reasons[0])
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the ranks tell, in the place of a traceback that ends where they were called."""
    report = yield
    if report.when == "call" and report.failed and (tracebacks := item.stash.get(_TOLD, None)):
        report.longrepr = tracebacks
    return report


def pool_of(config: pytest.Config, n: Any = None) -> ParallelExecutor:
    """Return the pool of as many ranks as a marker says."""
    n = count("n of @pytest.mark.ranks(n)", n)
    pools = config.stash[_POOLS]
    if n not in pools:
        pools[n] = ParallelExecutor(num_workers=n, devices="cpu", prefix_output=True, pass_device=False)
    return pools[n]


@contextlib.contextmanager
def _debugging(config: pytest.Config) -> Iterator[str | None]:
    """Leave the terminal to the ranks, with ``--pdb``: its name."""
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
    """Debug where a test has failed, if this rank is the first; a later one waits here until the run has ended it."""
    stdin = open(terminal)  # noqa: SIM115  # held until the next test
    fcntl.flock(stdin, fcntl.LOCK_EX)
    _held.append(stdin)
    with open(terminal, "w") as stdout:
        print(f"\nOn rank {current_world().rank}: {summary(error)}", file=stdout)
        debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


def _call(test: Callable[..., object], terminal: str | None, /, **fixtures: Any) -> str | None:
    """Run the test on this rank; why, if it skips itself."""
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
    """Send the functions of a module as they are here, with rewritten asserts, and not for the ranks to import."""
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _told_by_all(error: RankError) -> str:
    """Return the tracebacks of the ranks that have failed, equal ones together."""
    ranks = dict[str, list[int]]()
    for rank, failure in error.failures.items():
        cause = failure.__cause__
        text = cause.tb if isinstance(cause, RemoteTraceback) else f"{type(failure).__name__}: {failure}\n"
        ranks.setdefault(text, []).append(rank)
    return "\n".join(f"On {rank_names(some)}:\n\n{text}" for text, some in ranks.items())

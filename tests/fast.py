"""`make test-fast`: a test that starts a process, or runs for seconds, is left to `make test`.

Loaded with ``-p tests.fast``. A test that starts a process is skipped at that moment, so none has
to say that it does. Engines, Ray, torchrun, browsers, servers with a command of their own and the
sandbox's executions are processes. A test that fails without one fails here.

``@pytest.mark.slow`` is for what this cannot see: seconds of work in one process, and a process
that a thread starts.
"""

import gc
import multiprocessing.util
import os
import sys
from collections.abc import Generator
from typing import Any, ClassVar

import pytest

REASON = "starts a process"
STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_spawn = multiprocessing.util.spawnv_passfds  # tells no audit hook


class _Now:
    """The test that runs, and whether it was about to start a process."""

    test: pytest.Item | None = None
    started: bool = False
    failures: ClassVar[list[BaseException]] = []  # of refused processes; a fixture of many tests raises one again


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event in STARTS and _Now.test is not None:
        _Now.started = True
        raise pytest.skip.Exception(REASON)  # no Exception, so the code under test does not catch it


def _refuse_spawn(*arguments: Any) -> int:
    _refuse("os.spawn", arguments)
    return _spawn(*arguments)


def pytest_configure() -> None:
    multiprocessing.util.spawnv_passfds = _refuse_spawn
    sys.addaudithook(_refuse)


def pytest_collection_finish() -> None:
    gc.freeze()  # else every collection looks through all that torch and verl have imported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _Now.test, _Now.started = item, False
    try:
        return (yield)
    finally:
        _Now.test = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Refused in a task or behind an `except BaseException`, a process is missed somewhere else."""
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        if _Now.started:
            _Now.failures.append(error)
        if any(error is known for known in _Now.failures):
            report.outcome, report.longrepr = "skipped", (str(item.path), 1, f"Skipped: {REASON}")
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    left = sum(REASON in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
    spent = os.times()
    terminalreporter.write_line(f"{left} tests start a process: `make test` runs them.")
    terminalreporter.write_line(f"{spent.user + spent.system:.0f} s of one core.")

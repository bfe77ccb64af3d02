"""A unit test starts no process: it fails at the moment it tries.

Put a test that needs one into sandbox/, parity/, engine/, e2e/ or nightly/ (CONTRIBUTING.md). The
reward's own checker processes are allowed, because `judge` is what these tests call, and so is the
linker that ctypes asks for a library when another package is imported.
"""

import gc
import multiprocessing.util
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
HERE = Path(__file__).parent
ALLOWED = ("retool_mcore/reward/", "ctypes/util.py", "/package_info.py")  # the last: Megatron asks git for its commit
_running: list[pytest.Item] = []
_spawn = multiprocessing.util.spawnv_passfds  # raises no audit event


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if event not in STARTS or not _running:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in ALLOWED):
            return
        frame = frame.f_back
    # pytest's outcome is no Exception, so the code under test does not catch it
    pytest.fail(f"{_running[-1].nodeid} starts a process, and tests/unit starts none: move it to another folder")


def _refuse_spawn(*arguments: Any) -> int:
    _refuse("os.spawn", arguments)
    return _spawn(*arguments)


def pytest_configure() -> None:
    multiprocessing.util.spawnv_passfds = _refuse_spawn
    sys.addaudithook(_refuse)


def pytest_collection_finish() -> None:
    gc.freeze()  # or every collection walks through all that torch and verl have imported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not item.path.is_relative_to(HERE):  # pytest calls this hook for the tests of all folders
        return (yield)
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()

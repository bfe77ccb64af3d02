"""Sandboxes at every level this machine gives, opened once: a level that is refused is skipped with
its reason.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox
from tests.sandbox.ordinary import OrdinaryUser, make_ordinary_user
from tests.sandbox.sandbox_helpers import LEVELS, open_at

SECRET = "a secret of the training process"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in gVisor containers are long ones: each execution starts a kernel, and runsc is on few
    machines.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = {str(value) for value in callspec.params.values()} if callspec is not None else set[str]()
        if values & {"gvisor", "container"} or "containers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", params=LEVELS, ids=str)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """One sandbox per level, shared by all tests: each of them also shows that the ones before left
    it whole.
    """
    os.environ["RETOOL_TEST_SECRET"] = SECRET
    async with await open_at(request.param, workers=2) as opened:
        yield opened


@pytest.fixture(scope="session")
async def strongest() -> AsyncIterator[LocalSandbox]:
    """The strongest level below gvisor, for tests that are not about levels."""
    async with LocalSandbox(min_level=Level.RLIMITS, workers=2, sessions=2, attempts=1) as opened:
        yield opened


@pytest.fixture(scope="session")
async def landlock() -> AsyncIterator[LocalSandbox]:
    async with await open_at(Level.LANDLOCK, workers=2) as opened:
        yield opened


@pytest.fixture(scope="session")
async def containers() -> AsyncIterator[LocalSandbox]:
    """gvisor, for tests of what is its alone."""
    async with await open_at(Level.GVISOR, workers=2) as opened:
        yield opened


@pytest.fixture(scope="session", params=["forked", "container"])
async def interpreter(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """Both ways an interpreter comes to be, for tests of what it does: forked from a warm one,
    alone in a container.
    """
    forked = LocalSandbox(min_level=Level.RLIMITS, workers=2, sessions=2, attempts=1)
    async with forked if request.param == "forked" else await open_at(Level.GVISOR, workers=2, sessions=2) as opened:
        yield opened


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[OrdinaryUser]:
    """Another user than root, with a home outside of pytest's directories, which it closes."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        yield make_ordinary_user(Path(home))

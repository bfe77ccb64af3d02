"""Sandboxes at every level this machine gives, opened once: a level that is refused is skipped with
its reason.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.ordinary import OrdinaryUser, make_ordinary_user
from tests.sandbox.sandbox_helpers import LEVELS, open_at

AT_EVERY_LEVEL = ("test_table", "test_programs")  # what differs at rlimits, which is for code that one trusts
SECRET = "a secret of the training process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only `make test-long` runs the other tests at rlimits, too."""
    for item in items:
        level = item.callspec.params.get("sandbox") if hasattr(item, "callspec") else None  # type: ignore[attr-defined]
        if level == Level.RLIMITS and item.path.stem not in AT_EVERY_LEVEL:
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
    """The strongest level of this machine, for tests that are not about levels."""
    async with LocalSandbox(min_level=Level.RLIMITS, workers=2, sessions=2, attempts=1) as opened:
        yield opened


@pytest.fixture(scope="session")
async def landlock() -> AsyncIterator[LocalSandbox]:
    async with await open_at(Level.LANDLOCK, workers=2) as opened:
        yield opened


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[OrdinaryUser]:
    """Another user than root, with a home outside of pytest's directories, which it closes."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        yield make_ordinary_user(Path(home))

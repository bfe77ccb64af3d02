"""Fixtures: one sandbox per isolation level, opened once.

Tests of a level that this machine does not support are skipped with the reason.
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

# Only `make test-long` runs these modules, and the tests at level rlimits of the others.
LONG = ("test_host_files", "test_interpreter", "test_soak", "test_uids")
SECRET = "a secret of the training process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark LONG modules and tests at rlimits: `make test` runs only the two strongest levels."""
    here = Path(__file__).parent
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}  # type: ignore[attr-defined]
        if item.path.parent == here and (item.path.stem in LONG or Level.RLIMITS in params.values()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", params=LEVELS, ids=str)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """One sandbox per level, shared by all tests.

    So each test also checks that the earlier ones left the sandbox usable.
    """
    os.environ["RETOOL_TEST_SECRET"] = SECRET
    async with await open_at(request.param, workers=2) as opened:
        yield opened


@pytest.fixture(scope="session")
async def strongest() -> AsyncIterator[LocalSandbox]:
    """The strongest level of this machine, for tests that are not about levels."""
    async with LocalSandbox(min_level=Level.RLIMITS, workers=2, sessions=2) as opened:
        yield opened


@pytest.fixture(scope="session")
async def landlock() -> AsyncIterator[LocalSandbox]:
    async with await open_at(Level.LANDLOCK, workers=2) as opened:
        yield opened


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[OrdinaryUser]:
    """A user other than root. pytest closes its directories to others, so the home is elsewhere."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        yield make_ordinary_user(Path(home))

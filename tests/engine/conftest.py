import pytest

from retool_mcore.sandbox import open_sandbox


@pytest.fixture(scope="module")
async def sandbox():
    async with open_sandbox("local", min_level="rlimits", workers=2) as opened:
        yield opened

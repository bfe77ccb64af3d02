"""The README's table says what this machine gives."""

import os

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from tests.sandbox import table
from tests.sandbox.ordinary import OrdinaryUser

MEANS = {"yes": (True, True), "as root": (True, False), "as a user": (False, True), "**no**": (False, False)}


def written(level: Level, *, as_root: bool) -> dict[str, bool]:
    """The README's column of ``level``."""
    text = table.README.read_text()
    rows = text[text.index(table.START) : text.index(table.END)].splitlines()[3:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    column = 1 + table.LEVELS.index(level)
    return {row[0]: MEANS[row[column]][0 if as_root else 1] for row in cells}


@pytest.mark.parametrize("level", table.LEVELS, ids=str)
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests are not run by root")
async def test_what_is_written_holds_for_root(level: Level):
    try:
        found = await table.facts(level)
    except SandboxUnavailable as error:
        pytest.skip(f"no {level} here: {error}")
    assert found == written(level, as_root=True)


@pytest.mark.parametrize("level", table.LEVELS, ids=str)
def test_what_is_written_holds_for_an_ordinary_user(level: Level, ordinary_user: OrdinaryUser):
    assert ordinary_user.facts(level) == written(level, as_root=False)

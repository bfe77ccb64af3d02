"""The README's table matches the results on this machine."""

import os

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from tests.sandbox import table
from tests.sandbox.ordinary import OrdinaryUser

MEANS = {"yes": (True, True), "as root": (True, False), "as a user": (False, True), "**no**": (False, False)}


def readme_column(level: Level, *, as_root: bool) -> dict[str, bool]:
    """Return the README's column of ``level``."""
    text = table.README.read_text()
    rows = text[text.index(table.START) : text.index(table.END)].splitlines()[3:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    column = 1 + table.LEVELS.index(level)
    return {row[0]: MEANS[row[column]][0 if as_root else 1] for row in cells}


@pytest.mark.parametrize("level", table.LEVELS, ids=str)
@pytest.mark.skipif(os.geteuid() != 0, reason="requires root")
async def test_the_table_is_correct_for_root(level: Level):
    try:
        prevented = await table.run_attacks(level)
    except SandboxUnavailable as error:
        pytest.skip(f"no {level} here: {error}")
    assert prevented == readme_column(level, as_root=True)


@pytest.mark.parametrize("level", table.LEVELS, ids=str)
def test_the_table_is_correct_for_an_ordinary_user(level: Level, ordinary_user: OrdinaryUser):
    assert ordinary_user.run_attacks(level) == readme_column(level, as_root=False)

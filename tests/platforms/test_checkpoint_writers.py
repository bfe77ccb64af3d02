"""Megatron's checkpoint writers under our patch: the same files, and a writer that dies is told."""

from pathlib import Path

import pytest

from retool_mcore.platforms.patches_megatron import MEGATRON_PATCHES
from tests.platforms.writers import write

pytestmark = [pytest.mark.usefixtures("verl_on_cpu", "patched"), pytest.mark.slow]  # threads start the writers
PATCH = MEGATRON_PATCHES[0]


def test_files_and_reports_are_the_originals(tmp_path: Path):
    ours = write(tmp_path / "ours", 3)
    PATCH.revert()
    try:
        theirs = write(tmp_path / "theirs", 3)
    finally:
        PATCH.apply()
    assert ours == theirs and [len(ours[number]) for number in (0, 1, 2)] == [2, 2, 2]
    for path in sorted((tmp_path / "theirs").iterdir()):
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("killed", [0, 2])
def test_a_writer_that_is_killed_ends_the_save(tmp_path: Path, killed: int):
    failure = write(tmp_path, 3, killed)
    assert isinstance(failure, RuntimeError) and "ended with code -9" in str(failure)


def test_a_writer_that_fails_says_why(tmp_path: Path):
    (tmp_path / "__1.distcp").mkdir()
    assert isinstance(write(tmp_path, 2), IsADirectoryError)

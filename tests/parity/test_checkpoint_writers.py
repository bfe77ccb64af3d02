"""Megatron's checkpoint writers under our patch: the same files, and an error if a writer dies."""

import queue
import time
from functools import partial
from pathlib import Path

import pytest

from retool_mcore.platforms.patches_megatron import WRITER_PATCH, Results
from retool_mcore.verl.checkpoint import Writer
from tests.parity.writers import write

pytestmark = [pytest.mark.usefixtures("verl_on_cpu", "patched")]  # threads start the writers
PATCH = WRITER_PATCH


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


def test_a_save_tells_its_error_and_that_its_writer_was_killed(tmp_path: Path):
    killed, failed = Writer([partial(write, tmp_path, 3, 2)]), Writer([(tmp_path / "absent").read_text])
    assert killed.wait() == "the process that wrote it ended with exit code -9"
    assert str(failed.wait()).startswith("FileNotFoundError: [Errno 2]")
    (tmp_path / "full" / "__1.distcp").mkdir(parents=True)
    assert isinstance(write(tmp_path / "full", 3), IsADirectoryError)


def test_a_writer_has_the_memory_of_the_moment_it_was_started(tmp_path: Path):
    words = ["before"]
    writer = Writer([lambda: time.sleep(0.2), lambda: (tmp_path / "words").write_text(words[0])])
    words[0] = "after"
    assert writer.wait() is None
    assert (tmp_path / "words").read_text() == "before"


def test_each_save_reads_what_its_own_writer_has_reported():
    actor, critic = Results(), Results()
    writers = [Writer([partial(each.put, name)]) for each, name in ((actor, "actor"), (critic, "critic"))]
    assert [writer.wait() for writer in writers] == [None, None]
    assert (critic.get_nowait(), actor.get_nowait()) == ("critic", "actor")
    with pytest.raises(queue.Empty):
        Results().get_nowait()

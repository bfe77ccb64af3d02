"""The process that writes a checkpoint, and the results of Megatron's writer under our patch."""

import os
import queue
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from retool_mcore.platforms.patches_megatron import Results
from retool_mcore.verl.checkpoint import Writer

pytestmark = [pytest.mark.usefixtures("verl_on_cpu")]


def test_a_save_tells_its_error_and_that_its_writer_was_killed(tmp_path: Path):
    killed = Writer([lambda: os.kill(os.getpid(), signal.SIGKILL)])
    failed = Writer([(tmp_path / "absent").read_text])
    assert killed.wait() == "the process that wrote it ended with exit code -9"
    assert str(failed.wait()).startswith("FileNotFoundError: [Errno 2]")


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

"""What is told of a checkpoint's writers: a full disk, an error of theirs, their end."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from retool_mcore.errors import CheckpointError
from retool_mcore.run.full_disk import explain_full_disk
from retool_mcore.verl.async_save import Writer, explain_failed_write


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("I/O error: No space left on device (28)"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    ],
)
def test_a_full_disk_is_told_whatever_library_meets_it(error: Exception, tmp_path: Path):
    said = r"no space is left for .*step_4\. Free some"
    with pytest.raises(CheckpointError, match=said), explain_full_disk(tmp_path / "step_4", "Free some."):
        raise error


def test_what_megatrons_writers_met_is_told_on_every_rank(tmp_path: Path):
    from torch.distributed.checkpoint.api import CheckpointException

    full = {1: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)}
    tell = explain_failed_write("step_4/actor")
    with pytest.raises(CheckpointError, match="no space is left for"), explain_full_disk(tmp_path, "Free some."), tell:
        raise CheckpointException("write", full)
    said = "step_4/actor could not be written: rank 0 says why"
    with pytest.raises(CheckpointError, match=said), explain_failed_write("step_4/actor"):
        raise CheckpointException("write", {})


def test_a_writer_tells_its_error_and_that_it_was_killed():
    def fail() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    failed, killed = Writer([fail]), Writer([lambda: time.sleep(60)])
    assert killed.running
    killed.kill()
    assert failed.wait() == "OSError: [Errno 30] Read-only file system"
    assert killed.wait() == "the process that wrote it ended with exit code -9"
    assert Writer([]).wait() is None


def test_a_writer_does_not_wait_for_a_process_that_was_killed_under_it():
    def wait_for_the_dead() -> None:
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(1)
        os.kill(child.pid or 0, signal.SIGKILL)
        time.sleep(60)  # as Megatron does: it waits for what the child would have sent

    started = time.monotonic()
    assert Writer([wait_for_the_dead]).wait() == "a process that wrote a file was ended by SIGKILL"
    assert time.monotonic() - started < 30


def test_a_writer_has_the_memory_of_the_moment_it_was_started(tmp_path: Path):
    words = ["before"]
    writer = Writer([lambda: time.sleep(0.2), lambda: (tmp_path / "words").write_text(words[0])])
    words[0] = "after"
    assert writer.wait() is None
    assert (tmp_path / "words").read_text() == "before"


def test_another_error_of_a_writer_stays_what_it_is(tmp_path: Path):
    with pytest.raises(KeyError), explain_full_disk(tmp_path, "Free some."):
        raise KeyError("a bug")

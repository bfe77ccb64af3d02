"""What is told of a checkpoint's writers: a full disk, an error of theirs, their end."""

import errno
import os
from pathlib import Path

import pytest

from retool_mcore.errors import CheckpointError
from retool_mcore.run.folder import explain_full_disk
from retool_mcore.verl.checkpoint import explain_failed_write


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


def test_another_error_of_a_writer_stays_what_it_is(tmp_path: Path):
    with pytest.raises(KeyError), explain_full_disk(tmp_path, "Free some."):
        raise KeyError("a bug")

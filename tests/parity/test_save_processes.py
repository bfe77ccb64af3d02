"""Writers of asynchronous checkpoints: errors, kills, full disks, memory."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.errors import CheckpointError
from retool_mcore.run import checkpoint
from retool_mcore.run.export import export
from retool_mcore.verl.checkpoint import Writer
from tests.unit.run.test_checkpoints import run_in, steps


def test_a_writer_tells_its_error_and_that_it_was_killed():
    def fail() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    failed, killed = Writer([fail]), Writer([lambda: time.sleep(60)])
    assert killed.running
    killed.kill()
    assert failed.wait() == "OSError: [Errno 30] Read-only file system"
    assert killed.wait() == "the process that wrote it ended with exit code -9"
    assert Writer([]).wait() is None


def test_a_writer_has_the_memory_of_the_moment_it_was_started(tmp_path: Path):
    words = ["before"]
    writer = Writer([lambda: time.sleep(0.2), lambda: (tmp_path / "words").write_text(words[0])])
    words[0] = "after"
    assert writer.wait() is None
    assert (tmp_path / "words").read_text() == "before"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def write_model(folder: str, step: int) -> None:
    """2 MiB, and 8 more for step 100."""
    model = Path(folder) / "model" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1 << 19)}, model / "model.safetensors")
    if step > 50:
        torch.save({"moment": torch.ones(2 << 20)}, model / "optimizer")


def test_a_checkpoint_and_an_export_that_find_no_room_are_one_error_and_give_it_back(small_disk: Path):
    config = run_in(small_disk)
    with checkpoint.Saver(config, write_model) as saver:
        saver.save(50)
    left = os.statvfs(small_disk).f_bavail
    message = r"no space is left for .*global_step_100\. Its files were deleted; the checkpoint before it is kept\."
    with pytest.raises(CheckpointError, match=message), checkpoint.Saver(config, write_model) as saver:
        saver.save(100)
    assert os.statvfs(small_disk).f_bavail == left and steps(config) == [50]
    (small_disk / "other").write_bytes(bytes(1 << 19))
    with pytest.raises(
        CheckpointError, match=r"no space is left for .*/out\. Nothing was exported\. Free some space, or"
    ):
        export(config.run.dir, small_disk / "out")
    assert sorted(path.name for path in small_disk.iterdir()) == ["other", "sft_tiny_cpu"]

"""checkpoint.asynchronous and checkpoint.reshardable, as a user runs them.

Steps continue while files are written, and a kill costs that checkpoint only. The disk of this test
delays what is written for step 6: a ``sitecustomize`` in every process of the run replaces
``os.fsync``, which Megatron's writers end each file with.
"""

from pathlib import Path

import pytest

from retool_mcore.run.checkpoint import complete_checkpoints
from tests.e2e.commands import (
    argv_sft,
    assert_nothing_left,
    exact_metrics,
    kill,
    last_step,
    marked_processes,
    sft_settings,
    started,
    succeed,
    wait_until,
)
from tests.e2e.conftest import TP2

DISK = """
import os, time

fsync = os.fsync

def fsync_of_this_disk(file):
    if "/global_step_6/" in os.readlink(f"/proc/self/fd/{file}"):
        while os.path.exists("FOLDER/slow"):
            time.sleep(0.05)
    return fsync(file)

os.fsync = fsync_of_this_disk
"""


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DISK.replace("FOLDER", str(folder)))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def argv(task: Path, root: Path, *more: str) -> list[str]:
    return argv_sft(*sft_settings(task, root, "checkpoint.every_steps=3", *TP2, *more))


def saved_steps(run_dir: Path) -> list[int]:
    return [saved.step for saved in complete_checkpoints(run_dir / "checkpoints")]


def weights(run_dir: Path, step: int) -> bytes:
    """Those of the step's checkpoint."""
    return (run_dir / f"checkpoints/global_step_{step}/actor/model/huggingface/model.safetensors").read_bytes()


def test_a_save_killed_in_the_middle_leaves_the_one_before(
    whole: Path, task: Path, tmp_path: Path, mark: str, disk: Path
):
    killed = tmp_path / "killed"
    settings = ("run.name=killed", "checkpoint.asynchronous=true")
    (disk / "slow").touch()
    with started(argv(task, tmp_path, *settings), mark):
        wait_until(lambda: last_step(killed) >= 7, "a step after that of the save in flight", 300)
        assert saved_steps(killed) == [3] and (killed / "checkpoints" / "global_step_6").exists()
        # Ranks are the oldest of these: a writer is a fork, under the same command line.
        kill(min(pid for pid, command in marked_processes(mark).items() if "-u launch/sft_mcore.py" in command))
        assert_nothing_left(mark)
    assert saved_steps(killed) == [3]
    (disk / "slow").unlink()
    succeed(argv(task, tmp_path, *settings, "checkpoint.every_steps=4"), mark)
    assert sorted(path.name for path in (killed / "checkpoints").glob("global*")) == ["global_step_4", "global_step_8"]
    assert saved_steps(killed) == [4, 8]
    assert exact_metrics(killed) == exact_metrics(whole)
    for step in (4, 8):  # each of two asynchronous saves in one run has the weights of its own step
        assert weights(killed, step) == weights(whole, step)
    assert weights(killed, 4) != weights(killed, 8)
    exports = [(run_dir / "export" / "model.safetensors").read_bytes() for run_dir in (killed, whole)]
    assert exports[0] == exports[1]

"""checkpoint.asynchronous and checkpoint.reshardable, as a user runs them.

Steps go on while files are written, and a kill or a full disk costs that checkpoint only. The disk
of these tests holds or refuses what is written for step 8: a ``sitecustomize`` in every process of
the run replaces ``os.fsync``, which Megatron's writers end each file with.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.metrics import read_metrics
from tests.e2e.commands import (
    argv_sft,
    assert_nothing_left,
    assert_one_error,
    kill,
    last_step,
    marked_processes,
    run,
    started,
    wait_until,
)

pytestmark = pytest.mark.slow

DISK = """
import errno, os, time

fsync = os.fsync

def fsync_of_this_disk(file):
    if "/global_step_8/" in os.readlink(f"/proc/self/fd/{file}"):
        if os.path.exists("FOLDER/full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
    files = [f"data.train_file={task}/sft_train.parquet", f'validation.files=["{task}/sft_val.parquet"]']
    steps = ("train.steps=10", "validation.every=0", "checkpoint.every_steps=4", "train.global_batch=16")
    return argv_sft(f"run.root={root}", f"model.path={task}/model", *files, *steps, "parallel.tp=2", *more)


def saved_steps(run_dir: Path) -> list[int]:
    return [saved.step for saved in complete_checkpoints(run_dir / "checkpoints")]


def result(run_dir: Path) -> tuple[list[float], bytes]:
    """The loss of every step, and the exported weights after the last."""
    losses = [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]
    weights = run_dir / "checkpoints" / "global_step_10" / "actor" / "model" / "huggingface" / "model.safetensors"
    return losses, weights.read_bytes()


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run whose checkpoints of steps 8 and 10 can be resumed on any layout."""
    root = tmp_path_factory.mktemp("whole")
    done = run(argv(task, root, "run.name=whole", "checkpoint.reshardable=true"), "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "whole"


def test_a_run_continues_on_another_layout_from_a_path(whole: Path, task: Path, tmp_path: Path, mark: str):
    path = whole / "checkpoints" / "global_step_8"
    done = run(argv(task, tmp_path, "run.name=dp2", "parallel.tp=1", f"checkpoint.resume={path}"), mark)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, _ = result(tmp_path / "dp2")
    assert losses == pytest.approx(result(whole)[0][8:], abs=1e-4)
    assert "start afresh from" in (tmp_path / "dp2" / "logs" / "sft_rank0.log").read_text()


def test_a_save_killed_in_the_middle_leaves_the_one_before(
    whole: Path, task: Path, tmp_path: Path, mark: str, disk: Path
):
    killed = tmp_path / "killed"
    settings = ("run.name=killed", "checkpoint.asynchronous=true")
    (disk / "slow").touch()
    with started(argv(task, tmp_path, *settings), mark):
        wait_until(lambda: last_step(killed) >= 9, "a step after that of the save in flight", 120)
        assert saved_steps(killed) == [4] and (killed / "checkpoints" / "global_step_8").exists()
        # Ranks are the oldest of these: a writer is a fork, under the same command line.
        kill(min(pid for pid, command in marked_processes(mark).items() if "-u launch/sft_mcore.py" in command))
        assert_nothing_left(mark)
    assert saved_steps(killed) == [4]
    (disk / "slow").unlink()
    done = run(argv(task, tmp_path, *settings, "checkpoint.every_steps=5"), mark)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in (killed / "checkpoints").glob("global*")) == ["global_step_10", "global_step_5"]
    assert saved_steps(killed) == [5, 10]
    assert result(killed) == result(whole)
    assert_nothing_left(mark)


def test_a_disk_that_fills_up_behind_the_steps_is_one_clear_error(task: Path, tmp_path: Path, mark: str, disk: Path):
    (disk / "full").touch()
    done = run(argv(task, tmp_path, "run.name=full", "checkpoint.asynchronous=true"), mark)
    assert_one_error(done, "no space is left for")
    assert "[rank" not in done.stderr  # torch's mark of a rank's traceback
    assert saved_steps(tmp_path / "full") == [4]
    assert_nothing_left(mark)

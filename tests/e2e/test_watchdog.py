"""A run that writes nothing for train.stall_s seconds is ended; one that is only slow is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.errors import EXIT_RETRYABLE
from retool_mcore.train.watchdog import modification_times, remove_shared_memory

ROOT = Path(__file__).parents[2]


def run(what: str, root: Path, stall_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.e2e.stalled_run", what, str(root), str(stall_s)]
    environment = {**os.environ, **env}
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_silent_run_ends_with_one_error_and_the_stacks_of_its_processes(tmp_path: Path):
    done = run("still", tmp_path, 1.0)
    assert done.returncode == 2, done.stderr
    assert "was finished for" in done.stdout and "train.stall_s = 1." in done.stdout
    assert "resumes from the beginning" in done.stdout
    (stacks,) = (tmp_path / "run" / "logs").glob("stall-*.txt")
    text = stacks.read_text(encoding="utf-8")
    assert "wait_for_ever" in text, "the stack of the process itself"
    assert "import time; time.sleep(60)" in text, "its child, with its command"


@pytest.mark.parametrize("stall_s", [3.0, 0.0])
def test_a_step_longer_than_the_limit_continues_while_its_parts_end_and_0_is_no_limit(tmp_path: Path, stall_s: float):
    done = run("working", tmp_path, stall_s)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_run_that_waits_for_a_dead_process_is_freed_and_tells_which(tmp_path: Path):
    done = run("lost", tmp_path, 60.0)
    assert (done.returncode, done.stdout) == (2, "a worker died\n"), done.stderr


def test_a_run_that_heeds_no_signal_ends_all_the_same_and_may_be_started_again(tmp_path: Path):
    """Its main thread waits for a rank beyond a cable that is out, and its output goes to a log."""
    done = run("deaf", tmp_path, 1.0, RANK="1")
    assert done.returncode == EXIT_RETRYABLE
    assert done.stderr.count("error: ") == 1 and done.stderr.startswith("error: rank 1: no turn, pass,")
    assert len(list((tmp_path / "run" / "logs").glob("stall-*-rank1.txt"))) == 1


@pytest.mark.parametrize(
    "sign", ["alive", "start.jsonl", "metrics.jsonl", "trajectories/trajectories.jsonl", "checkpoints/global_step_2"]
)
def test_what_a_run_writes_is_a_sign_of_life(tmp_path: Path, sign: str):
    path = tmp_path / sign
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    os.utime(path.parent, (1000, 1000))
    before = modification_times(tmp_path)
    os.utime(path, (500, 500))
    after = modification_times(tmp_path)
    assert before != after and after[path] == 500 * 10**9, "also an earlier time: a clock was set back"


def test_shared_memory_of_processes_that_have_ended_is_removed(tmp_path: Path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"cuda.shm.0.{ended.pid:x}.1", f"sem.loky-{ended.pid}-abc"]
    others = [f"cuda.shm.0.{os.getpid():x}.1", f"sem.loky-{os.getpid()}-abc", "sem.loky-x-abc", f"own-{ended.pid}-a"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    remove_shared_memory([ended.pid, os.getpid()], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)

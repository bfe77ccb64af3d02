"""What a killed start left behind is found by the run's folder, and nothing else is touched."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from retool_mcore.errors import RunError
from retool_mcore.run import leftovers
from retool_mcore.run.leftovers import RUN_ENV, end_leftovers

WAIT = "import signal, sys, time; {}; print('up', flush=True); time.sleep(120)"
Start = Callable[..., psutil.Process]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a process of a run, as an orphan: its parent ends at once."""
    monkeypatch.setenv(RUN_ENV, "")  # restored, as end_leftovers sets it
    started: list[psutil.Process] = []

    def begin(run_dir: Path, first: str = "pass") -> psutil.Process:
        inner = [sys.executable, "-c", WAIT.format(first)]
        outer = f"import subprocess; child = subprocess.Popen({inner!r}); print(child.pid, flush=True)"
        env = {**os.environ, RUN_ENV: str(run_dir.resolve())}
        done = subprocess.Popen([sys.executable, "-c", outer], env=env, stdout=subprocess.PIPE, text=True)
        assert done.stdout is not None
        process = psutil.Process(int(done.stdout.readline()))
        assert done.stdout.readline() == "up\n"
        done.wait()
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.is_running():
            process.kill()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_leftovers_of_this_run_are_ended_and_named(tmp_path: Path, start: Start):
    left = [start(tmp_path / "run", first) for first in ("pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")]
    other = start(tmp_path / "run2", "pass")
    began = time.monotonic()
    note = end_leftovers(tmp_path / "run")
    assert time.monotonic() - began >= 5.0, "one of the two heeded no SIGTERM"
    assert [alive(process) for process in (*left, other)] == [False, False, True]
    assert f"an earlier start of {tmp_path / 'run'} was killed and had left 2 processes; ended: 2 " in note
    assert not end_leftovers(tmp_path / "run")


def test_a_leftover_is_asked_before_it_is_killed(tmp_path: Path, start: Start):
    said = tmp_path / "said"
    start(tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: (open({str(said)!r}, 'w').close(), sys.exit()))")
    assert "left 1 process;" in end_leftovers(tmp_path)
    assert said.exists()


def test_one_that_nothing_ends_is_an_error(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch):
    """As a process that waits for a device: here no signal reaches it."""
    monkeypatch.setattr(leftovers, "GRACE_S", 0.1)
    monkeypatch.setattr(psutil.Process, "terminate", lambda self: None)
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    process = start(tmp_path)
    with pytest.raises(RunError, match=f"has left process {process.pid}, which SIGKILL does not end"):
        end_leftovers(tmp_path)
    monkeypatch.undo()
    process.kill()


def test_what_this_process_starts_afterwards_bears_the_mark(tmp_path: Path, start: Start, monkeypatch):
    assert end_leftovers(tmp_path / "run") == ""
    child = subprocess.Popen([sys.executable, "-c", WAIT.format("pass")], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert psutil.Process(child.pid).environ()[RUN_ENV] == str(tmp_path / "run")
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "run")
        assert "left 1 process;" in end_leftovers(link), "the same folder by another name"
    finally:
        child.kill()
        child.wait()


def test_the_processes_above_are_no_leftovers(tmp_path: Path, start: Start):
    code = "from pathlib import Path; from retool_mcore.run.leftovers import end_leftovers; "
    code += f"print(repr(end_leftovers(Path({str(tmp_path)!r}))))"
    outer = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode)"
    env = {**os.environ, RUN_ENV: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", outer], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "''"), done.stderr

"""One writer of a run's folder, files that are whole or absent, and the record of the machine."""

import fcntl
import os
import socket
import stat
import tempfile
import threading
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.base import get_platform
from retool_mcore.run import folder
from retool_mcore.run.environment import read_environment, write_environment
from retool_mcore.run.folder import is_locked, lock_run, own_tmpdir, replacing, require_unlocked, write_atomic


def test_a_block_that_fails_leaves_the_old_content_and_no_draft(tmp_path: Path):
    path = tmp_path / "state.json"
    write_atomic(path, "old")
    with pytest.raises(KeyError), replacing(path) as draft:
        draft.write_text("half of the n")
        raise KeyError("step")
    assert path.read_text() == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["state.json"]


def test_bytes_are_on_disk_before_the_name_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, synced = tmp_path / "deep" / "state.json", []
    fsync = os.fsync

    def look(file: int) -> None:
        fsync(file)
        synced.append((Path(os.readlink(f"/proc/self/fd/{file}")).read_text(), path.exists()))

    monkeypatch.setattr(os, "fsync", look)
    write_atomic(path, "new")
    assert synced == [("new", False)]
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "others may read what a run leaves"


def test_a_folder_has_one_writer_and_the_second_gets_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".lock").write_text("123456 on a node of an earlier start")
    said = f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}. Wait for it, stop it, or "
    monkeypatch.setattr(folder, "WAIT_FOR_EXIT_S", 0.1)
    asked = {"go away.": partial(lock_run, another="go away"), "set another run.name.": require_unlocked}
    with lock_run(tmp_path):
        for another, ask in asked.items():
            with pytest.raises(ConfigError) as caught:
                ask(tmp_path)
            assert str(caught.value) == said + another
        lock_run(tmp_path, name=".other").close()
    lock_run(tmp_path).close()


def test_a_run_that_is_ending_does_not_refuse_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = lock_run(tmp_path / "run")
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", lambda seconds: (slept.append(seconds), len(slept) == 3 and held.close()))
    require_unlocked(tmp_path / "run")
    assert len(slept) == 3
    require_unlocked(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path):
    """`retool runs` and `watch` ask for a shared lock for a moment."""
    (tmp_path / ".lock").touch()
    looking = (tmp_path / ".lock").open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.01, looking.close).start()
    with lock_run(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_versions_and_hardware_are_written_and_read(tmp_path: Path):
    write_environment(tmp_path, get_platform("cpu"))
    found = read_environment(tmp_path)
    assert found["versions"]["torch"] == version("torch") and found["versions"]["verl"] == version("verl")
    assert "not installed" not in found["versions"].values()
    memory_gib = psutil.virtual_memory().total / 2**30
    hardware = [found["hardware"][name] for name in ("cores", "memory")]
    assert hardware == [str(os.cpu_count()), f"{memory_gib:.0f} GiB"]


def test_an_error_while_reading_the_hardware_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    platform = get_platform("cpu")

    def facts() -> dict[str, str]:
        raise PlatformError("GPU 3 is taken")

    monkeypatch.setattr(platform, "facts", facts)
    write_environment(tmp_path, platform)
    assert read_environment(tmp_path)["hardware"]["devices"].startswith("unknown: ")
    (tmp_path / "environment.json").write_text("{")
    assert read_environment(tmp_path) == {}


def test_runs_in_one_folder_have_a_tmpdir_each_unless_its_path_is_too_long(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(folder, "LONGEST_TMPDIR", len(str(tmp_path)) + 40)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used = set[str]()
    for run, part in (("a", ""), ("b", ""), ("a", "-engine"), ("a", "x" * 40)):
        with own_tmpdir(tmp_path / run, part):
            used.add(tempfile.gettempdir())
            folder.remove_temporary()
            assert not list(tmp_path.iterdir())
    assert len(used) == 4 and str(tmp_path) in used, "that of the last is unchanged"

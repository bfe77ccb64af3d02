"""One writer of a run's folder, files that are whole or absent, and the record of the machine."""

import os
import socket
import stat
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.base import get_platform
from retool_mcore.run import folder
from retool_mcore.run.environment import read_environment, write_environment
from retool_mcore.run.folder import is_locked, lock_run, replacing, require_unlocked, write_atomic


def test_a_file_has_its_old_content_until_the_new_one_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, synced = tmp_path / "deep" / "state.json", []
    fsync = os.fsync

    def look(file: int) -> None:
        fsync(file)
        synced.append((Path(os.readlink(f"/proc/self/fd/{file}")).read_text(), path.exists()))

    monkeypatch.setattr(os, "fsync", look)
    write_atomic(path, "new")
    assert synced == [("new", False)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "others may read what a run leaves"
    with pytest.raises(KeyError), replacing(path) as draft:
        draft.write_text("half of the n")
        raise KeyError("step")
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_a_folder_has_one_writer_and_the_second_gets_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".lock").write_text("123456 on a node of an earlier start")
    said = f"is in use by process {os.getpid()} on {socket.gethostname()}. Wait for it, stop it, or "
    monkeypatch.setattr(folder, "WAIT_FOR_EXIT_S", 0.1)
    asked = {"go away.": partial(lock_run, another="go away"), "set another run.name.": require_unlocked}
    with lock_run(tmp_path):
        for another, ask in asked.items():
            with pytest.raises(ConfigError, match=said + another):
                ask(tmp_path)
        lock_run(tmp_path, name=".other").close()
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    lock_run(tmp_path).close()


def test_versions_and_hardware_are_recorded_even_where_a_device_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def facts() -> dict[str, str]:
        raise PlatformError("GPU 3 is taken")

    platform = get_platform("cpu")
    monkeypatch.setattr(platform, "facts", facts)
    write_environment(tmp_path, platform)
    found = read_environment(tmp_path)
    assert found["versions"]["torch"] == version("torch") and found["versions"]["verl"] == version("verl")
    assert "not installed" not in found["versions"].values()
    hardware = [found["hardware"][name] for name in ("cores", "memory", "devices")]
    memory_gib = psutil.virtual_memory().total / 2**30
    assert hardware == [str(os.cpu_count()), f"{memory_gib:.0f} GiB", "unknown: GPU 3 is taken"]
    (tmp_path / "environment.json").write_text("{")
    assert read_environment(tmp_path) == {}

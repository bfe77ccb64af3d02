"""A run on one node starts its own Ray cluster, in a folder that only its user can read."""

import os
from pathlib import Path

import pytest

from retool_mcore.errors import PlatformError
from retool_mcore.verl.ray_cluster import ray_folder


def test_rays_folder_is_this_users_short_and_emptied_of_what_a_killed_start_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with ray_folder(tmp_path / "run") as folder, ray_folder(tmp_path / "other") as other:
        assert folder != other
        session = "session_2026-11-25_23-55-35_123456_4194304/sockets/plasma_store"
        assert len(str(folder / session)) <= 107 - 8  # eight digits more, of user and hash, fit
        assert folder.parent.stat().st_mode & 0o077 == 0
        folder.mkdir()
        (folder / "left").touch()
        with ray_folder(tmp_path / "run") as again:
            assert again == folder and not folder.exists()
    stranger = folder.parent.stat().st_uid + 1
    folder.parent.with_name(f"retool-ray-{stranger}").mkdir(exist_ok=True)
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    try:
        with pytest.raises(PlatformError, match="belongs to another user"), ray_folder(tmp_path / "run"):
            pytest.fail("it went on")
    finally:
        folder.parent.with_name(f"retool-ray-{stranger}").rmdir()

"""A run on one node starts its own Ray cluster, in a folder that only its user can read."""

import os
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import PlatformError
from retool_mcore.verl.ray_cluster import ray_arguments, ray_folder
from tests.scenario import ROOT


def test_several_nodes_join_the_cluster_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", [f"run.root={tmp_path}", "cluster.nodes=2"])
    with ray_arguments(config) as arguments:
        assert arguments == {} and os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"


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
    monkeypatch.setattr(os, "getuid", lambda: folder.parent.stat().st_uid + 1)
    (stranger := Path(f"/tmp/retool-ray-{os.getuid()}")).mkdir()
    try:
        with pytest.raises(PlatformError, match="belongs to another user"), ray_folder(tmp_path / "run"):
            pytest.fail("it went on")
    finally:
        stranger.rmdir()

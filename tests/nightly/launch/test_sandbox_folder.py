"""Only the user can enter the folder of a node's sandbox, where its socket is."""

import os
import sys
import uuid
from pathlib import Path

import pytest

from launch import nodes
from retool_mcore.errors import PlatformError
from retool_mcore.sandbox.supervisor.slots import remove_stale
from tests.scenario import ROOT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_folders_are_the_users_alone_and_no_other_sandbox_sweeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parent, processes = tmp_path / "retool-sandboxes-1", nodes.Processes(grace_s=1)
    monkeypatch.delenv("SANDBOX_DIR", raising=False)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(nodes, "sandbox_folder", lambda _: parent / "mine")
    node = nodes.find_node("rl", ["configs/rl_tiny_cpu.toml", f"run.name={uuid.uuid4().hex}"], dry_run=False)
    monkeypatch.delenv("RETOOL_NODE_SETTINGS")
    old = os.umask(0)
    try:
        nodes.start_sandbox(node, processes, nodes.sandbox_command(node))
    finally:
        os.umask(old)
        nodes.end(processes.services, 5)
    assert [folder.stat().st_mode & 0o777 for folder in (parent, parent / "mine")] == [0o700, 0o700]
    # A sandbox that opens removes what killed ones left, by name, age and lock.
    os.utime(parent, (0, 0))
    remove_stale(tmp_path)
    assert (parent / "mine").is_dir()
    os.chown(parent, 65534, 65534)
    with pytest.raises(PlatformError, match=f"{parent} belongs to another user.*SANDBOX_DIR"):
        nodes.start_sandbox(node, nodes.Processes(grace_s=1), [])

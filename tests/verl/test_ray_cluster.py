"""A run on one node starts a Ray cluster of its own, whatever RAY_ADDRESS and Ray's folder say. No
stranger reaches it, and no signal to the run's process group.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import PlatformError
from retool_mcore.verl import ray_cluster
from retool_mcore.verl.ray_cluster import own_process_groups, ray_arguments, ray_folder
from tests.scenario import ROOT

START = """
import os, signal, subprocess, sys, time
from retool_mcore.platforms.network import keep_to_loopback
keep_to_loopback()
import psutil
from retool_mcore.config import RlConfig, load_config
from retool_mcore.verl.ray_cluster import ray_arguments
from tests.sockets import listening, reachable_from_elsewhere
config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"run.root={sys.argv[1]}"])
with ray_arguments(config) as arguments:
    import ray
    ray.init(log_to_driver=False, num_cpus=4, include_dashboard=False, **arguments)
    time.sleep(2)  # Ray would start a worker for each core now
    words = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    workers = [each for each in words if each.startswith("ray::IDLE") or "default_worker.py --node-ip" in each]
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.killpg(0, signal.SIGTERM)  # as a scheduler may send it; without Ray's servers no worker starts
    time.sleep(1)
    ray.get(ray.remote(lambda: None).remote(), timeout=60)  # a worker listens, too
    children = psutil.Process().children(recursive=True)
    found = listening([os.getpid(), *(child.pid for child in children)])
    stranger = os.environ | {"RAY_AUTH_TOKEN": "a guess", "GCS": ray.get_runtime_context().gcs_address}
    code = subprocess.run([sys.executable, "-c", STRANGER], env=stranger, capture_output=True, text=True).stdout
    print(len(found) > 5, reachable_from_elsewhere(found), code.strip(), len(workers) < 4)
    folder = ray._private.worker._global_node.get_temp_dir_path()
    print(os.environ.get("RAY_ADDRESS"), os.path.exists(folder))
    ray.shutdown()
left = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
print(os.path.exists(folder), left)
"""


STRANGER = """
import os
from ray._raylet import GcsClient
try:
    GcsClient(address=os.environ["GCS"]).internal_kv_keys(b"", namespace=b"fun")
except Exception as error:
    print(type(error).__name__)
"""


def test_a_run_has_its_own_cluster_which_no_stranger_and_no_signal_to_the_runs_group_reaches(tmp_path: Path):
    """RAY_ADDRESS names a dead cluster, as after a run on several nodes."""
    current = tmp_path / "ray" / "ray_current_cluster"
    current.parent.mkdir()
    current.write_text("127.0.0.1:1")
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-c", f"STRANGER = {STRANGER!r}{START}", str(tmp_path)]
    done = subprocess.run(
        argv, cwd=ROOT, env=env, start_new_session=True, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout.splitlines()[-3:]
    assert told == ["True [] AuthenticationError True", "None True", "False []"]
    assert [path.name for path in current.parent.iterdir()] == ["ray_current_cluster"]
    assert current.read_text() == "127.0.0.1:1"


def test_an_agent_that_ignores_sigterm_does_not_outlive_its_server(monkeypatch: pytest.MonkeyPatch):
    """The server has ended before its child, as a raylet that was ended while it started."""
    monkeypatch.setattr(ray_cluster, "GRACE_S", 0.5)
    from ray._private import services

    agent = ["sh", "-c", 'trap "" TERM; echo $$; while :; do sleep 0.1; done']
    with own_process_groups():
        server = services.ConsolePopen(["sh", "-c", '"$@" &', "sh", *agent], stdout=subprocess.PIPE, text=True)
        pid = int(server.stdout.readline())
        server.wait()
        assert psutil.pid_exists(pid) and os.getpgid(pid) == server.pid != os.getpgrp()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    server.stdout.close()


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

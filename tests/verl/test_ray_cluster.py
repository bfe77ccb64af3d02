"""A run on one node starts a Ray cluster of its own, whatever RAY_ADDRESS and Ray's folder say; no
stranger reaches it.
"""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import PlatformError, RunError
from retool_mcore.platforms import get_platform
from retool_mcore.verl.ray_cluster import cluster, ray_folder
from tests.e2e.commands import MARK, marked_processes, wait_until
from tests.scenario import ROOT

START = """
import os, subprocess, sys
from retool_mcore.run.network import keep_to_loopback
keep_to_loopback()
import psutil
from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.verl.ray_cluster import cluster
from tests.sockets import listening, reachable_from_elsewhere
config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"run.root={sys.argv[1]}"])
with cluster(config, get_platform("cpu")) as join:
    print("imported before it", "ray" in sys.modules)
    import ray
    ray.init(log_to_driver=False, **join())
    ray.get(ray.remote(lambda: None).remote())  # a worker listens, too
    found = listening([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))])
    stranger = os.environ | {"RAY_AUTH_TOKEN": "a guess", "GCS": ray.get_runtime_context().gcs_address}
    code = subprocess.run([sys.executable, "-c", STRANGER], env=stranger, capture_output=True, text=True).stdout
    print(len(found) > 5, reachable_from_elsewhere(found), code.strip())
    [node] = ray.nodes()
    folder = ray._private.worker._global_node.get_temp_dir_path()
    print(node["Resources"]["CPU"], node["Resources"]["GPU"], os.environ.get("RAY_ADDRESS"), os.path.exists(folder))
    ray.shutdown()
print(os.path.exists(folder), psutil.Process().children(recursive=True))
"""


STRANGER = """
import os
from ray._raylet import GcsClient
try:
    GcsClient(address=os.environ["GCS"]).internal_kv_keys(b"", namespace=b"fun")
except Exception as error:
    print(type(error).__name__)
"""


def test_a_dead_cluster_does_not_keep_a_run_from_starting_nothing_stays_and_no_stranger_reaches_it(tmp_path: Path):
    """As after a run on several nodes, whose address Ray keeps."""
    current = tmp_path / "ray" / "ray_current_cluster"
    current.parent.mkdir()
    current.write_text("127.0.0.1:1")
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-c", f"STRANGER = {STRANGER!r}{START}", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    before, *told = done.stdout.splitlines()[-4:]
    assert before == "imported before it False"
    assert told == ["True [] AuthenticationError", "16.0 1.0 None True", "False []"]
    assert [path.name for path in current.parent.iterdir()] == ["ray_current_cluster"]
    assert current.read_text() == "127.0.0.1:1"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(MARK, made := uuid.uuid4().hex)
    return made


def config_of(folder: Path, *words: str) -> RlConfig:
    return load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", [f"run.root={folder}", *words])


def test_several_nodes_join_the_cluster_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mark: str):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with cluster(config_of(tmp_path, "cluster.nodes=2"), get_platform("cpu")) as join:
        assert join() == {} and os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
        assert not marked_processes(mark)


@pytest.mark.parametrize("came", ["ray_head", "raylet"])
def test_a_mistake_found_while_ray_starts_leaves_nothing_and_is_not_held_up(tmp_path: Path, mark: str, came: str):
    config, found_s = config_of(tmp_path), 0.0
    with pytest.raises(ZeroDivisionError), cluster(config, get_platform("cpu")):
        wait_until(lambda: came in " ".join(marked_processes(mark).values()), came, 60)
        found_s = time.monotonic()
        raise ZeroDivisionError
    assert not marked_processes(mark)
    assert time.monotonic() - found_s < 5.0, "Ray's own end would take longer"


def test_a_ray_that_does_not_start_is_told(tmp_path: Path):
    config = config_of(tmp_path, "verl_overrides.ray_kwargs.ray_init.num_cpus=-1")
    with cluster(config, get_platform("cpu")) as join, pytest.raises(RunError, match=r"Ray did not start; .*rl\.log"):
        join()


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

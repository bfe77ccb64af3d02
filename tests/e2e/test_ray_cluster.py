"""A run on one node has its own Ray cluster, which ends with it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.scenario import ROOT

START = """
import os, signal, subprocess, sys, time
from retool_mcore.platforms.network import use_loopback
use_loopback()
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
    lines = done.stdout.splitlines()[-3:]
    assert lines == ["True [] AuthenticationError True", "None True", "False []"]
    assert [path.name for path in current.parent.iterdir()] == ["ray_current_cluster"]
    assert current.read_text() == "127.0.0.1:1"

"""Two nodes of the real Ray on this machine, by launch/nodes.py: they join and leave nothing."""

import time
import uuid

import pytest

from retool_mcore.rollout.server import free_port
from retool_mcore.verl.ray_cluster import ray_folder_name
from tests.e2e.commands import MARK, marked_processes
from tests.nightly.launch.scripts import RL, Scripts

pytestmark = [pytest.mark.timeout(300)]
DRIVER = """
import os, time, psutil, ray
ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": {"A": "B"}})
ray.get(ray.remote(lambda: None).remote())
time.sleep(1)
idle = [each.environ() for each in psutil.process_iter() if each.name() == "ray::IDLE"]
print({each.get("A") for each in idle if each.get("MARK") == os.environ["MARK"]})
"""
NODE_0 = '"$REAL_PYTHON" -c "$DRIVER" >$FAKE/workers; until [ -e $FAKE/end ]; do sleep 0.1; done'


def test_two_nodes_join_and_the_second_leaves_within_ten_seconds(scripts: Scripts):
    port = next(each for each in iter(free_port, None) if each >= 20_000)  # its workers take those below
    mark = uuid.uuid4().hex
    scripts.replace("ray", 'exec "$REAL_PYTHON" "$@"')
    scripts.replace("run", NODE_0)
    env = {
        MARK: mark,
        "FAKE_NODES": "2",
        "DRIVER": DRIVER.replace("MARK", MARK),
        "RAY_PORT": str(port),
        "HEAD_WAIT_S": "60",
        "RAY_TMPDIR": str(scripts.folder / "tmp"),
        "RAY_START_OPTIONS": "--object-store-memory 100000000",
    }
    folders = [str(scripts.folder / f"sandbox{rank}") for rank in (0, 1)]  # two real nodes share none
    head = scripts.start(RL, "log0", NODE_RANK="0", SANDBOX_DIR=folders[0], **env)
    second = scripts.start(RL, "log1", NODE_RANK="1", SANDBOX_DIR=folders[1], **env)
    scripts.until(lambda: "serves until node 0 leaves" in scripts.output("log1"), "both have joined", 120)
    ray_folders = [ray_folder_name(scripts.run_dir, rank) for rank in (0, 1)]
    assert all((folder / "session_latest").exists() for folder in ray_folders)
    scripts.until(lambda: (scripts.folder / "workers").read_text().strip(), "a driver has come and gone", 120)
    assert (scripts.folder / "workers").read_text().strip() == "{'B'}", (
        "workers without the driver's runtime_env serve nobody"
    )
    (scripts.folder / "end").touch()
    assert head.wait(timeout=300) == 0
    began_s = time.monotonic()
    assert second.wait(timeout=300) == 0
    assert time.monotonic() - began_s < 10, "Ray itself leaves after more than a minute"
    assert not any(folder.exists() for folder in ray_folders)
    assert not (scripts.folder / "tmp" / "ray").exists(), (
        "where Ray keeps the address of its cluster for every later program"
    )
    assert marked_processes(mark) == {}

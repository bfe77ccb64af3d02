"""Two nodes of the real Ray on this machine, by launch/nodes.sh: they join and leave nothing."""

import sys
import time
import uuid
from pathlib import Path

import pytest

from retool_mcore.rollout.server import free_port
from tests.e2e.commands import MARK, marked_processes
from tests.nightly.launch.scripts import Scripts

pytestmark = [pytest.mark.timeout(300)]
DRIVER = """
import os, time, psutil, ray
ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": {"A": "B"}})
ray.get(ray.remote(lambda: None).remote())
time.sleep(1)
idle = [each.environ() for each in psutil.process_iter() if each.name() == "ray::IDLE"]
print({each.get("A") for each in idle if each.get("MARK") == os.environ["MARK"]})
"""
NODE = """set -euo pipefail
source launch/nodes.sh
NODES=2 DEVICES=1 PLATFORM=cpu RUN=one ROOT=$FAKE/runs
hold_run
start_ray
echo "$RAY_FOLDER" >$FAKE/folder$NODE_RANK
serve_unless_head
"$PYTHON" -c "$DRIVER" >$FAKE/workers
until [ -e $FAKE/end ]; do sleep 0.1; done
"""


def test_two_nodes_join_and_the_second_leaves_within_ten_seconds(scripts: Scripts):
    port = next(each for each in iter(free_port, None) if each >= 20_000)  # its workers take those below
    mark, script = uuid.uuid4().hex, scripts.folder / "node.sh"
    script.write_text(NODE, encoding="utf-8")
    env = {
        MARK: mark,
        "PYTHON": sys.executable,
        "DRIVER": DRIVER.replace("MARK", MARK),
        "RAY_PORT": str(port),
        "HEAD_WAIT_S": "60",
        "RAY_TMPDIR": str(scripts.folder),
        "RAY_START_OPTIONS": "--object-store-memory 100000000",
    }
    head = scripts.start(str(script), "log0", NODE_RANK="0", **env)
    second = scripts.start(str(script), "log1", NODE_RANK="1", **env)
    scripts.until(lambda: "serves until node 0 leaves" in scripts.said("log1"), "both have joined", 120)
    folders = [Path((scripts.folder / f"folder{rank}").read_text().strip()) for rank in (0, 1)]
    assert all((folder / "session_latest").exists() for folder in folders)
    scripts.until(lambda: (scripts.folder / "workers").read_text().strip(), "a driver has come and gone", 120)
    assert (scripts.folder / "workers").read_text().strip() == "{'B'}", (
        "workers without the driver's runtime_env serve nobody"
    )
    (scripts.folder / "end").touch()
    assert head.wait(timeout=300) == 0
    began_s = time.monotonic()
    assert second.wait(timeout=300) == 0
    assert time.monotonic() - began_s < 10, "Ray itself leaves after more than a minute"
    assert not any(folder.exists() for folder in folders)
    assert not (scripts.folder / "ray").exists(), "where Ray keeps the address of its cluster for every later program"
    assert marked_processes(mark) == {}

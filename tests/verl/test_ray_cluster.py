"""A run on one node starts a Ray of its own, whatever RAY_ADDRESS says; no stranger reaches it."""

import os
import subprocess
import sys

import pytest

from retool_mcore.verl.ray_cluster import STARTED_FOR_RUN, ray_init_keys
from tests.scenario import ROOT

START = """
import os, subprocess, sys
from retool_mcore.run.network import keep_to_loopback
keep_to_loopback()
import psutil, ray
from tests.sockets import listening, reachable_from_elsewhere
from retool_mcore.verl.ray_cluster import ray_init_keys
keys = ray_init_keys(1)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000, **keys)
ray.get(ray.remote(lambda: None).remote())  # a worker listens, too
found = listening([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))])
stranger = os.environ | {"RAY_AUTH_TOKEN": "a guess", "GCS": ray.get_runtime_context().gcs_address}
code = subprocess.run([sys.executable, "-c", STRANGER], env=stranger, capture_output=True, text=True).stdout
print(len(ray.nodes()), os.environ.get("RAY_ADDRESS"), len(found) > 5, reachable_from_elsewhere(found), code.strip())
ray.shutdown()
"""


STRANGER = """
import os
from ray._raylet import GcsClient
try:
    GcsClient(address=os.environ["GCS"]).internal_kv_keys(b"", namespace=b"fun")
except Exception as error:
    print(type(error).__name__)
"""


def test_a_dead_address_does_not_keep_a_run_from_starting_and_no_stranger_reaches_it():
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"STRANGER = {STRANGER!r}{START}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "1 None True [] AuthenticationError"


@pytest.mark.parametrize(
    ("nodes", "address", "ours", "own"),
    [
        (1, None, None, True),
        (1, "10.0.0.1:6379", None, True),
        (1, "10.0.0.1:6379", "10.0.0.2:6379", True),
        (1, "10.0.0.1:6379", "10.0.0.1:6379", False),
        (2, "10.0.0.1:6379", None, False),
    ],
)
def test_only_the_launch_script_names_another(monkeypatch, nodes, address, ours, own):
    for name, value in (("RAY_ADDRESS", address), (STARTED_FOR_RUN, ours)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    assert ray_init_keys(nodes) == ({"address": "local"} if own else {})
    assert os.environ.get("RAY_ADDRESS") == (None if own else address)

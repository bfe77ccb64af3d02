"""Ray over nodes by the scripts: a start that fails, a node that is lost, who leaves when.

`ray` is a stand-in here; `tests/nightly/e2e/test_multinode.py` starts the real one.
"""

import os
import re
import signal
import socket
import time

import pytest

from tests.nightly.launch.scripts import RL, RL_ONE, SFT, Scripts

TWO = {"FAKE_NODES": "2"}
STUBBORN = "trap '' TERM; sleep 100 & wait; wait"


@pytest.fixture
def head():
    """A port of this machine that takes connections, as node 0's Ray does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ray_that_does_not_start_is_one_line_at_once(scripts: Scripts, head: socket.socket, rank: str):
    scripts.replace("ray", 'echo "Local node IP: 10.0.0.9"; echo; echo "OSError: port 6379 is in use."; echo; exit 1')
    port = str(head.getsockname()[1]) if rank == "1" else "1"
    node = scripts.start(RL, NODE_RANK=rank, RAY_PORT=port, **TWO)
    began_s = time.monotonic()
    assert node.wait(timeout=300) == 2 and time.monotonic() - began_s < 10
    (line,) = [line for line in scripts.output().splitlines() if "error: " in line]
    assert line.startswith("error: Ray did not start on this node: OSError: port 6379 is in use. ")
    assert line.endswith(f"runs/one/logs/ray_node{rank}.log")
    assert "cluster" not in scripts.calls()


def test_a_port_in_use_is_an_error_before_ray_starts(scripts: Scripts, head: socket.socket):
    port = str(head.getsockname()[1])
    assert scripts.start(RL, NODE_RANK="0", RAY_PORT=port, **TWO).wait(timeout=300) == 2
    assert f"error: RAY_PORT = {port} of 127.0.0.1 is in use." in scripts.output() and "ray" not in scripts.calls()


def test_a_head_without_an_ipv4_address_is_one_line(scripts: Scripts):
    assert scripts.start(RL, NODE_RANK="1", HEAD_IP="::1", **TWO).wait(timeout=300) == 2
    assert "error: HEAD_IP = ::1 has no IPv4 address" in scripts.output() and "ray" not in scripts.calls()


PHASES = {
    "it waits for the lock": ("run", RL_ONE, "sleep 100"),
    "preflight": ("preflight", SFT, STUBBORN),
    "the sandbox starts": ("service", RL_ONE, STUBBORN),
    "Ray starts": ("ray", RL, STUBBORN),
    "nodes are awaited": ("cluster", RL, STUBBORN),
    "node 0 is awaited": ("preflight", SFT, "exit 0"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_script_ends_within_ten_seconds_of_sigterm(scripts: Scripts, phase: str):
    command, script, what = PHASES[phase]
    scripts.replace(command, what)
    env = dict(TWO, NODE_RANK="0") if script != RL_ONE else {}
    if phase == "node 0 is awaited":
        env |= {"NODE_RANK": "1", "HEAD_WAIT_S": "100", "HEAD_IP": "192.0.2.1"}  # an address that answers nobody
    node = scripts.start(script, **env)
    scripts.until(lambda: command in scripts.calls(), phase)
    if phase == "it waits for the lock":
        node = scripts.start(script, "second", LOCK_WAIT_S="100")
        scripts.until(lambda: "waiting up to" in scripts.output("second"), phase)
    time.sleep(0.3)
    began_s = time.monotonic()
    node.terminate()
    assert node.wait(timeout=300) == 143
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_node_whose_ray_was_lost_joins_again(scripts: Scripts, head: socket.socket, restarts: str):
    scripts.replace("ray", 'echo "Ray runtime started."; exec sleep 100')
    port = str(head.getsockname()[1])
    node = scripts.start(RL, NODE_RANK="1", RAY_PORT=port, RESTARTS=restarts, **TWO)
    scripts.until(lambda: "serves until node 0 leaves" in scripts.output(), "it serves")
    [pid] = re.findall(r"^ray (\d+)$", (scripts.folder / "calls").read_text(), re.MULTILINE)
    os.kill(int(pid), signal.SIGKILL)
    if restarts == "0":
        assert node.wait(timeout=300) == 3
        return
    scripts.until(lambda: "node 1 has joined again, 1 of RESTARTS = 1" in scripts.output(), "it joins again")
    assert scripts.calls().count("ray") == 2 and node.poll() is None


def test_a_run_that_starts_again_waits_for_the_nodes_first(scripts: Scripts):
    scripts.replace("run", '[ "$(grep -c "^run" $FAKE/calls)" = 2 ] || exit 3')
    node = scripts.start(RL, NODE_RANK="0", RESTARTS="1", **TWO)
    assert node.wait(timeout=300) == 0
    assert scripts.calls()[-4:] == ["cluster", "run", "cluster", "run"]

"""How launch/nodes.py restarts a run, and how it starts a node's sandbox."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retool_mcore.errors import ConfigError

nodes: Any = importlib.import_module("launch.nodes")


@pytest.mark.parametrize(
    ("codes", "waits_s"),
    [([0], []), ([2], []), ([143], []), ([3, 0], [5]), ([3, 1, 2], [5, 10]), ([3, 3, 3, 3], [5, 10, 20])],
)
def test_a_fault_restarts_the_run_after_longer_and_longer_waits(codes, waits_s, monkeypatch: pytest.MonkeyPatch):
    """A success, a user's error (2) and a stop (143) end it; so does the last of three restarts."""
    left, waited = list(codes), list[float]()
    run = SimpleNamespace(wait=lambda: left.pop(0), signal=lambda how: None)
    monkeypatch.setattr(nodes, "Group", lambda *_: run)
    monkeypatch.setattr(nodes, "wait_until", lambda done, seconds: waited.append(seconds))
    monkeypatch.setenv("RESTARTS", "3")
    monkeypatch.setenv("RESTART_WAIT_S", "5")
    assert nodes.Processes(grace_s=1).supervise(["run"]) == codes[-1]
    assert waited == waits_s and not left


@pytest.mark.parametrize("rank", ["2", "-1", "one"])
def test_a_rank_that_the_run_does_not_have_is_refused(rank: str):
    with pytest.raises(ConfigError, match=f"NODE_RANK = {rank} must be one of 0 to 1"):
        nodes.rank_and_head(2, {"NODE_RANK": rank, "HEAD_IP": "10.0.0.1"})


@pytest.mark.parametrize(("workers", "processes"), [(1, 1), (16, 1), (17, 2), (64, 4)])
def test_a_nodes_sandbox_has_a_process_for_every_sixteen_workers(workers, processes):
    sandbox = SimpleNamespace(min_level="landlock", workers=workers, python="", preload=["numpy"])
    node = SimpleNamespace(run=SimpleNamespace(sandbox=sandbox, run=SimpleNamespace(name="rl")))
    command = [str(word) for word in nodes.sandbox_command(node)]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert Path(options.pop("--socket")).name == "sandbox.sock"
    assert options == {
        "--min-level": "landlock",
        "--workers": str(workers),
        "--processes": str(processes),
        "--preload": "numpy",
    }

"""--dry-run: verl's own classes resolve and check the settings, and nothing starts."""

import socket

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.train.rl import require_cluster
from tests import forked
from tests.e2e.commands import ROOT, assert_one_error


def test_a_mistake_is_one_line():
    wrong = "verl_overrides.actor_rollout_ref.rollout.expert_parallel_size=3"
    done = forked.run("retool_mcore", "rl", "configs/rl_tiny_cpu.toml", wrong, "--dry-run")
    assert_one_error(done, "refuses")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_several_nodes_without_a_cluster_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = load_config(RlConfig, ROOT / "configs" / "rl_tiny_cpu.toml", ["cluster.nodes=2"])
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 2, but RAY_ADDRESS is not set"):
        require_cluster(run)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS = 'auto' is not the HOST:PORT"):
        require_cluster(run)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        require_cluster(run)
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS = '{address}' does not answer .*Start a script of launch/"):
        require_cluster(run, wait_s=0.3)

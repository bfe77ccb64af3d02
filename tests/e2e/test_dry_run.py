"""--dry-run: verl's own classes resolve and check the settings, and nothing starts."""

import socket
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ConfigError
from retool_mcore.train.rl import require_cluster
from tests import forked

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("rl", "configs/rl_tiny_cpu.toml", "verl_overrides.actor_rollout_ref.rollout.expert_parallel_size=3"),
            "refuses",
        ),
        (
            ("sft", "configs/sft_tiny_cpu.toml", "--platform", "ascend"),
            'model.dtype = "float32" is not supported on platform "ascend"',
        ),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str):
    done = forked.run("retool_mcore", *words, "--dry-run")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], done.stderr[-2000:]


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

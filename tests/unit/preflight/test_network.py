"""Preflight warns of the ports of several nodes that a user can close."""

from pathlib import Path

import pytest

from retool_mcore.config import load_run
from retool_mcore.preflight.machine import INTERFACE, network

CONFIGS = Path(__file__).parents[3] / "configs"
RL, SFT = CONFIGS / "rl_tiny_cpu.toml", CONFIGS / "sft_tiny_cpu.toml"


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (SFT, ("ib0", ""), []),
        (SFT, ("", "disabled"), ["SOCKET_IFNAME is not set"]),
        (RL, ("ib0", "token"), []),
        (RL, ("ib0", "disabled"), ["can run code as you"]),
    ],
)
def test_what_can_be_closed_is_a_warning(monkeypatch, config: Path, environment: tuple[str, str], message: list[str]):
    for name, value in zip((INTERFACE, "RAY_AUTH_MODE"), environment, strict=True):
        monkeypatch.setenv(name, value)
    found = list(network(load_run(config, ["cluster.nodes=2"])))
    assert [each.severity for each in found] == ["warning"] * len(message)
    assert all(text in each.text for text, each in zip(message, found, strict=True))

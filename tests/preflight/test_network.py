"""Preflight tells which ports other machines reach, and what to do where a user can close more."""

from pathlib import Path

import pytest

from retool_mcore.config import load_run
from retool_mcore.preflight.network import INTERFACE, open_ports

CONFIGS = Path(__file__).parents[2] / "configs"
RL, SFT = CONFIGS / "rl_tiny_cpu.toml", CONFIGS / "sft_tiny_cpu.toml"


@pytest.mark.parametrize(
    ("config", "nodes", "environment", "levels", "words"),
    [
        (SFT, 1, ("", ""), ["ok"], ["only loopback listens"]),
        (RL, 1, ("", "disabled"), ["ok"], ["only loopback listens, and Ray and SGLang ask for a secret"]),
        (SFT, 2, ("ib0", ""), ["ok"], ["torch's store", "on ib0"]),
        (SFT, 2, ("", "disabled"), ["ok", "warning"], ["on whichever interface", "SOCKET_IFNAME names no interface"]),
        (RL, 2, ("ib0", "token"), ["ok"], ["the transfer queue", "SGLang, with the token"]),
        (RL, 2, ("ib0", "disabled"), ["ok", "warning"], ["runs code as you", "RAY_AUTH_TOKEN_PATH"]),
    ],
)
def test_what_stays_open_is_listed(monkeypatch, config, nodes, environment, levels, words):  # noqa: PLR0917
    for name, value in zip((INTERFACE, "RAY_AUTH_MODE"), environment, strict=True):
        monkeypatch.setenv(name, value)
    found = list(open_ports(load_run(config, [f"cluster.nodes={nodes}"])))
    assert [each.severity for each in found] == levels
    told = " ".join(each.text for each in found)
    assert all(word in told for word in words), told
    assert ("Ray" in told) == (config == RL)

"""Tells which ports of a run other machines reach; docs/security.md says what is behind them."""

import os
from collections.abc import Iterator

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.preflight.findings import Finding, ok, warning

INTERFACE = "GLOO_SOCKET_IFNAME"  # launch/env_*.sh set it to the user's SOCKET_IFNAME


def open_ports(run: RunConfig) -> Iterator[Finding]:
    """What stays open, and to whom."""
    rl = isinstance(run, RlConfig)
    if run.cluster.nodes == 1:
        yield ok("network", "only loopback listens" + (", and Ray and SGLang ask for a secret" if rl else ""))
        return
    interface = os.environ.get(INTERFACE, "")
    where = f"on {interface}" if interface else "on whichever interface they choose"
    parts = [f"torch's store, on the address of its node; gloo and the devices' collectives, {where}"]
    if rl:
        parts += ["the transfer queue, on each node's address", "Ray, on every interface, and SGLang, with the token"]
    yield ok("network", f"other machines reach: {'; '.join(parts)}")
    if not interface:
        yield warning(
            "network",
            "SOCKET_IFNAME names no interface. Set it on each node to the one that only the run's nodes share "
            f"({INTERFACE} without a launch script)",
        )
    if rl and os.environ.get("RAY_AUTH_MODE") == "disabled":
        yield warning(
            "network",
            "RAY_AUTH_MODE = disabled: whoever reaches a port of Ray runs code as you. Unset it, and give every node "
            "the same RAY_AUTH_TOKEN_PATH",
        )

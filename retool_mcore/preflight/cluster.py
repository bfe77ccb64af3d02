"""Checks every node of a running Ray cluster: devices, settings, code, data and clock."""

# pyright: reportUnknownMemberType=false
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from retool_mcore.config import RunConfig, load_run
from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import Platform
from retool_mcore.preflight.findings import Finding, error, ok, warning
from retool_mcore.run.environment import differing, fingerprint

NODE_SETTINGS = "RETOOL_NODE_SETTINGS"  # launch/nodes.py: a line each, a configuration and what is set beside it
MAX_SKEW_S = 1.0
LOOK_TIMEOUT_S = 60.0
LOOK_AGAIN_S = 1.0


def check_cluster(
    config: RunConfig, platform: Platform, wait_s: float, tell: Callable[[Finding], None]
) -> list[Finding]:
    """Connect to the cluster of RAY_ADDRESS and wait up to ``wait_s`` seconds for its nodes.

    Raises PlatformError when no cluster answers.
    """
    import ray

    env = {"env_vars": platform.process_env()}
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, runtime_env=env)
    except (ConnectionError, RuntimeError, TimeoutError) as problem:
        raise PlatformError(
            f"no Ray cluster answers at RAY_ADDRESS: {str(problem)[:300]}. Start it on node 0."
        ) from problem
    try:
        found = list(_check_nodes(config, platform, wait_s))
    finally:
        ray.shutdown()
    for finding in found:
        tell(finding)
    return found


def _check_nodes(config: RunConfig, platform: Platform, wait_s: float) -> Iterator[Finding]:
    from ray.exceptions import RayError

    end_s = time.monotonic() + wait_s
    while True:
        nodes = _wait_for_nodes(config.cluster.nodes, end_s)
        if len(nodes) != config.cluster.nodes:
            here = ", ".join(node["NodeManagerAddress"] for node in nodes)
            yield error("nodes", f"{len(nodes)} joined within {wait_s:.0f} s ({here}), and cluster.nodes = "
                        f"{config.cluster.nodes}. Start the same command on the others.")  # fmt: skip
            return
        asked_at_s = time.time()
        try:
            seen = _look_at(nodes, config)
        except RayError as problem:
            if time.monotonic() < end_s:  # of a node that was lost just now, Ray says for a while that it is alive
                time.sleep(LOOK_AGAIN_S)
                continue
            yield error("nodes", f"a node cannot be looked at: {str(problem).strip().splitlines()[-1][:300]}. Is this "
                        "package installed there, in the same Python?")  # fmt: skip
            return
        break
    wanted, resource = config.cluster.gpus_per_node, platform.device.ray_resource
    for node in nodes:
        count = int(node["Resources"].get(resource, 0))
        if count != wanted:
            yield error("nodes", f"{node['NodeManagerAddress']} has {count} {resource} in Ray, and "
                        f"cluster.gpus_per_node = {wanted}. Make the two agree.")  # fmt: skip
    yield ok("nodes", f"{len(nodes)} joined, {wanted} {resource} wanted on each")
    yield from _compare(seen, asked_at_s, time.time())


def _wait_for_nodes(wanted: int, end_s: float) -> list[dict[str, Any]]:
    """The nodes that live, as soon as they are ``wanted``; more, too, may be one that was lost."""
    import ray

    while True:
        nodes = cast("list[dict[str, Any]]", ray.nodes())
        alive = [node for node in nodes if node["Alive"]]
        if len(alive) == wanted or time.monotonic() > end_s:
            return alive
        time.sleep(0.5)


def _look_at(nodes: list[dict[str, Any]], config: RunConfig) -> list[tuple[dict[str, str], float]]:
    """What ``_look`` finds on each node. Raises RayError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(num_cpus=0, max_retries=0)(_look)
    calls = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(config)
        for node in nodes
    ]
    return ray.get(calls, timeout=LOOK_TIMEOUT_S)


def _compare(seen: list[tuple[dict[str, str], float]], asked_at_s: float, answered_at_s: float) -> Iterator[Finding]:
    different = differing([prints for prints, _ in seen])
    for sentence in different:
        yield error("nodes", f"{sentence}. Give every node the same.")
    if not different:
        yield ok("nodes", "the same settings, code, packages, data and model on every node")
    for prints, clock_s in seen:
        skew_s = max(asked_at_s - clock_s, clock_s - answered_at_s, 0.0)
        if skew_s > MAX_SKEW_S:
            yield warning(
                "clock", f"{prints['host']} is {skew_s:.1f} s off this node's. Run an NTP client on each node"
            )


def _look(config: RunConfig) -> tuple[dict[str, str], float]:
    """Runs on a node, in a Ray worker; ``config`` is the driver's.

    A worker inherits the environment of the script that has started Ray there, and so finds what
    that one was told.
    """
    file, *settings = os.environ.get(NODE_SETTINGS, "").splitlines() or [""]
    return fingerprint(load_run(Path(file), settings) if file else config), time.time()

"""Checks the nodes of a running Ray cluster: devices, settings, code, data and clocks."""

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

NODE_SETTINGS = "RETOOL_NODE_SETTINGS"  # set by launch/nodes.py: the configuration file and its overrides, one per line
MAX_SKEW_S = 1.0
QUERY_TIMEOUT_S = 60.0
RETRY_S = 1.0


def check_cluster(
    config: RunConfig, platform: Platform, wait_s: float, on_finding: Callable[[Finding], None]
) -> list[Finding]:
    """Connect to the cluster at RAY_ADDRESS, wait up to ``wait_s`` s for its nodes and check them.

    Raises PlatformError if no cluster answers.
    """
    import ray

    env = {"env_vars": platform.process_env()}
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, runtime_env=env)
    except (ConnectionError, RuntimeError, TimeoutError) as problem:
        raise PlatformError(
            f"no Ray cluster answers at RAY_ADDRESS: {str(problem)[:300]}. Start Ray on node 0."
        ) from problem
    try:
        findings = list(_check_nodes(config, platform, wait_s))
    finally:
        ray.shutdown()
    for finding in findings:
        on_finding(finding)
    return findings


def _check_nodes(config: RunConfig, platform: Platform, wait_s: float) -> Iterator[Finding]:
    from ray.exceptions import RayError

    end_s = time.monotonic() + wait_s
    while True:
        nodes = _wait_for_nodes(config.cluster.nodes, end_s)
        if len(nodes) != config.cluster.nodes:
            joined = ", ".join(node["NodeManagerAddress"] for node in nodes)
            yield error("nodes", f"{len(nodes)} joined within {wait_s:.0f} s ({joined}), but cluster.nodes = "
                        f"{config.cluster.nodes}. Start the same command on the others.")  # fmt: skip
            return
        sent_at_s = time.time()
        try:
            facts = _query_nodes(nodes, config)
        except RayError as problem:
            if time.monotonic() < end_s:  # Ray reports a lost node as alive for a while
                time.sleep(RETRY_S)
                continue
            yield error("nodes", f"a node cannot run the check: {str(problem).strip().splitlines()[-1][:300]}. Check "
                        "that this package is installed there, for the same Python.")  # fmt: skip
            return
        break
    wanted, resource = config.cluster.gpus_per_node, platform.device.ray_resource
    for node in nodes:
        count = int(node["Resources"].get(resource, 0))
        if count != wanted:
            yield error("nodes", f"{node['NodeManagerAddress']} has {count} {resource} in Ray, but "
                        f"cluster.gpus_per_node = {wanted}. Make the two agree.")  # fmt: skip
    yield ok("nodes", f"{len(nodes)} joined, {wanted} {resource} required on each")
    yield from _compare(facts, sent_at_s, time.time())


def _wait_for_nodes(wanted: int, end_s: float) -> list[dict[str, Any]]:
    """Wait until exactly ``wanted`` nodes are alive or ``end_s`` passes; return the live nodes.

    If there are more, one of them may be a node that Ray has not reported as dead yet, so it waits.
    """
    import ray

    while True:
        nodes = cast("list[dict[str, Any]]", ray.nodes())
        alive = [node for node in nodes if node["Alive"]]
        if len(alive) == wanted or time.monotonic() > end_s:
            return alive
        time.sleep(0.5)


def _query_nodes(nodes: list[dict[str, Any]], config: RunConfig) -> list[tuple[dict[str, str], float]]:
    """The result of ``_node_facts`` on each node. Raises RayError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(num_cpus=0, max_retries=0)(_node_facts)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(config)
        for node in nodes
    ]
    return ray.get(calls, timeout=QUERY_TIMEOUT_S)


def _compare(facts: list[tuple[dict[str, str], float]], sent_at_s: float, answered_at_s: float) -> Iterator[Finding]:
    different = differing([prints for prints, _ in facts])
    for sentence in different:
        yield error("nodes", f"{sentence}. Make them the same on every node.")
    if not different:
        yield ok("nodes", "the same settings, code, packages, data and model on every node")
    for prints, clock_s in facts:
        skew_s = max(sent_at_s - clock_s, clock_s - answered_at_s, 0.0)
        if skew_s > MAX_SKEW_S:
            yield warning(
                "clock", f"{prints['host']}'s clock differs by {skew_s:.1f} s. Run an NTP client on each node"
            )


def _node_facts(config: RunConfig) -> tuple[dict[str, str], float]:
    """The node's fingerprint and Unix time. Runs on the node, in a Ray worker.

    ``config`` is the driver's. The worker inherits the environment of the script that started Ray
    on its node, so ``NODE_SETTINGS`` has the settings of that script.
    """
    file, *settings = os.environ.get(NODE_SETTINGS, "").splitlines() or [""]
    return fingerprint(load_run(Path(file), settings) if file else config), time.time()

"""Detects dead processes of the run, including those with no pending call.

Ray raises an error only in a process that calls a dead actor. verl's trainer reaches some processes
through sockets (TransferQueue) or only waits for data that they put there (agent loops), so the run
would hang. Calls also hang if Ray's raylet or GCS is dead.
"""

import socket
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import state
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from retool_mcore.config import RlConfig
from retool_mcore.errors import RunError
from retool_mcore.verl.failure import death_for_user

CONNECT_S = 5.0
DIED = (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)  # excludes actors that the run killed
SERVERS = ("gcs_server", "raylet", "log_monitor")
RESTARTED = ("MeasuredServer",)  # verl/engines.py restarts these, or raises the error above its limit


class ProcessWatch:
    """Watches the run's Ray actors, its nodes and Ray's own servers."""

    def __init__(self, config: RlConfig) -> None:
        self._config = config
        self._servers: dict[psutil.Process, str] = {}  # Ray's servers that this process started -> name
        self._nodes: dict[str, str] = {}  # id -> address of each node that was ever alive
        self._job: Any = None

    def lost(self) -> RunError | None:
        """The error for the first dead process found, or None."""
        if not ray.is_initialized():
            return None
        for look in (self._lost_servers, self._lost_nodes, self._actors):  # the last two hang without servers
            for what, pid in look():
                return death_for_user(what, pid, self._config)
        return None

    def _lost_servers(self) -> list[tuple[str, int]]:
        self._servers |= {each: name for each in psutil.Process().children() if (name := _name_of_server(each))}
        lost = [(f"Ray's {name}", each.pid) for each, name in self._servers.items() if not _is_alive(each)]
        address = ray.get_runtime_context().gcs_address
        if not lost and not _answers(address):
            return [(f"Ray's gcs_server at {address}", 0)]
        return lost

    def _lost_nodes(self) -> list[tuple[str, int]]:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        self._nodes |= {name: node["NodeManagerAddress"] for name, node in nodes.items() if node["Alive"]}
        lost = [address for name, address in self._nodes.items() if not nodes.get(name, {"Alive": False})["Alive"]]
        return [(f"Ray's raylet on node {address}", 0) for address in lost]

    def _actors(self) -> list[tuple[str, int]]:
        if self._job is None:
            self._job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        dead = state.actors(job_id=self._job, actor_state_name="DEAD").values()
        return [
            (actor["ActorClassName"].rpartition(".")[2], actor["Pid"])
            for actor in sorted(dead, key=lambda actor: actor["EndTime"])
            if _has_died(actor["DeathCause"]) and actor["ActorClassName"].rpartition(".")[2] not in RESTARTED
        ]


def _name_of_server(process: psutil.Process) -> str:
    """Which of SERVERS the process is, by its command line; "" if none."""
    try:
        files = [Path(word) for word in process.cmdline()]
    except psutil.Error:  # it has ended
        return ""
    folder = Path(ray.__file__).parent
    return next((file.stem for file in files if file.stem in SERVERS and file.is_relative_to(folder)), "")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_died(cause: Any) -> bool:
    return cause.HasField("oom_context") or cause.actor_died_error_context.reason in DIED


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True

"""Finds dead processes of the run, and turns Ray's errors into one message for the user.

The message names the process, quotes its last lines and says how to resume. Ray's own tracebacks go
to the run's log.
"""

import os
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import state
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import RayError, RayTaskError

from retool_mcore.config import RlConfig
from retool_mcore.errors import ReToolError, RunError
from retool_mcore.run import checkpoint

LAST_LINES = 8
TAIL_BYTES = 1 << 20
DIED = (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)  # excludes actors that the run killed
SERVERS = ("gcs_server", "raylet", "log_monitor")
CONNECT_S = 5.0
RESTARTED = "MeasuredServer"  # verl/engines.py restarts these, or raises the error above its limit
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DIED = re.compile(r"class_name: (?P<what>\S+).*?pid: (?P<pid>\d+)", re.DOTALL)
_FAILED = re.compile(r"ray::(?P<what>[\w.]+)\(\).*?pid=(?P<pid>\d+)", re.DOTALL)


class ProcessWatch:
    """Detects dead processes of the run: its Ray actors, its nodes and Ray's own servers.

    Ray raises an error only in a process that calls a dead actor. verl's trainer reaches some
    actors through sockets (TransferQueue) or only waits for data that they put there (agent loops),
    so the run would hang. Calls also hang if Ray's raylet or GCS is dead.
    """

    def __init__(self, config: RlConfig) -> None:
        self._config = config
        self._servers: dict[psutil.Process, str] = {}  # Ray's servers that this process started -> name
        self._nodes: dict[str, str] = {}  # id -> address of each node that was ever alive

    def error(self) -> RunError | None:
        """The error for the first dead process found, or None."""
        if not ray.is_initialized():
            return None
        for find in (self._dead_servers, self._dead_nodes, self._dead_actors):  # the last two hang without servers
            for name, pid in find():
                return dead_process_error(name, pid, self._config)
        return None

    def _dead_servers(self) -> list[tuple[str, int]]:
        self._servers |= {child: name for child in psutil.Process().children() if (name := _server_name(child))}
        dead = [(f"Ray's {name}", process.pid) for process, name in self._servers.items() if not _is_alive(process)]
        address = ray.get_runtime_context().gcs_address
        if not dead and not _accepts_connections(address):
            return [(f"Ray's gcs_server at {address}", 0)]
        return dead

    def _dead_nodes(self) -> list[tuple[str, int]]:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        self._nodes |= {name: node["NodeManagerAddress"] for name, node in nodes.items() if node["Alive"]}
        dead = [address for name, address in self._nodes.items() if not nodes.get(name, {"Alive": False})["Alive"]]
        return [(f"Ray's raylet on node {address}", 0) for address in dead]

    def _dead_actors(self) -> list[tuple[str, int]]:
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        dead = state.actors(job_id=job, actor_state_name="DEAD").values()
        return [
            (name, actor["Pid"])
            for actor in sorted(dead, key=lambda actor: actor["EndTime"])
            if _has_died(actor["DeathCause"]) and (name := actor["ActorClassName"].rpartition(".")[2]) != RESTARTED
        ]


def _server_name(process: psutil.Process) -> str:
    """The name in SERVERS of a process, from its command line; "" if it is another process."""
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


def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def _has_died(cause: Any) -> bool:
    return cause.HasField("oom_context") or cause.actor_died_error_context.reason in DIED


def error_for_user(error: RayError, config: RlConfig, why: str = "") -> ReToolError:
    """The error that the command line prints: a worker's own ReToolError, or else a RunError.

    ``why``: the setting that makes the error end the run, if there is one.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, RayError):
        error = error.cause  # this process failed because another one did
    if isinstance(error, RayTaskError) and isinstance(error.cause, ReToolError):
        return error.cause
    text = _COLOURS.sub("", str(error))
    match = _FAILED.search(text) if isinstance(error, RayTaskError) else _DIED.search(text)
    name = match["what"].rpartition("<locals>.")[2] if match else ""
    if match is None:
        what = f"Ray ended the run: {type(error).__name__}: {text.splitlines()[0]}"
    elif isinstance(error, RayTaskError):
        first, *more = f"{type(error.cause).__name__}: {error.cause}".splitlines()
        cause = f"{first} {more[0]}" if first.endswith(":") and more else first  # Hydra's message is in line 2
        what = f"{name} (process {match['pid']}) failed with {cause}"
    else:
        return dead_process_error(name, int(match["pid"]), config, why)
    what = f"{what}, and {why}" if why else what
    return RunError(f"{what}. The log is {_log(config)}. {_how_to_resume(config)}")


def dead_process_error(what: str, pid: int, config: RlConfig, why: str = "") -> RunError:
    """The error for a process that died, with its last lines; ``pid`` is 0 if unknown."""
    process = f"{what} (process {pid})" if pid else what
    reason = f", and {why}" if why else ""
    last = "".join(f"\n  {line}" for line in (last_lines(_log(config), pid) if pid else ()))
    last = f"Its last lines:{last}\n" if last else ""
    return RunError(
        f"{process} died{reason}. If it ran out of memory, dmesg shows the kill. {last}The log is "
        f"{_log(config)}. {_how_to_resume(config)}"
    )


def _log(config: RlConfig) -> Path:
    return config.run.dir.absolute() / "logs" / "rl.log"


def last_lines(log: Path, pid: int) -> list[str]:
    """The last LAST_LINES lines that process ``pid`` wrote to the run's log."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        text = _COLOURS.sub("", file.read().decode("utf-8", errors="replace"))
    mark = re.compile(rf"^\([^)\n]*\bpid={pid}\b[^)\n]*\)\s*(.*\S)", re.MULTILINE)
    return [line[:300] for line in mark.findall(text)[-LAST_LINES:]]


def _how_to_resume(config: RlConfig) -> str:
    saved = checkpoint.complete_checkpoints(config.run.dir / "checkpoints")
    if not saved:
        return "No checkpoint was complete: the same command starts from the beginning."
    at = f"after step {saved[-1].step}, from {saved[-1].path}."
    if config.checkpoint.resume == "auto":
        return f"The same command resumes {at}"
    return f'With checkpoint.resume = "auto" the same command resumes {at}'

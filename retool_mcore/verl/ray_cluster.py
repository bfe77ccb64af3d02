"""Chooses a run's Ray cluster: its own on one node, the launch script's on several nodes."""

import os
import time
import zlib
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from retool_mcore.config import RlConfig
from retool_mcore.errors import PlatformError
from retool_mcore.run.folder import remove_when_quiet, temporary

GRACE_S = 5.0  # seconds between SIGTERM and SIGKILL


@contextmanager
def ray_arguments(config: RlConfig) -> Generator[dict[str, Any]]:
    """Additional arguments of ``ray.init``. Changes the environment.

    By default, on one node, Ray connects to the cluster that RAY_ADDRESS or Ray's folder names.
    That cluster may be dead, or belong to another user or program. Ray also prestarts a worker per
    core. No actor can use these workers, because they lack the run's runtime_env.
    """
    if config.cluster.nodes > 1:
        yield {}
        return
    os.environ.pop("RAY_ADDRESS", None)  # the run's processes must not inherit it
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's default 15, any other process starves training
    with ray_folder(config.run.dir) as folder, own_process_groups():
        yield {"address": "local", "_temp_dir": str(folder)}


@contextmanager
def own_process_groups() -> Generator[None]:
    """Start each of Ray's servers in a separate process group, and end these groups on exit.

    A scheduler or a shell may send SIGTERM to the run's whole process group. Ray's servers would
    then exit before the driver has saved a checkpoint. Leave this context after ``ray.shutdown``.
    It ends remaining processes, because an agent whose raylet was killed during its start would run
    for another minute.
    """
    from ray._private import services

    popen: Any = services.ConsolePopen
    groups: list[int] = []

    def start(*arguments: Any, **options: Any) -> Any:
        server = popen(*arguments, process_group=0, **options)
        groups.append(server.pid)
        return server

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = popen
        end_groups(groups)


def end_groups(groups: Collection[int]) -> None:
    """Send SIGTERM to all processes of these groups, and SIGKILL after ``GRACE_S`` seconds.

    Checks twice that none is left: a process may fork after ``members`` has read the list of pids,
    and end before ``members`` looks at it.
    """
    for end in (psutil.Process.terminate, psutil.Process.kill):
        deadline_s = time.monotonic() + GRACE_S
        for process in members(groups):
            with suppress(psutil.Error):  # it has ended meanwhile
                end(process)
        while (members(groups) or members(groups)) and time.monotonic() < deadline_s:
            time.sleep(0.05)


def members(groups: Collection[int]) -> list[psutil.Process]:
    """The processes of these groups in this process's session, without zombies."""
    processes: list[psutil.Process] = []
    session = os.getsid(0)  # excludes processes of other sessions that reuse a group's number
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = os.getpgid(process.pid) in groups and os.getsid(process.pid) == session
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def ray_folder_name(run_dir: Path, rank: int = 0) -> Path:
    """The folder of a run's Ray on node ``rank``; the same at each start of the run.

    It is short because the path of a Unix socket has at most 107 bytes.
    """
    return Path(f"/tmp/retool-ray-{os.getuid()}", f"{zlib.crc32(str(run_dir.resolve()).encode())}.{rank}")


@contextmanager
def ray_folder(run_dir: Path, rank: int = 0) -> Generator[Path]:
    """The folder of Ray's sockets and logs on node ``rank``, removed afterwards.

    Removes files of a killed start first. Raises PlatformError if another user owns the folder.
    """
    folder = ray_folder_name(run_dir, rank)
    parent = folder.parent
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.lstat().st_uid != os.getuid():
        raise PlatformError(f"{parent} belongs to another user, who could read Ray's sockets. Remove it.")
    remove_when_quiet(folder)
    with temporary(folder):
        yield folder

"""Checks the shell's limits, permissions of the run's folder, and lengths of socket paths.

Without these checks, such problems end a run during its start, with hundreds of lines from torch or
Ray. This module imports nothing heavy, because a start calls ``require_limits`` before its imports.
"""

import os
import resource
import tempfile
from collections.abc import Iterator

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.preflight.findings import Finding, error, ok

GIB = 2**30
# On a CPU with two cores, sft_tiny_cpu (2 ranks) and rl_tiny_cpu opened up to 200 files in one
# process, RL's worker (2026-11-26, /proc/PID/fd every 6 s). More ranks and cores need more.
MIN_OPEN_FILES = 512
# rl_tiny_cpu had 610 threads in 21 processes (2 cores, 2026-11-26). The limit counts all processes
# of a user.
MIN_THREADS = 1024
PATH_CHARS = 107  # unix(7): 108 bytes including the terminating null byte
# The longest socket paths that libraries create below a temporary folder.
MANAGER = "/pymp-xxxxxxxx/listener-xxxxxxxx"
RAY = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def require_limits(config: RunConfig) -> None:
    """Check the limits of this process and the permissions of the run's folder.

    Increases too-low soft limits to the minimum if the hard limits permit. Raises PlatformError for
    a limit that stays too low, and ConfigError for the folder.
    """
    if problem := ensure_open_files() or ensure_threads() or address_space_problem(get_platform(config.run.platform)):
        raise PlatformError(problem)
    if problem := folder_problem(config):
        raise ConfigError(f"{config.source}: {problem}")


def ensure_open_files() -> str:
    """Raise the soft limit of `ulimit -n` to the minimum; return why that is impossible, or ""."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MIN_OPEN_FILES <= hard or (files < MIN_OPEN_FILES and hard == resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES, hard))
    elif files < MIN_OPEN_FILES:
        return (
            f"{files} open files are allowed (ulimit -n), but a run needs {MIN_OPEN_FILES}. Raise the limit of this "
            "shell or container: ulimit -n 65536, or --ulimit nofile=65536."
        )
    return ""


def ensure_threads() -> str:
    """Raise the soft limit of `ulimit -u` to the minimum; return why that is impossible, or "".

    The limit does not apply to root.
    """
    threads, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or threads == resource.RLIM_INFINITY or threads >= MIN_THREADS:
        return ""
    if hard == resource.RLIM_INFINITY or hard >= MIN_THREADS:
        resource.setrlimit(resource.RLIMIT_NPROC, (MIN_THREADS, hard))
        return ""
    return (
        f"{threads} processes and threads are allowed (ulimit -u), but a run needs {MIN_THREADS}. Raise the limit "
        "of this shell or container: ulimit -u 65536, or --ulimit nproc=65536."
    )


def address_space_problem(platform: Platform) -> str:
    """The problem with `ulimit -v`, or ""."""
    needed = platform.host.min_address_space_gib
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= needed * GIB:
        return ""
    return (
        f"this shell limits the address space of a process to {limit / GIB:.1f} GiB (ulimit -v), but the libraries "
        f"map {needed} GiB, most of it unused. Remove the limit (ulimit -v unlimited), and limit memory with a "
        "cgroup instead."
    )


def folder_problem(config: RunConfig) -> str:
    """Why the run's folder cannot be written, or ""."""
    folder = config.run.dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        return f"{existing} is not a folder. Set run.root to a folder that can be written."
    if not os.access(existing, os.W_OK | os.X_OK):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        mount = " (its file system is read-only)" if read_only else ""
        return f"{existing} cannot be written{mount}. Set run.root to a folder that can be written."
    return ""


def sockets(config: RunConfig) -> Iterator[Finding]:
    """Check the lengths of socket paths, of the run's processes and of sandbox.where."""
    yield _folder("TMPDIR", tempfile.gettempdir(), MANAGER, "multiprocessing")
    if not isinstance(config, RlConfig):
        return
    named = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "RAY_TMPDIR")
    yield _folder(named, os.environ.get(named, "/tmp"), RAY, "Ray")
    for url in config.sandbox.where:
        path = url.removeprefix("unix://")
        if path != url and (length := len(os.fsencode(path))) > PATH_CHARS:
            yield error("sockets", f"the socket path {path} of sandbox.where has {length} bytes, but Linux allows "
                        f"{PATH_CHARS}. Serve the sandbox at a shorter path.")  # fmt: skip


def _folder(name: str, folder: str, suffix: str, library: str) -> Finding:
    length, limit = len(os.fsencode(os.path.abspath(folder))), PATH_CHARS - len(suffix)
    if length <= limit:
        return ok("sockets", f"{name} = {folder} is short enough for the sockets of {library}")
    return error("sockets", f"{name} = {folder} has {length} bytes, but at most {limit} are allowed: {library} creates "
                 f"sockets below it, and Linux allows {PATH_CHARS} in their paths. Set {name} to a shorter path, such "
                 "as /tmp.")  # fmt: skip

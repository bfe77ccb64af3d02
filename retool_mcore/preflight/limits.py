"""Limits of the shell, rights of the run's folder and lengths of socket paths.

They would end a run in the middle of its start, with hundreds of lines from torch or Ray.
Nothing heavy is imported here: a start calls ``require_limits`` before its imports.
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
# Measured on a CPU of two cores by /proc/PID/fd every 6 s, in runs of sft_tiny_cpu (2 ranks) and
# rl_tiny_cpu (2026-11-26): RL's worker had 200 files open, the most of all. More ranks and cores
# need more.
FEWEST_FILES = 512
# Counted in rl_tiny_cpu (2 cores, 2026-11-26): 610 threads in 21 processes. The limit counts
# everything that a user runs.
FEWEST_THREADS = 1024
PATH_CHARS = 107  # unix(7): 108 bytes with the last one, which is 0
# What libraries append to a temporary folder for the longest of their sockets.
MANAGER = "/pymp-xxxxxxxx/listener-xxxxxxxx"
RAY = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def require_limits(config: RunConfig) -> None:
    """Raise what the limits of this process and the rights of the run's folder will not allow.

    Soft limits of open files and threads are first raised as far as their owner may.
    """
    if problem := too_few_files() or too_few_threads() or too_few_addresses(get_platform(config.run.platform)):
        raise PlatformError(problem)
    if problem := unwritable(config):
        raise ConfigError(f"{config.source}: {problem}")


def too_few_files() -> str:
    """What is wrong with `ulimit -n`, or ""."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FEWEST_FILES <= most or (files < FEWEST_FILES and most == resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEWEST_FILES, most))
    elif files < FEWEST_FILES:
        return (
            f"{files} open files are allowed (ulimit -n), and a run needs {FEWEST_FILES}. Raise the limit of this "
            "shell or container: ulimit -n 65536, or --ulimit nofile=65536."
        )
    return ""


def too_few_threads() -> str:
    """What is wrong with `ulimit -u`, or ""; root has no such limit."""
    threads, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or threads == resource.RLIM_INFINITY or threads >= FEWEST_THREADS:
        return ""
    if most == resource.RLIM_INFINITY or most >= FEWEST_THREADS:
        resource.setrlimit(resource.RLIMIT_NPROC, (FEWEST_THREADS, most))
        return ""
    return (
        f"{threads} processes and threads are allowed (ulimit -u), and a run needs {FEWEST_THREADS}. Raise the limit "
        "of this shell or container: ulimit -u 65536, or --ulimit nproc=65536."
    )


def too_few_addresses(platform: Platform) -> str:
    """What is wrong with `ulimit -v`, or ""."""
    least = platform.host.least_addresses_gib
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses == resource.RLIM_INFINITY or addresses >= least * GIB:
        return ""
    return (
        f"this shell limits the address space of a process to {addresses / GIB:.1f} GiB (ulimit -v), and the libraries "
        f"map {least} without using them. Take the limit away (ulimit -v unlimited); limit memory by a "
        "cgroup instead."
    )


def unwritable(config: RunConfig) -> str:
    """Why nothing can be written into the run's folder, or ""."""
    folder = config.run.dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        return f"{existing} is no folder. Set run.root to one that can be written."
    if not os.access(existing, os.W_OK | os.X_OK):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        mount = " (its file system is read-only)" if read_only else ""
        return f"{existing} cannot be written{mount}. Set run.root to a folder that can."
    return ""


def sockets(config: RunConfig) -> Iterator[Finding]:
    """The folders in which the run's processes make sockets, and the sandbox's own socket."""
    yield _folder("TMPDIR", tempfile.gettempdir(), MANAGER, "multiprocessing")
    if not isinstance(config, RlConfig):
        return
    named = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "RAY_TMPDIR")
    yield _folder(named, os.environ.get(named, "/tmp"), RAY, "Ray")
    for url in config.sandbox.where:
        path = url.removeprefix("unix://")
        if path != url and (length := len(os.fsencode(path))) > PATH_CHARS:
            yield error("sockets", f"sandbox.where has a socket whose path has {length} characters, and Linux takes "
                        f"{PATH_CHARS}: {path}. Serve it under a shorter one.")  # fmt: skip


def _folder(name: str, folder: str, below: str, whose: str) -> Finding:
    length, most = len(os.fsencode(os.path.abspath(folder))), PATH_CHARS - len(below)
    if length <= most:
        return ok("sockets", f"{name} = {folder} leaves room for those of {whose}")
    return error("sockets", f"{name} = {folder} has {length} characters. Below it {whose} makes sockets, whose paths "
                 f"may have {PATH_CHARS}: that leaves {most}. Set {name} to a shorter one, like /tmp.")  # fmt: skip

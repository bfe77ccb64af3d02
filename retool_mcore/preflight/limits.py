"""What a shell's limits or a folder's rights would end in the middle of a start.

Torch, Ray and the engines tell it in hundreds of lines, or wait; here it is one, before they are
imported.
"""

import os
import resource
from pathlib import Path

from retool_mcore.config import RunConfig
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.base import Platform, get_platform

GIB = 2**30
# Measured on a CPU of two cores, by /proc/PID/fd and VmPeak every 6 s while runs of sft_tiny_cpu (2
# ranks) and rl_tiny_cpu went on (2026-11-26), the most of any process: RL's worker 200 files and
# 5.2 GiB of addresses (108 threads), a rank of SFT 118 and 4.1, an agent loop 127 and 3.9, the
# launcher 103 and 4.1, raylet 87 and 0.9, SGLang's scheduler 62 and 3.5. More ranks and cores take
# more.
FEWEST_FILES = 512
# Counted while rl_tiny_cpu went on (2 cores, 2026-11-26): 610 threads in 21 processes. The limit is
# of all that a user runs.
FEWEST_THREADS = 1024


def require_limits(config: RunConfig) -> None:
    """Raise what the limits of this process and the rights of the run's folder will not allow.

    The limits of open files and of threads are first raised to what their owner may raise them to.
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
    """What is wrong with `ulimit -u`, or ""; root is not held to it."""
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
        return f"{existing} cannot be written{_mount_of(existing)}. Set run.root to a folder that can."
    return ""


def _mount_of(folder: Path) -> str:
    return " (its file system is read-only)" if os.statvfs(folder).f_flag & os.ST_RDONLY else ""

"""Confines a process: the steps of each isolation level, in the order that the kernel requires.

Runs once in the zygote and once in each child (one child per execution), always before any model
code.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import sysconfig
from typing import Any

from retool_mcore.sandbox.supervisor import kernel
from retool_mcore.sandbox.supervisor.seccomp import for_process

# The C functions behind the ``signal`` module. The Python wrappers convert results to enums, which
# writes to memory pages that the kernel must then copy after the fork.
_signal: Any = sys.modules["_signal"]

NOBODY = 65534
# Uids of executions when the sandbox runs as root; above the range that distributions assign.
FIRST_UID, NUM_UIDS = 61_000, 4_480
MAX_PROCESSES = 64
MAX_OPEN_FILES = 256  # a pool of 32 workers uses two per worker
MAX_FILE_BYTES = 64 << 20
MAX_PENDING_SIGNALS = 256  # queued signals and timers
BOX = "/box"  # the working directory at level namespaces
_TMPFS = "size=128m,nr_inodes=1024,mode=1777"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_SYSTEM_LIBRARIES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo",
)  # fmt: skip
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def python_paths() -> list[str]:
    """Return the standard library and site-packages directories on ``sys.path``.

    An editable install adds its source tree to ``sys.path``; executions must not see it.
    """
    library = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    kept: list[str] = []
    for entry in sys.path:
        real = os.path.realpath(entry)
        in_library = any(real == root or os.path.dirname(real) == root for root in library)
        if os.path.isdir(entry) and (in_library or real.endswith(("site-packages", "dist-packages"))):
            kept.append(entry)
    return kept


def visible_paths() -> list[str]:
    """Return the paths that an execution may read. No path is below another one."""
    library_dir = sysconfig.get_config_var("LIBDIR")
    candidates = [*_SYSTEM_LIBRARIES, *python_paths(), *([library_dir] if library_dir else [])]
    paths = {path for path in candidates if os.path.exists(path)}
    paths |= {os.path.realpath(path) for path in paths}
    return [path for path in sorted(paths) if not any(path.startswith(other + "/") for other in paths)]


def library_prefixes() -> list[str]:
    """Return the Python library directories, with and without symlinks resolved.

    Tracebacks hide frames from these directories.
    """
    paths = [*python_paths(), sysconfig.get_path("stdlib")]
    return sorted({os.path.join(form, "") for path in paths for form in (path, os.path.realpath(path))})


# ---------------------------------------------------------------- namespaces


def _may_map(first: int, count: int) -> bool:
    """Whether this process is root in a user namespace that maps uids ``first`` and following."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as uid_map:
        ranges = [tuple(map(int, line.split())) for line in uid_map]
    return any(start <= first and first + count <= start + length for start, _, length in ranges)


def enter_namespaces() -> tuple[bool, bool]:
    """Unshare the user, mount, pid, network, IPC and UTS namespaces.

    The next child becomes pid 1 of the new pid namespace. Returns two flags: whether uid 0 is
    mapped (the caller must then call ``become_nobody`` later), and whether the uids of executions
    are mapped. Raises OSError with the kernel's errno.
    """
    as_root = _may_map(NOBODY, 1)  # the uid that replaces 0 later
    own_uids = as_root and _may_map(FIRST_UID, NUM_UIDS)
    uid_map = f"0 0 1\n{NOBODY} {NOBODY} 1" if as_root else f"{NOBODY} {os.geteuid()} 1"
    uid_map += f"\n{FIRST_UID} {FIRST_UID} {NUM_UIDS}" if own_uids else ""
    gid_map = f"0 0 1\n{NOBODY} {NOBODY} 1" if as_root else f"{NOBODY} {os.getegid()} 1"
    read_end, write_end = os.pipe()
    parent = os.getpid()
    helper = os.fork()  # writes the maps from the parent namespace, because only a process there may map two ids
    if helper == 0:
        os.close(write_end)
        if os.read(read_end, 1) != b"u":
            os._exit(1)
        try:
            for name, text in (("setgroups", "" if as_root else "deny"), ("uid_map", uid_map), ("gid_map", gid_map)):
                if text:
                    with open(f"/proc/{parent}/{name}", "w", encoding="ascii") as file:
                        file.write(text)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    os.close(read_end)
    try:
        kernel.unshare(
            kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
            | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
        )  # fmt: skip
        os.write(write_end, b"u")
    finally:
        os.close(write_end)
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if status:
        raise OSError(status, f"writing uid_map {uid_map!r}: {os.strerror(status)}")
    return as_root, own_uids


def build_root(root: str) -> None:
    """Build a minimal root file system at ``root`` and pivot into it.

    It is a read-only tmpfs with Python, the system libraries, four devices and /box. There is no
    /proc, because mountinfo, cmdline and environ would reveal host paths.
    """
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    hardened = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID
    for path in visible_paths():
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        else:
            _bind(path, root, hardened | kernel.MOUNT_ATTR_NODEV)
    for device in _DEVICES:
        _bind(device, root, hardened)  # read-only protects mode and times of the host's device node
    os.mkdir(root + BOX)
    os.symlink(BOX, root + "/dev/shm")
    if not os.path.exists(root + "/tmp"):  # exists if Python is installed under /tmp
        os.symlink(BOX, root + "/tmp")
    os.chdir(root)
    kernel.pivot_root_here()
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, "/", None, flags)


def _bind(path: str, root: str, attributes: int) -> None:
    target = root + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.set_mount_attributes(target, attributes)


def become_nobody() -> None:
    """Change from uid 0 to nobody, but keep all capabilities in the namespaces.

    The zygote needs them to set up its children; each child drops them.
    """
    os.setgroups([])
    kernel.keep_capabilities_over_setuid()
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.raise_all_capabilities()


def confine_in_namespaces(seccomp_program: bytes, *, uid: int | None) -> None:
    """Confine a child: private /box, private user namespace, limits, no capabilities, seccomp.

    The kernel counts in-flight descriptors (SCM_RIGHTS) per uid, so each execution has a ``uid``
    that no other execution uses at the same time. If the sandbox does not run as root, ``uid`` is
    None, and all executions share one uid.
    """
    if uid is not None:
        os.setresuid(uid, uid, uid)
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("tmpfs", BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _TMPFS)
    os.chdir(BOX)
    # In a new user namespace, the child has no privileges over the mounts just made, and
    # RLIMIT_NPROC and RLIMIT_SIGPENDING count only the child's own processes and signals.
    kernel.unshare(kernel.CLONE_NEWUSER)
    set_limits(MAX_PROCESSES, separate_user=True)
    kernel.drop_all_capabilities()
    kernel.make_dumpable()
    kernel.forbid_new_privileges()
    kernel.install_seccomp(seccomp_program)


# ------------------------------------------------------- landlock and rlimits


def open_landlock_rules() -> list[tuple[int, int]]:
    """Return an O_PATH fd and access rights for each path that all executions may use.

    The zygote opens the paths, because a child under another uid may not be able to.
    """
    read, write, read_dir = kernel.LANDLOCK_READ_FILE, kernel.LANDLOCK_WRITE_FILE, kernel.LANDLOCK_READ_DIR
    rights = {path: read | read_dir if os.path.isdir(path) else read for path in visible_paths()}
    rights |= dict.fromkeys(_DEVICES, read | write)
    return [(os.open(path, os.O_PATH | os.O_CLOEXEC), allowed) for path, allowed in rights.items()]


def confine_without_namespaces(
    seccomp_program: bytes,
    landlock_abi: int,
    landlock_rules: list[tuple[int, int]],
    *,
    uid: int | None,
    processes: int,
) -> None:
    """Confine a child without namespaces: limits, its own uid (if root), Landlock, seccomp.

    At level rlimits, ``landlock_abi`` is 0, which means no Landlock. The working directory must
    already be private to this execution.
    """
    set_limits(processes, separate_user=uid is not None)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.die_with_parent(signal.SIGKILL)  # after setresuid, which clears this setting
    kernel.drop_all_capabilities()
    kernel.make_dumpable()
    kernel.forbid_new_privileges()
    if landlock_abi:
        cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
        kernel.landlock(landlock_abi, [(cwd, kernel.LANDLOCK_DIRECTORY), *landlock_rules])
    kernel.install_seccomp(for_process(seccomp_program, os.getpid()))


def copy_contents_only() -> None:
    """Make shutil copy no modes and times, because the seccomp filter denies changing them."""
    shutil.copymode = shutil.copystat = lambda src, dst, *, follow_symlinks=True: None


def set_limits(processes: int, *, separate_user: bool) -> None:
    """Set the resource limits that are the same for every request.

    ``processes`` is RLIMIT_NPROC. ``separate_user``: the execution has its own uid or user
    namespace, so RLIMIT_SIGPENDING counts only its own signals and is set too.
    """
    for name, wanted in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        *([(resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS)] if separate_user else []),
    ):
        _, hard = resource.getrlimit(name)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(name, (limit, limit))


def reset_signals() -> None:
    """Undo signal settings that this process inherited: default handlers, nothing blocked."""
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])

"""Tests whether this machine supports an isolation level: starts a zygote, then attacks it.

A lower level is never chosen silently. Every refusal is recorded, and if ``min_level`` cannot be
met, the error lists all of them.
"""

import os

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, Level
from retool_mcore.sandbox.supervisor.images import WarmImage
from retool_mcore.sandbox.supervisor.process import run_once
from retool_mcore.sandbox.supervisor.slots import WorkerSlot

LOCAL_LEVELS = (Level.NAMESPACES, Level.LANDLOCK, Level.RLIMITS)

_HINTS = {
    Level.NAMESPACES: "allow unprivileged user namespaces: sysctl user.max_user_namespaces=15000, "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04), kernel.unprivileged_userns_clone=1 (Debian); "
    "in Docker, --security-opt seccomp=unconfined --security-opt apparmor=unconfined (or --cap-add SYS_ADMIN), "
    "and Linux 5.12 or newer; libseccomp2 must be installed",
    Level.LANDLOCK: "Linux 5.13 or newer with landlock in the kernel's lsm= list, a container runtime whose seccomp "
    "profile lets the landlock system calls through, and libseccomp2",
    Level.RLIMITS: "Linux on x86-64 or arm64 with a readable Python",
}

# What each level must deny. The probe runs these lines inside the sandbox and fails at the first
# one that is not denied.
_ATTACKS = {
    Level.NAMESPACES: """
        refused("open", lambda: open("/etc/passwd"))
        refused("write", lambda: open("/usr/lib/probe", "w"))
        refused("socket", lambda: socket.socket())
        refused("unshare", lambda: libc_call("unshare", 0x10000000))
        assert os.getpid() == 1, "pid namespace"
    """,
    Level.LANDLOCK: """
        refused("open", lambda: open("/etc/passwd"))
        refused("write", lambda: posix.open("/tmp/probe-of-the-sandbox", os.O_WRONLY | os.O_CREAT))
        refused("socket", lambda: socket.socket())
        refused("unshare", lambda: libc_call("unshare", 0x10000000))
        refused("kill", lambda: os.kill(os.getppid(), 0))
    """,
    Level.RLIMITS: """
        refused("socket", lambda: socket.socket())
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0), "core limit"
        assert resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY, "memory limit"
    """,
}
_PROBE = """
import ctypes, os, posix, resource, socket, textwrap
def libc_call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def refused(what, attempt):
    try:
        attempt()
    except OSError:
        return
    raise AssertionError(f"{what} was not refused")
open("probe", "w").write("the working directory is writable")
"""


async def start_and_probe(image: WarmImage, level: Level, slot: WorkerSlot) -> None:
    """Start ``image`` and run the probe of ``level`` in it once.

    Raises SandboxUnavailable or OSError when either fails.
    """
    code = _PROBE + "exec(textwrap.dedent('''" + _ATTACKS[level] + "'''))"
    await image.start()
    result = await run_once(image, slot, ExecRequest(code=code, memory_limit_mb=256))
    if result.return_code != 0:
        raise SandboxUnavailable(f"the probe in the sandbox failed: {result.stderr.strip() or result.return_code}")


def warnings(level: Level, python_in_tmp: bool, reachable: str) -> list[str]:
    """Return the warnings for running at ``level``.

    ``python_in_tmp``: Python is under /tmp, which makes /tmp read-only at level namespaces.
    ``reachable``: a Python directory through whose fd model code can reach a closed directory (see
    ``library_fds.py``), or "".
    """
    texts: list[str] = []
    if level == Level.RLIMITS and reachable:
        texts.append(
            f"Python's {reachable} is in a directory that other users cannot enter, and this process lacks "
            "CAP_SYS_ADMIN. Model code can enter that directory and read what every user may read in it. Install "
            "Python elsewhere."
        )
    if level == Level.RLIMITS:
        others = "" if os.geteuid() == 0 else " and signal every process of this user"
        texts.append(f"sandbox level is rlimits: model code can read files{others}. Only for code that you trust.")
    elif level == Level.LANDLOCK:
        texts.append(
            "sandbox level is landlock, below namespaces: model code can find out which files exist and the host's "
            f"name. To get namespaces: {_HINTS[Level.NAMESPACES]}."
        )
    if level == Level.NAMESPACES and python_in_tmp:
        texts.append("model code cannot write to /tmp, because Python itself is installed under /tmp.")
    return texts


def refusal(min_level: Level, reasons: dict[Level, str]) -> SandboxUnavailable:
    """Build the error for a ``min_level`` that this machine does not support."""
    lines = [f"This machine does not support min_level = {str(min_level)!r} of the sandbox."]
    for level, reason in reasons.items():
        lines.append(f"  {level}: {reason}")
        lines.append(f"    to allow it: {_HINTS[level]}")
    lines.append(
        "Or set min_level to a weaker level. The README of the sandbox lists the attacks that succeed at that level."
    )
    return SandboxUnavailable("\n".join(lines))

"""ctypes wrappers of system calls that Python does not provide.

This module contains no policy: other modules decide when to call what. Every function raises
OSError with the kernel's errno and the name of the call, so that errors can name what was refused.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV = 0x1, 0x2, 0x4
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x4_0000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 24, 36, 38
_SECCOMP_MODE_FILTER = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE = 1
# Numbers above 423 are the same on every architecture. capset is a libc function; pivot_root is
# not.
_SYS_OPEN_TREE, _SYS_MOUNT_SETATTR = 428, 442
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")
    return result


def unshare(flags: int) -> None:
    """unshare(2): create and enter new namespaces of the types in ``flags`` (CLONE_NEW*)."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def enter_namespace(fd: int, kind: int) -> None:
    """setns(2): join the namespace that ``fd`` refers to, of type ``kind`` (CLONE_NEW*)."""
    _check(_libc.setns(fd, kind), f"setns({kind:#x})")


def mount(source: str | None, target: str, filesystem: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    encoded = [None if text is None else text.encode() for text in (source, target, filesystem, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount({filesystem or source} on {target})")


def set_mount_attributes(target: str, attributes: int) -> None:
    """Set ``attributes`` (MOUNT_ATTR_*) on ``target`` and all mounts below it. Linux >= 5.12."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, request, ctypes.c_size_t(len(request))
    )
    _check(result, f"mount_setattr({target})")


def open_tree(path: str) -> int:
    """open_tree(2): clone ``path`` as a detached mount and return an fd of its root.

    `..` at that root does not lead out of it. The fd is close-on-exec. Requires CAP_SYS_ADMIN.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    return _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree({path})")


def unmount(target: str) -> None:
    """umount2(2) with MNT_DETACH: works even while files below ``target`` are open."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount({target})")


def pivot_root_here() -> None:
    """Make the working directory the root directory and detach the old root."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    unmount(".")  # the old root
    os.chdir("/")


def _prctl(option: int, value: int, what: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def die_with_parent(signal: int) -> None:
    """Make the kernel send ``signal`` to this process when its parent dies (PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, signal, "prctl(PR_SET_PDEATHSIG)")


def make_dumpable() -> None:
    """Let this process open its own files in /proc again, which a change of uid denies."""
    _prctl(_PR_SET_DUMPABLE, 1, "prctl(PR_SET_DUMPABLE)")


def keep_capabilities_over_setuid() -> None:
    """Keep the permitted capabilities across the next setuid (PR_SET_KEEPCAPS)."""
    _prctl(_PR_SET_KEEPCAPS, 1, "prctl(PR_SET_KEEPCAPS)")


def adopt_orphans() -> None:
    """Become the subreaper: adopt descendants whose parent exits (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "prctl(PR_SET_CHILD_SUBREAPER)")


def forbid_new_privileges() -> None:
    """Set no_new_privs: execve no longer grants privileges (setuid bits, file capabilities)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")


def _capset(effective: int, permitted: int) -> None:
    header = struct.pack("Ii", 0x2008_0522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    low, high = 0xFFFF_FFFF, 32
    data = struct.pack("6I", effective & low, permitted & low, 0, effective >> high, permitted >> high, 0)
    _check(_libc.capset(header, data), "capset")


def raise_all_capabilities() -> None:
    """Make every capability effective.

    All must be in the permitted set, as they are for the creator of a user namespace.
    """
    everything = (1 << 64) - 1  # the kernel ignores bits without a capability
    _capset(everything, everything)


def drop_all_capabilities() -> None:
    """Drop every capability from all sets, for this process and everything it executes.

    Only a process with CAP_SETPCAP can lower the bounding set. Without CAP_SETPCAP, this step is
    skipped.
    """
    for capability in range(64):  # as many bits as a set has; the kernel refuses the first unused number
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _capset(0, 0)


def install_seccomp(program: bytes) -> None:
    """Install a classic BPF program (8 bytes per instruction) as this thread's seccomp filter."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, fprog, 0, 0), "prctl(PR_SET_SECCOMP)")


_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


def collapse_into_huge_pages(maps: str) -> None:
    """Collapse this process's anonymous memory into 2 MiB pages (MADV_COLLAPSE).

    ``maps`` is the text of /proc/self/maps. fork copies one page-table entry per page, so huge
    pages halve its cost. Requires Linux 6.1; on older kernels, or with fragmented memory, forks are
    only slower.
    """
    for line in maps.splitlines():
        fields = line.split()
        start, end = (int(address, 16) for address in fields[0].split("-"))
        if fields[1] != "rw-p" or fields[4] != "0" or fields[5:] not in ([], ["[heap]"]):
            continue
        address = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        while address + _HUGE_PAGE_BYTES <= end:
            size = ctypes.c_size_t(_HUGE_PAGE_BYTES)
            _libc.madvise(ctypes.c_void_p(address), size, _MADV_COLLAPSE)
            address += _HUGE_PAGE_BYTES


# Landlock access rights (linux/landlock.h), by the ABI version that introduced them.
LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1 << 1, 1 << 2, 1 << 3
_LANDLOCK_ABI1 = (1 << 13) - 1
_LANDLOCK_EXECUTE, _LANDLOCK_MAKE_CHAR, _LANDLOCK_MAKE_BLOCK = 1 << 0, 1 << 6, 1 << 11
_LANDLOCK_REFER, _LANDLOCK_TRUNCATE, _LANDLOCK_IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
LANDLOCK_DIRECTORY = ~(_LANDLOCK_EXECUTE | _LANDLOCK_MAKE_CHAR | _LANDLOCK_MAKE_BLOCK)  # of a private directory
LANDLOCK_ABI_WITH_TRUNCATE, LANDLOCK_ABI_WITH_SIGNAL_SCOPE = 3, 6


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI version.

    Raises OSError if the kernel has no Landlock (ENOSYS) or has it disabled (EOPNOTSUPP).
    """
    version = _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return _check(version, "landlock_create_ruleset")


def landlock(abi: int, rules: Sequence[tuple[int, int]]) -> None:
    """Restrict this thread to ``rules``: pairs of an fd (file or directory) and rights beneath it.

    From ABI 4 on, this also denies TCP bind and connect. From ABI 6 on, it also denies signals to
    processes outside the Landlock domain, and connections to abstract Unix sockets outside it.
    """
    restricted = _LANDLOCK_ABI1
    for since, right in ((2, _LANDLOCK_REFER), (3, _LANDLOCK_TRUNCATE), (5, _LANDLOCK_IOCTL_DEV)):
        if abi >= since:
            restricted |= right
    attributes = struct.pack("Q", restricted)
    if abi >= 4:
        attributes += struct.pack("Q", 0b11)  # bind and connect TCP
    if abi >= LANDLOCK_ABI_WITH_SIGNAL_SCOPE:
        attributes += struct.pack("Q", 0b11)  # abstract Unix sockets, signals
    ruleset = _check(
        _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0),
        "landlock_create_ruleset",
    )
    for fd, rights in rules:
        beneath = struct.pack("=Qi", rights & restricted, fd)
        _check(_libc.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, 1, beneath, 0), "landlock_add_rule")
    _check(_libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)

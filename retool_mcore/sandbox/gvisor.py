"""The gvisor level: one runsc container per execution, each with a kernel of its own in user space.

The zygote of this level holds no warm Python. It writes one OCI bundle, then forks a guardian for
each execution. The guardian's child becomes ``runsc run``, so the supervisor handles a container
exactly like any other child. Of the open files only the three standard ones cross gVisor's
boundary, and these may be sockets: the control socket is the container's fd 0, and ``inside.py``
moves it to the fd where every child has it.
"""

import contextlib
import json
import os
import py_compile
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox import confine, kernel

_BOOT = "/retool"  # in the container: copies of _BOOT_MODULES, nothing else of ours
_BOOT_MODULES = ("runner", "habits", "imports", "kernel", "packages", "pools", "tracebacks", "inside")
_LOG, _PANIC_LOG = "runsc.log", "panic.log"
_TMPFS_OPTIONS = ["nosuid", "nodev", "mode=1777", "size=128m"]
_LIMITS = {
    "RLIMIT_CORE": 0,
    "RLIMIT_NOFILE": confine.MAX_OPEN_FILES,
    "RLIMIT_FSIZE": confine.MAX_FILE_BYTES,
    "RLIMIT_NPROC": confine.MAX_PROCESSES,
    "RLIMIT_MEMLOCK": 0,
    "RLIMIT_MSGQUEUE": 0,
}


def find_runsc() -> str:
    """The runsc of this machine. Raises SandboxUnavailable when there is none on the PATH."""
    found = shutil.which("runsc")
    if found is None:
        raise SandboxUnavailable(f"no program called runsc in PATH = {os.environ.get('PATH', '')!r}")
    return os.path.realpath(found)


def write_bundle(parent: str, hidden: Sequence[str], seccomp: bytes, heavy: Iterable[str]) -> str:
    """Make the OCI bundle that a zygote's containers share, in a new directory under ``parent``.

    ``hidden`` are the path prefixes whose frames a traceback leaves out. ``seccomp`` is the program
    of the other levels: in a container it keeps the code from most of gVisor's own kernel, and
    refused calls get the same answers as at the other levels. ``heavy`` packages are imported
    before the clock starts.
    """
    directory = Path(tempfile.mkdtemp(dir=parent))  # a killed zygote may have left its bundle there
    directory.chmod(0o711)
    root = directory / "rootfs"
    boot = directory / "boot"
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": confine.BOX, "type": "tmpfs", "source": "tmpfs", "options": _TMPFS_OPTIONS},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": _TMPFS_OPTIONS},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs", "options": _TMPFS_OPTIONS},
        _bind(str(boot), _BOOT),
    ]
    for mount_point in ("proc", "dev", "sys", "tmp", confine.BOX[1:], _BOOT[1:]):
        (root / mount_point).mkdir(parents=True, exist_ok=True)
    python = os.path.realpath(sys.executable)
    for path in [*confine.visible_paths(), python]:
        if os.path.islink(path):
            target = Path(f"{root}{path}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(path))
        elif not any(path.startswith(str(mount["destination"]) + "/") for mount in mounts):
            _make_mount_point(path, Path(f"{root}{path}"))
            mounts.append(_bind(path, path))
    _write_boot(boot)
    arguments = {
        "paths": confine.python_paths(),
        "hidden": [_BOOT + "/", *hidden],
        "seccomp": seccomp.hex(),
        "heavy": sorted(heavy),
    }
    (directory / "config.json").write_text(json.dumps(_config(root, mounts, python, arguments)))
    return str(directory)


def _bind(source: str, destination: str) -> dict[str, object]:
    return {
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": ["rbind", "ro", "nosuid", "nodev"],
    }


def _make_mount_point(path: str, target: Path) -> None:
    if os.path.isdir(path):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _write_boot(boot: Path) -> None:
    """Copy our modules as a package and compile them: containers cannot keep compiled files."""
    package = boot / "retool_mcore" / "sandbox"
    package.mkdir(parents=True)
    for init in (package / "__init__.py", package.parent / "__init__.py"):
        init.touch()
    for name in _BOOT_MODULES:
        copied = shutil.copyfile(Path(__file__).with_name(f"{name}.py"), package / f"{name}.py")
        copied.chmod(0o644)
        py_compile.compile(str(copied), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def _config(
    root: Path, mounts: Sequence[Mapping[str, object]], python: str, arguments: Mapping[str, object]
) -> dict[str, object]:
    boot = f"import sys; sys.path.insert(0, {_BOOT!r}); from retool_mcore.sandbox.inside import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "HOME"}
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "user": {"uid": confine.NOBODY, "gid": confine.NOBODY},
            "args": [python, "-s", "-P", "-S", "-B", "-c", boot, json.dumps(arguments)],
            "env": [f"{key}={value}" for key, value in environment.items()],
            "cwd": confine.BOX,
            "noNewPrivileges": True,
            "capabilities": {},
            "rlimits": [{"type": name, "soft": value, "hard": value} for name, value in _LIMITS.items()],
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }


def become_container(runsc: str, bundle: str, fds: Sequence[int]) -> NoReturn:
    """Replace this process by ``runsc run``.

    ``fds``: control, stdout, stderr, ..., the slot's directory. What runsc writes to disk about the
    container lies in the slot's directory, and is deleted with it.
    """
    os.fchdir(fds[-1])
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, 4096)
    kernel.die_with_parent(signal.SIGKILL)
    options = [
        f"--root={os.getcwd()}/state",
        f"--log={os.getcwd()}/{_LOG}",
        f"--panic-log={os.getcwd()}/{_PANIC_LOG}",
        "--network=none",
        "--ignore-cgroups",  # an execution is put into its slot's cgroup before runsc starts
        "--file-access=exclusive",
        "--file-access-mounts=exclusive",  # read-only, and nobody changes them: may be cached
        *(["--rootless"] if os.geteuid() else []),
    ]
    os.execv(runsc, [runsc, *options, "run", f"--bundle={bundle}", f"retool-sandbox-{os.getpid()}"])


def startup_errors(directory: Path) -> str:
    """What runsc wrote about a container that did not start.

    That is the cause of a Go panic, and each error once.
    """
    words: list[str] = []
    with contextlib.suppress(OSError):
        words += [line for line in (directory / _PANIC_LOG).read_text(errors="replace").splitlines()[:1] if line]
    with contextlib.suppress(OSError, ValueError):
        decoder, text = json.JSONDecoder(), (directory / _LOG).read_text()
        while text:  # one object after the other, with nothing in between
            entry, end = decoder.raw_decode(text)
            words.append(entry["msg"])
            text = text[end:].lstrip()
    return "; ".join(dict.fromkeys(words))


def return_code(status: int) -> int:
    """What runsc's own wait status says about the code: 128 and above is a signal, as in a shell.

    Used only when the container could not report it: its first process was killed, or the control
    socket was shut.
    """
    code = os.waitstatus_to_exitcode(status)
    if code > 128:
        return 128 - code
    return code if 0 <= code < 128 else -signal.SIGKILL


def library_prefixes() -> list[str]:
    """The libraries' directories under every name they have; tracebacks leave out their frames."""
    paths = [*confine.python_paths(), sysconfig.get_path("stdlib")]
    return sorted({os.path.join(form, "") for path in paths for form in (path, os.path.realpath(path))})

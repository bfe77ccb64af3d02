"""Zygote (fork server): imports packages once, then forks one confined child per execution.

It is single-threaded and starts with a clean environment. It never sees request data, because every
child can read the memory it inherits. Code reaches the child through a control socket, which the
zygote only passes on. This module and those it imports need only the standard library, because
another interpreter (``sandbox.python``) lacks our packages.

Protocol, one message per SEQPACKET datagram:

- Supervisor to zygote: SPAWN with the fds [control, stdout, stderr, cgroup.procs (if there is a
  cgroup), working directory (levels landlock and rlimits)].
- Zygote to supervisor, once: READY (JSON facts), FAILED (text) or MISCONFIGURED (text for the
  user). Then per job: STARTED (with a pidfd) and later EXITED, or FAILED.
"""

import fcntl
import gc
import json
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from retool_mcore.sandbox.child import packages, paths, programs, runner, tracebacks
from retool_mcore.sandbox.supervisor import confine, guardian, kernel, library_fds

SPAWN = struct.Struct("=Qi?")  # job, uid of the execution or -1, whether a cgroup fd is included
READY, STARTED, EXITED, FAILED, MISCONFIGURED = b"O", b"P", b"X", b"F", b"C"
STARTED_BODY = struct.Struct("=Q")
EXITED_BODY = struct.Struct("=Qid")  # job, wait status, CPU seconds

_CONTROL_FD = 3
_LIBRARY_FD_BASE = 200  # above all other fds of the zygote; see library_fds.py
_TASKS_CACHE_S = 10.0


class Zygote:
    """One warm image at one isolation level."""

    def __init__(self, channel: socket.socket, config: dict[str, Any]) -> None:
        self._channel = channel
        self._level: str = config["level"]
        self._light: bool = config["light"]
        self._seccomp: bytes = config["seccomp"]
        self._root: str = config["root"]
        self._landlock_abi: int = config["landlock_abi"]
        self._preload: list[str] = config["preload"]
        self._jobs: dict[int, tuple[int, int]] = {}  # pid -> job, pidfd
        self._poll = select.poll()  # the channel and the pidfds
        self._pid_namespace = -1
        self._own_uids = False  # whether the user namespace maps a uid for each execution
        self._num_library_fds = 0
        self._reachable = ""  # a Python directory whose fd leads into a closed directory; see library_fds.py
        self._landlock_rules: list[tuple[int, int]] = []
        self._tasks = (0.0, 0)
        self._proc_fd = -1
        self._mapped_bytes = 0

    def set_up(self) -> None:
        """Confine the zygote, import packages, and send READY to the supervisor.

        Raises OSError if the kernel refuses a step, PreloadError for a bad ``sandbox.preload``.
        """
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        package_dir = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        tracebacks.hide([f"{package_dir}/", *confine.library_prefixes()])
        sys.path[:] = confine.python_paths()
        # An editable install may add a finder for its source tree: keep only Python's three
        # finders.
        sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__module__", "").startswith("_frozen_importlib")]
        python_in_tmp = any(path.startswith("/tmp/") for path in confine.visible_paths())
        if self._level == "namespaces":
            self._become_init()
        else:
            kernel.adopt_orphans()
            os.stat(f"/proc/self/task/{os.getpid()}/children")  # guardian.py needs CONFIG_PROC_CHILDREN
            self._proc_fd = os.open("/proc/self", os.O_RDONLY)
            if self._level == "landlock":
                self._landlock_rules = confine.open_landlock_rules()
                if os.geteuid() != 0:
                    confine.copy_contents_only()
            if os.geteuid() == 0:
                self._num_library_fds, self._reachable = library_fds.import_from_descriptors(_LIBRARY_FD_BASE)
        programs.patch_program_calls()
        if self._level == "landlock":
            paths.redirect_shared_dirs(confine.visible_paths())
        missing = packages.import_defaults(light=self._light)
        for name in [name for name in sys.modules if name.partition(".")[0] == "retool_mcore"]:
            del sys.modules[name]  # hide our modules from model code; this file keeps its references
        if (threads := self._count_threads()) != 1:
            raise OSError(0, f"the warm image runs {threads} threads; a fork would lose all but one")
        if self._preload and not self._light:
            self._import_preload()
        os.environ.clear()
        os.environ.update(confine.ENVIRONMENT, HOME=confine.BOX, TMPDIR=confine.BOX)
        self._mapped_bytes = int(self._read_own_proc("statm").split()[0]) * resource.getpagesize()
        gc.collect()
        gc.disable()
        gc.freeze()
        kernel.collapse_into_huge_pages(self._read_own_proc("maps"))
        facts = {"missing": missing, "python_in_tmp": python_in_tmp, "reachable": self._reachable}
        self._channel.send(READY + json.dumps(facts).encode())

    def _become_init(self) -> None:
        as_root, self._own_uids = confine.enter_namespaces()
        inner = os.fork()
        if inner:
            self._channel.close()
            os.waitpid(inner, 0)
            os._exit(0)
        kernel.die_with_parent(signal.SIGKILL)
        socket.sethostname("sandbox")
        self._proc_fd = os.open("/proc/self", os.O_RDONLY)  # the new root has no /proc
        confine.build_root(self._root)
        if as_root:
            confine.become_nobody()
            kernel.die_with_parent(signal.SIGKILL)  # a change of uid clears this setting
        self._pid_namespace = os.pidfd_open(os.getpid())

    def _import_preload(self) -> None:
        """Import ``sandbox.preload``, with a HOME for files such as matplotlib's font cache.

        At level namespaces, HOME is a tmpfs, unmounted before the first fork. At the other levels,
        it is part of the state directory and is removed with it.
        """
        folder = confine.BOX if self._level == "namespaces" else self._root
        if self._level == "namespaces":
            kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV)
        os.environ["HOME"] = os.environ["TMPDIR"] = paths.box = folder
        packages.import_preload(self._preload, self._count_threads)
        paths.box = "."
        if self._level == "namespaces":
            kernel.unmount(folder)

    def _read_own_proc(self, name: str) -> str:
        with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=self._proc_fd)) as file:
            return file.read()

    def _count_threads(self) -> int:
        return int(self._read_own_proc("stat").rpartition(")")[2].split()[17])

    def serve(self) -> NoReturn:
        """Fork children on request and report exits until the supervisor closes the channel."""
        confine.reset_signals()  # an inherited SIG_IGN of SIGCHLD would lose exit statuses
        self._poll.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._channel.fileno():  # a pidfd: the child has exited
                    self._reap()
                elif not self._take_job():
                    self._end_all()

    def _take_job(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._channel, SPAWN.size, 5)
        if not message:
            return False
        job, uid, has_cgroup = SPAWN.unpack(message)
        try:
            pid = self._fork(fds, uid if uid >= 0 else None, has_cgroup)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(self._channel, [STARTED + STARTED_BODY.pack(job)], [pidfd])
            self._poll.register(pidfd, select.POLLIN)
            self._jobs[pid] = job, pidfd
        except OSError as error:
            self._channel.send(FAILED + STARTED_BODY.pack(job) + str(error).encode())
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _fork(self, fds: list[int], uid: int | None, has_cgroup: bool) -> int:
        cgroup = fds[3] if has_cgroup else None
        if self._level == "namespaces":
            # The kernel rejects a second unshare(CLONE_NEWPID) unless the process first returns to
            # its own pid namespace.
            kernel.enter_namespace(self._pid_namespace, kernel.CLONE_NEWPID)
            kernel.unshare(kernel.CLONE_NEWPID)
            own_uid = uid if self._own_uids else None
            confine_self = partial(confine.confine_in_namespaces, self._seccomp, uid=own_uid)
            return _fork_into(lambda: self._run(fds, confine_self), cgroup)
        processes = confine.MAX_PROCESSES + (self._other_tasks() if uid is None else 0)
        return _fork_into(lambda: self._guard(fds, uid, processes), cgroup)

    def _guard(self, fds: list[int], uid: int | None, processes: int) -> None:
        """At levels landlock and rlimits: fork the execution, wait for it, kill its leftovers."""
        self._channel.close()
        kernel.adopt_orphans()
        kernel.die_with_parent(signal.SIGTERM)
        guardian.block_signals()

        def confine_self() -> None:
            os.fchdir(fds[-1])
            confine.confine_without_namespaces(
                self._seccomp, self._landlock_abi, self._landlock_rules, uid=uid, processes=processes
            )
            paths.box = os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()

        child = _fork_into(lambda: self._run(fds, confine_self))
        for fd in fds:
            os.close(fd)
        guardian.outlive(child)

    def _run(self, fds: list[int], confine_self: Callable[[], None]) -> None:
        """Confine this process and run cells in it. Closes all fds but 0 to 3 and the library's."""
        os.setsid()
        os.dup2(fds[1], 1)
        os.dup2(fds[2], 2)
        os.dup2(fds[0], _CONTROL_FD, inheritable=False)
        control = socket.socket(fileno=_CONTROL_FD)
        try:
            confine_self()
            os.closerange(_CONTROL_FD + 1, _LIBRARY_FD_BASE)
            os.closerange(_LIBRARY_FD_BASE + self._num_library_fds, 4096)
        except OSError as error:
            runner.send_frame(control, runner.SETUP_ERROR, str(error).encode())
            return
        runner.send_frame(control, runner.READY)
        runner.CellRunner(control, self._mapped_bytes).serve()

    def _reap(self) -> None:
        ended = guardian.reap()
        if ended and self._level != "namespaces":  # a guardian may have been killed, with its processes left over
            ended += guardian.end_strays(self._jobs)
        for pid, status, cpu_s in ended:
            if pid in self._jobs:
                job, pidfd = self._jobs.pop(pid)
                self._poll.unregister(pidfd)
                os.close(pidfd)
                self._channel.send(EXITED + EXITED_BODY.pack(job, status, cpu_s))

    def _end_all(self) -> NoReturn:
        """Kill all children and exit, because the supervisor is gone.

        At level namespaces, this process is pid 1, so the kernel kills its namespace when it exits.
        At the other levels, it kills its children, and then the orphans that it adopts.
        """
        if self._level != "namespaces":
            guardian.end_strays(())
        os._exit(0)

    def _other_tasks(self) -> int:
        """Count this user's tasks: without a uid per execution, RLIMIT_NPROC counts them too."""
        now = time.monotonic()
        if now - self._tasks[0] > _TASKS_CACHE_S:
            self._tasks = (now, guardian.count_tasks(os.getuid()))
        return self._tasks[1]


def _fork_into(body: Callable[[], None], cgroup: int | None = None) -> int:
    """Fork a child that joins ``cgroup`` (an fd of cgroup.procs), runs ``body`` and exits."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if cgroup is not None:
            os.write(cgroup, b"0")  # "0" means the writer; the fd carries the supervisor's permission
        confine.reset_signals()
        body()
    except BaseException as error:  # noqa: BLE001  nothing may unwind into the zygote's loop
        os.write(2, f"sandbox: {error!r}\n".encode())
    finally:
        os._exit(121)


def main(fd: int) -> NoReturn:
    """Entry point of the process that ``images.py`` starts; ``fd`` is its end of the channel."""
    channel = socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 2 * _CONTROL_FD))
    os.close(fd)
    os.dup2(0, _CONTROL_FD)  # reserve this number, which children use for their control socket
    zygote = Zygote(channel, marshal.loads(channel.recv(1 << 16)))
    try:
        zygote.set_up()
    except packages.PreloadError as error:
        channel.send(MISCONFIGURED + str(error).encode(errors="replace")[: 1 << 15])
        os._exit(1)
    except (OSError, ImportError) as error:
        channel.send(FAILED + str(error).encode())
        os._exit(1)
    zygote.serve()

"""The first process of a gVisor container: forks the interpreter, outlives it, reports its end.

This file is copied into the container beside the modules that it imports. It imports the
libraries that the code names before the clock starts, because the warm images of the other levels
have them ready as well.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import site
import socket
import struct
import sys
from typing import Any, NoReturn

from retool_mcore.sandbox import habits, kernel, packages, pools, runner, tracebacks

_CONTROL_FD = 3
_ENVIRONMENT = ("PATH", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ContainerInterpreter(runner.CellRunner):
    """Confines itself and sends READY once its libraries are imported, not before."""

    def __init__(self, control: socket.socket, *, heavy: frozenset[str], seccomp: bytes) -> None:
        super().__init__(control, light=False, heavy=heavy, mapped_bytes=0)
        self._seccomp = seccomp

    def prepare(self, request: dict[str, Any]) -> None:
        """Import what the code names; this process is already confined, and may parse the code."""
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree, _ = habits.parse_cell(request["code"], "main.py", notebook=request["notebook"])
            for name in sorted(packages.heavy_imports(tree, self._heavy)):
                with contextlib.suppress(Exception):  # the code's own import will say so
                    importlib.import_module(name)
        runner.reseed()
        with open("/proc/self/statm", encoding="ascii") as statm:
            self._mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        try:
            kernel.install_seccomp(self._seccomp)
        except OSError as error:
            runner.send_frame(self._control, runner.SETUP_ERROR, str(error).encode())
            os._exit(1)
        runner.send_frame(self._control, runner.READY)


def main() -> NoReturn:
    """Entry point.

    The one argument is JSON: ``paths`` for sys.path, ``hidden`` for tracebacks, ``seccomp`` in hex,
    ``heavy`` packages.
    """
    arguments = json.loads(sys.argv[1])
    sys.path[:] = arguments["paths"]
    os.dup2(0, _CONTROL_FD, inheritable=False)
    os.close(0)
    os.open("/dev/null", os.O_RDONLY)
    for name in [name for name in os.environ if name not in _ENVIRONMENT]:
        del os.environ[name]
    os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
    pools.without_programs_and_sockets()
    tracebacks.hide(arguments["hidden"])
    control = socket.socket(fileno=_CONTROL_FD)
    interpreter = ContainerInterpreter(
        control,
        heavy=frozenset(arguments["heavy"]),
        seccomp=bytes.fromhex(arguments["seccomp"]),
    )
    site.setquit()
    site.setcopyright()
    site.sethelper()
    for name in [name for name in sys.modules if name.partition(".")[0] == "retool_mcore"]:
        del sys.modules[name]
    child = os.fork()
    if child:
        _outlive(child, control)
    os.setsid()
    interpreter.serve()


def _outlive(child: int, control: socket.socket) -> NoReturn:
    """Reap all that ends; report the interpreter's end. The container ends with this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid, status = os.wait()
    while pid != child:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        runner.send_frame(control, runner.ENDED, struct.pack("=i", code))
    os._exit(code if code >= 0 else 128 - code)  # a shell's convention, in case the frame does not arrive

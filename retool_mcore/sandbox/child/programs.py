"""One clear line where model code asks for a program, or for state that processes share.

Applied to the warm image above level rlimits, before any of the model's code. It protects nothing:
without it the kernel refuses the same in words that say less, or a child dies where nobody looks.
"""

import _posixsubprocess
import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from retool_mcore.sandbox.child.imports import Change, change_on_import

NOT_RUN = "programs cannot be run here; use Python"
# Module -> a class, its method that all uses go through, and what they are. A manager needs a
# socket, and the others look at /dev/shm or start a program that tracks them.
_NOT_OFFERED = {
    "multiprocessing.managers": ("BaseManager", "start", "managers"),
    "multiprocessing.heap": ("Arena", "__init__", "shared values, arrays and barriers"),
    "multiprocessing.shared_memory": ("SharedMemory", "__init__", "blocks of shared memory"),
}
_SEMAPHORES = {"multiprocessing.synchronize": ("SemLock", "__init__", "pools, queues and locks")}


def say_what_is_not_offered(*, semaphores: bool) -> None:
    """Have os.system, subprocess and multiprocessing say in one line what they cannot do.

    ``semaphores``: whether /dev/shm can be written. Then processes by fork can share locks, so
    pools, queues and locks work.
    """
    os.system = _system
    _posixsubprocess.fork_exec = _fork_exec  # what subprocess and multiprocessing start programs with
    refused: Mapping[str, tuple[str, str, str]] = _NOT_OFFERED if semaphores else _NOT_OFFERED | _SEMAPHORES
    changes = {module: _change(*place) for module, place in refused.items()}
    change_on_import({"multiprocessing.context": _fork_only, **changes})


def _change(owner: str, method: str, what: str) -> Change:
    return lambda module: setattr(
        getattr(module, owner),
        method,
        _refusing(f"multiprocessing's {what} do not work here; use one process, or threads"),
    )


def _fork_only(module: Any) -> None:
    """Refuse the start methods that run a program. Python 3.14 has one of them as its default."""
    for name in ("spawn", "forkserver"):
        text = f"multiprocessing's start method {name} does not work here; use fork"
        module._concrete_contexts[name]._check_available = _refusing(text)
    module._default_context._default_context = module._concrete_contexts["fork"]


def _refusing(text: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, text)

    return refuse


_fork_exec = _refusing(NOT_RUN)


def _system(command: Any) -> int:
    """``os.system``: the status of a shell that could not run the command, and a line on stderr."""
    sys.stderr.write(f"[os.system({os.fsdecode(command)[:100]!r}) was not run: {NOT_RUN}]\n")
    return 127 << 8

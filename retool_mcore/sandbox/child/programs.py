"""Gives a clear error message when model code tries to run a program.

This is not a protection. The seccomp filter denies execve anyway, with a less helpful message.
"""

import _posixsubprocess
import errno
import os
import sys
from typing import Any, NoReturn

NOT_RUN = "programs cannot be run here; use Python"


def patch_program_calls() -> None:
    """Make os.system and subprocess fail with NOT_RUN, and multiprocessing use fork.

    Runs in the zygote.
    """
    os.system = _system
    _posixsubprocess.fork_exec = _fork_exec  # subprocess and multiprocessing start programs with it
    if sys.version_info >= (3, 14):  # before 3.14, fork is the default
        import multiprocessing

        multiprocessing.set_start_method("fork")


def _fork_exec(*_: object) -> NoReturn:
    raise PermissionError(errno.EPERM, NOT_RUN)


def _system(command: Any) -> int:
    """Replace ``os.system``: write a line on stderr, return status 127 (command not found)."""
    sys.stderr.write(f"[os.system({os.fsdecode(command)[:100]!r}) was not run: {NOT_RUN}]\n")
    return 127 << 8

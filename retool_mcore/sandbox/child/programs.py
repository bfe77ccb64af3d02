"""One clear line where model code asks for a program, which the filter lets nobody start.

It protects nothing: without it the kernel refuses the same in words that say less.
"""

import _posixsubprocess
import errno
import os
import sys
from typing import Any, NoReturn

NOT_RUN = "programs cannot be run here; use Python"


def say_that_none_run() -> None:
    """Have os.system and subprocess say so, and multiprocessing fork. Called in the warm image."""
    os.system = _system
    _posixsubprocess.fork_exec = _fork_exec  # what subprocess and multiprocessing start programs with
    if sys.version_info >= (3, 14):  # before, it is the default
        import multiprocessing

        multiprocessing.set_start_method("fork")


def _fork_exec(*_: object) -> NoReturn:
    raise PermissionError(errno.EPERM, NOT_RUN)


def _system(command: Any) -> int:
    """``os.system``: the status of a shell that could not run the command, and a line on stderr."""
    sys.stderr.write(f"[os.system({os.fsdecode(command)[:100]!r}) was not run: {NOT_RUN}]\n")
    return 127 << 8

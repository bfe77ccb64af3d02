"""Limits tracebacks to the model's own frames and hides those of the sandbox and the libraries.

This covers every traceback written by Python's ``traceback`` module: of the cell, its threads and
processes, asyncio, logging and destructors. It is a convenience, not a protection: model code can
undo it.
"""

import contextlib
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any


def hide(prefixes: Sequence[str]) -> None:
    """Hide frames of files whose path starts with one of ``prefixes``. Call this once."""
    hidden = ("<frozen ", "/proc/self/fd/", *prefixes)
    extract = traceback.TracebackException.__init__

    def extract_own(self: Any, *args: Any, **kwargs: Any) -> None:
        extract(self, *args, **kwargs)
        own = [frame for frame in self.stack if not frame.filename.startswith(hidden)]
        self.stack = traceback.StackSummary.from_list(own)

    traceback.TracebackException.__init__ = extract_own  # also builds causes, contexts and groups
    threading.excepthook = _thread_failed
    sys.unraisablehook = _unraisable
    sys.excepthook = _uncaught


def write(head: str, error: BaseException) -> None:
    """Write ``head`` and the traceback of ``error`` to stderr."""
    with contextlib.suppress(Exception):  # model code may have closed its streams
        sys.stderr.write(head + "".join(traceback.format_exception(error)))


def _thread_failed(failed: Any) -> None:
    if failed.exc_type is not SystemExit:
        name = threading.get_ident() if failed.thread is None else failed.thread.name
        write(f"Exception in thread {name}:\n", failed.exc_value)


def _unraisable(failed: Any) -> None:
    with contextlib.suppress(Exception):  # its repr is model code
        write(f"{failed.err_msg or 'Exception ignored in'}: {failed.object!r}\n", failed.exc_value)


def _uncaught(_: type[BaseException], error: BaseException, __: types.TracebackType | None) -> None:
    write("", error)

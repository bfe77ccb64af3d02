"""Tracebacks of the model's code show its own lines and the error: nothing of ours or the host's.

This holds for every traceback that Python's ``traceback`` writes: of the cell, of its threads and
processes, of asyncio and logging, of destructors. A convenience: code may take it back.
"""

import contextlib
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any

_hidden = ["<frozen ", "/proc/self/fd/"]


def hide(prefixes: Sequence[str]) -> None:
    """Leave out frames of files whose path begins with one of ``prefixes``. Called once."""
    _hidden.extend(prefixes)
    extract = traceback.TracebackException.__init__

    def extract_own(self: Any, *args: Any, **kwargs: Any) -> None:
        extract(self, *args, **kwargs)
        self.stack = traceback.StackSummary.from_list([frame for frame in self.stack if not _is_hidden(frame.filename)])

    traceback.TracebackException.__init__ = extract_own  # its causes, contexts and groups are made by it too
    threading.excepthook = _thread_failed
    sys.unraisablehook = _unraisable
    sys.excepthook = _uncaught


def own_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """``trace`` without the hidden frames at its beginning."""
    while trace is not None and _is_hidden(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_hidden(filename: str) -> bool:
    return filename.startswith(tuple(_hidden))


def _thread_failed(failed: Any) -> None:
    if failed.exc_type is not SystemExit:
        name = threading.get_ident() if failed.thread is None else failed.thread.name
        _write(f"Exception in thread {name}:\n", failed.exc_type, failed.exc_value, failed.exc_traceback)


def _unraisable(failed: Any) -> None:
    with contextlib.suppress(Exception):  # its repr is the code's
        head = f"{failed.err_msg or 'Exception ignored in'}: {failed.object!r}\n"
        _write(head, failed.exc_type, failed.exc_value, failed.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    _write("", kind, error, trace)


def _write(
    head: str, kind: type[BaseException], error: BaseException | None, trace: types.TracebackType | None
) -> None:
    with contextlib.suppress(Exception):  # the code may have closed its streams
        sys.stderr.write(head + "".join(traceback.format_exception(kind, error, trace)))

"""The `retool` commands. Installs an excepthook so that Ctrl-C during imports prints one line."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

_before = sys.excepthook


def tell_of_end(number: int) -> None:
    """Print that a signal ended the command. Under torchrun, only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        over = "\r" if sys.stderr.isatty() else ""  # overwrites the terminal's ^C
        sys.stderr.write(f"{over}note: ended by {signal.Signals(number).name}: what was complete is kept.\n")


def _untraced(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        tell_of_end(signal.SIGINT)  # Python then kills itself with SIGINT: exit code 130 in a shell
    else:
        _before(kind, error, trace)


sys.excepthook = _untraced

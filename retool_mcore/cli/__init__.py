"""The `retool` commands. Installs an excepthook so that Ctrl-C during imports prints one line."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

_default_excepthook = sys.excepthook


def print_ended_by(number: int) -> None:
    """Print that a signal ended the command. Under torchrun, only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        over = "\r" if sys.stderr.isatty() else ""  # overwrites the terminal's ^C
        sys.stderr.write(f"{over}note: ended by {signal.Signals(number).name}. Complete files are kept.\n")


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print_ended_by(signal.SIGINT)  # Python then kills itself with SIGINT: exit code 130 in a shell
    else:
        _default_excepthook(kind, error, trace)


sys.excepthook = _excepthook

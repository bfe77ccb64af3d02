"""The commands. Their imports take seconds, in which Ctrl-C is one line, too."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

_before = sys.excepthook


def tell_of_end(number: int) -> None:
    """Print that a signal ended the command; of a torchrun's ranks the first one does."""
    if os.environ.get("RANK", "0") == "0":
        over = "\r" if sys.stderr.isatty() else ""  # a terminal has shown ^C
        sys.stderr.write(f"{over}note: ended by {signal.Signals(number).name}: what was complete is kept.\n")


def _untraced(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        tell_of_end(signal.SIGINT)  # Python then ends itself by the signal, which a shell calls 130
    else:
        _before(kind, error, trace)


sys.excepthook = _untraced

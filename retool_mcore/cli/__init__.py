"""The commands. Their imports take seconds, in which Ctrl-C is one line, too."""

from __future__ import annotations

import os
import sys
from types import TracebackType

_before = sys.excepthook


def tell_of_ctrl_c() -> None:
    """Print that the command was ended; of a torchrun's ranks the first one does."""
    if os.environ.get("RANK", "0") == "0":
        over = "\r" if sys.stderr.isatty() else ""  # a terminal has shown ^C
        sys.stderr.write(f"{over}note: ended by SIGINT: what was complete is kept.\n")


def _untraced(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        tell_of_ctrl_c()  # Python then ends itself by the signal, which a shell calls 130
    else:
        _before(kind, error, trace)


sys.excepthook = _untraced

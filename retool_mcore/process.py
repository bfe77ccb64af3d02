"""Process hygiene: no process outlives the one that started it, and signals mean what they should."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

_PR_SET_PDEATHSIG = 1
END_WITH_PARENT_ENV = "RETOOL_END_WITH_PARENT"


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when its parent dies, so that `kill -9` of a launcher leaves
    nobody behind.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it died between the two calls
        os.kill(os.getpid(), how)


def end_with_parent_if_asked() -> None:
    """SIGTERM when the parent dies, for commands that a longer-running command of ours has started."""
    if os.environ.pop(END_WITH_PARENT_ENV, None):
        die_with_parent(signal.SIGTERM)


def heed_sigquit() -> None:
    """Undo an inherited "ignore SIGQUIT": a shell gives that to what it starts in the background.

    SGLang ends its server by SIGQUIT when a part of it has died; all processes of a run inherit
    from this one, and with the signal ignored they would wait for the dead part for ever.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that ``finally`` blocks stop what this process has started.

    A second one is ignored: timeout(1) sends two, and what was begun to be stopped and kept must
    end.
    """

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def output_to(log: Path) -> Iterator[IO[str]]:
    """Append all this process prints, its libraries' C code included, to ``log``; yields the
    terminal it had.

    The engines print whole configurations and hundreds of warnings. The terminal is for progress,
    and, once the block is left, for errors.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    before = {number: os.dup(number) for number in (1, 2)}
    try:
        with log.open("ab") as file, os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:
            _flush()
            for number in before:
                os.dup2(file.fileno(), number)
            yield terminal
    finally:
        _flush()
        for number, original in before.items():
            os.dup2(original, number)
            os.close(original)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

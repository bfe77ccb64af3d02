"""An end that was asked for: the first signal lets a run save, the second ends it at once.

SIGTERM comes from a scheduler, SIGUSR1 from Slurm before its limit, SIGINT from Ctrl-C, SIGHUP from
a terminal that was closed. A process
group's members hear a key once themselves and once from who started them, and timeout(1) sends its
signal twice: what comes within SAME_S is one.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SAME_S = 1.0
STUCK_S = 10.0  # for a main thread that is to leave


def ignore_signals() -> None:
    """Ignore what asks a run to end, from here to the end of this process."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def exit_code(number: int) -> int:
    """143, 130 after Ctrl-C, 129 after a hang-up: to who waits, USR1 is an early SIGTERM."""
    return 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)


class Ended(SystemExit):
    """The run ends because it was asked to; ``words`` tell its user what is kept."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(exit_code(number))
        self.words = f"note: ended by {signal.Signals(number).name}: {words}"


class Ending:
    """While it is entered, in the main thread: ``asked`` is the signal that asked, or 0.

    At a second signal, or ``grace_s`` seconds after the first, a thread calls ``at_once(signal)``
    whatever the main thread waits for; without one, the main thread leaves through its ``finally``
    blocks. What was to be ignored before is still ignored.
    """

    def __init__(self, grace_s: float, at_once: Callable[[int], object] | None = None) -> None:
        self.asked = 0
        self._grace_s, self._at_once = grace_s, at_once or self._leave_main_thread
        self._over, self._left = False, threading.Event()
        self._woken = self._handled = 0

    def __enter__(self) -> Ending:
        self._hears, tells = socket.socketpair()
        tells.setblocking(False)
        self._tells = tells
        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heeded}
        self._fd_before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        self._tells.close()
        self._thread.join()
        self._hears.close()

    def _leave_main_thread(self, _: int) -> None:
        """SystemExit in the main thread; if that does not heed it, this process ends."""
        self._over = True
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._left.wait(STUCK_S):
            os._exit(exit_code(self.asked))

    def _hear(self, number: int, frame: object) -> None:
        """The thread has read the number that Python wrote to the socket, if it still does.

        An event loop that ran in the main thread, as uvloop's, takes that away when it ends.
        """
        self._handled += 1
        if self._handled > self._woken:
            self._handled += 1  # of the byte that this one sends
            self._tells.send(bytes([number]))
            signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)
        if self._over:
            ignore_signals()  # what stops the rest must finish
            raise SystemExit(exit_code(self.asked))

    def _listen(self) -> None:
        asked_s = 0.0
        while True:
            left_s = max(0.0, asked_s + self._grace_s - time.monotonic()) if self.asked else None
            if not select.select([self._hears], [], [], left_s)[0]:
                break
            heard = [number for number in self._hears.recv(64) or [0] if number in (0, *SIGNALS)]
            if 0 in heard:
                return  # the run has ended
            self._woken += len(heard)
            if heard and not self.asked:
                self.asked, asked_s = heard[0], time.monotonic()
            elif heard and time.monotonic() - asked_s > SAME_S:
                break
        self._at_once(self.asked)

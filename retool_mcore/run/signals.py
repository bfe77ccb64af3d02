"""Signal handling: the first signal lets a run save and stop, the second stops it at once.

SIGTERM comes from a scheduler, SIGUSR1 from Slurm before its time limit, SIGINT from Ctrl-C, and
SIGHUP from a closed terminal. After Ctrl-C, a process gets the signal from the terminal and again
from its parent; timeout(1) also sends its signal twice. Signals within SAME_S seconds therefore
count as one.
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
STUCK_S = 10.0  # how long the main thread may take to leave before the process exits


def ignore_signals() -> None:
    """Ignore SIGNALS until this process exits."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_code(number: int) -> int:
    """Return 128 + signal: SIGTERM 143, SIGINT 130, SIGHUP 129; SIGUSR1 counts as SIGTERM."""
    return 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)


class EndedBySignal(SystemExit):
    """The run stops because of a signal; ``message`` names the checkpoint that is kept."""

    def __init__(self, number: int, kept: str) -> None:
        super().__init__(exit_code(number))
        self.message = f"note: ended by {signal.Signals(number).name}: {kept}"


class StopSignals:
    """Context manager for the main thread. ``first_signal`` is the first signal received, or 0.

    After a second signal, or ``grace_s`` seconds after the first, a thread calls
    ``exit_now(signal)``, even while the main thread is blocked. By default, ``exit_now`` makes the
    main thread exit through its ``finally`` blocks. Signals that were ignored before stay ignored.
    """

    def __init__(self, grace_s: float, exit_now: Callable[[int], object] | None = None) -> None:
        self.first_signal = 0
        self._grace_s, self._exit = grace_s, exit_now or self._leave_main_thread
        self._over, self._left = False, threading.Event()
        self._woken = self._handled = 0

    def __enter__(self) -> StopSignals:
        self._receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._sender = sender
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in handled}
        self._fd_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def _leave_main_thread(self, _: int) -> None:
        """Raise SystemExit in the main thread; if that does not work within STUCK_S, exit hard."""
        self._over = True
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._left.wait(STUCK_S):
            os._exit(exit_code(self.first_signal))

    def _on_signal(self, number: int, frame: object) -> None:
        """Handle a signal: make sure that the listening thread receives it.

        Normally Python has written the signal's number to the wake-up fd. An event loop in the main
        thread, such as uvloop's, resets that fd when it ends; then send the number from here.
        """
        self._handled += 1
        if self._handled > self._woken:
            self._handled += 1  # for the byte sent here
            self._sender.send(bytes([number]))
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        if self._over:
            ignore_signals()  # cleanup must be able to finish
            raise SystemExit(exit_code(self.first_signal))

    def _listen(self) -> None:
        asked_s = 0.0
        while True:
            left_s = max(0.0, asked_s + self._grace_s - time.monotonic()) if self.first_signal else None
            if not select.select([self._receiver], [], [], left_s)[0]:
                break
            received = [number for number in self._receiver.recv(64) or [0] if number in (0, *SIGNALS)]
            if 0 in received:
                return  # the run has ended
            self._woken += len(received)
            if received and not self.first_signal:
                self.first_signal, asked_s = received[0], time.monotonic()
            elif received and time.monotonic() - asked_s > SAME_S:
                break
        self._exit(self.first_signal)

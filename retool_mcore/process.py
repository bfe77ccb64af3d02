"""Handles a process's signals, its output and the death of its parent."""

import atexit
import ctypes
import errno
import io
import os
import signal
import socket
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded at import, because a child must not load libraries between fork and exec
_exit_signals: list[int] = []
END_WITH_PARENT_ENV = "RETOOL_END_WITH_PARENT"


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux send this process ``how`` when its parent dies, so `kill -9` leaves no orphans."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # the parent died between the two calls
        os.kill(os.getpid(), how)


def end_with_parent_if_requested() -> None:
    """End this process with SIGTERM when its parent dies, if ``END_WITH_PARENT_ENV`` is set."""
    if os.environ.pop(END_WITH_PARENT_ENV, None):
        die_with_parent(signal.SIGTERM)


def reopen_closed_outputs() -> None:
    """Redirect outputs that the caller closed (`>&-`) to /dev/null.

    Otherwise the next open file would get descriptor 1 or 2.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _discard(number)
            setattr(sys, name, open(number, "w", closefd=False, encoding="utf-8"))  # noqa: SIM115


def restore_sigquit() -> None:
    """Reset SIGQUIT to its default. A shell makes its background processes ignore it.

    SGLang ends its server with SIGQUIT when one of its processes dies. All processes of a run
    inherit the setting. If they ignored SIGQUIT, they would wait for the dead process forever.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def bypass_proxy() -> None:
    """Add this node's addresses to no_proxy, after those of the user. Child processes inherit it.

    Nodes of a cluster often have http_proxy set, and a proxy cannot reach servers on this node.
    """
    local = ["localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()]
    with suppress(OSError):  # the host's name does not resolve
        local += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    users = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    named = [part.strip() for text in users for part in text.split(",")]
    value = ",".join(dict.fromkeys(part for part in (*named, *local) if part))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = value  # some programs read only one spelling


def exit_on_sigterm(*, ctrl_c: bool = True) -> None:
    """Turn SIGTERM into SystemExit, so that ``finally`` blocks stop what this process started.

    A second SIGTERM is ignored: timeout(1) sends two, and the clean-up after the first must finish.
    SIGHUP, sent when the terminal closes, is handled alike, unless nohup ignores it. SIGINT still
    raises KeyboardInterrupt, and ``exit_signal`` returns it. ``ctrl_c`` False leaves SIGINT to
    asyncio.
    """

    def handle(number: int, frame: object) -> NoReturn:
        _exit_signals.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    _exit_signals.clear()
    for number in (signal.SIGTERM, signal.SIGHUP, *([signal.SIGINT] if ctrl_c else [])):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def exit_signal() -> int:
    """The number of the signal that ``exit_on_sigterm`` turned into an exception, or 0.

    A library that the exception interrupts, such as during an import, may raise another error. That
    error is only a consequence of the signal.
    """
    return _exit_signals[0] if _exit_signals else 0


@contextmanager
def sighup_blocked() -> Generator[None]:
    """Start child processes of this thread with SIGHUP blocked while the block runs.

    They survive the closing of the terminal, so this process can end them in order.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def standard_exit_code() -> Generator[None]:
    """Exit with 143 after SIGTERM. While Ray starts, its own handler would exit with 15.

    ``exit_signal`` then returns SIGTERM, so the command line reports it.
    """
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            _exit_signals.append(signal.SIGTERM)
            raise SystemExit(128 + signal.SIGTERM) from error
        raise


@contextmanager
def redirect_output(log: Path) -> Generator[IO[str]]:
    """Append all output of this process, including C libraries, to ``log``; yield the terminal.

    The engines print whole configurations and hundreds of warnings, so the terminal shows only
    progress and, after the block, errors. Output of C libraries at exit, such as Triton's list of
    leaks, goes to the log, too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    atexit.unregister(_write_exit_output)  # of an earlier call: output at exit goes to the last log only
    atexit.register(_write_exit_output, log)
    before = {number: os.dup(number) for number in (1, 2)}
    terminals = {number: os.isatty(number) for number in before}
    try:
        with log.open("ab") as file, _Terminal(os.fdopen(os.dup(2), "wb"), encoding="utf-8") as terminal:
            _flush()
            for number in before:
                os.dup2(file.fileno(), number)
            yield terminal
    finally:
        _flush()
        for number, original in before.items():
            if terminals[number] and not os.isatty(original):  # the terminal was closed
                _discard(original)
            os.dup2(original, number)
            os.close(original)


class _Terminal(io.TextIOWrapper):
    """The terminal for progress. Writing to it after it was closed is not an error."""

    def write(self, text: str, /) -> int:
        with self._ignore_closed():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignore_closed():
            super().flush()

    @contextmanager
    def _ignore_closed(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _discard(self.fileno())


def discard_closed_terminal() -> None:
    """Redirect descriptors 1 and 2 to /dev/null if their terminal was closed."""
    for number in (1, 2):
        with suppress(OSError):  # the caller closed it
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                _discard(number)


def _discard(descriptor: int) -> None:
    """Redirect ``descriptor`` to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    else:
        os.set_inheritable(descriptor, True)


def _write_exit_output(log: Path) -> None:
    """Redirect descriptors 1 and 2 to ``log`` for the rest of the process.

    Exit handlers that were registered earlier, and those of C libraries, run after this one.
    """
    _flush()
    with suppress(OSError), log.open("ab") as file:  # the folder may have been deleted
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

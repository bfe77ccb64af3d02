"""Process hygiene: no process outlives its parent, and signals mean what they should."""

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
_LIBC = ctypes.CDLL(None)  # loaded here, because a child between fork and exec may not load anything
_left_by: list[int] = []
END_WITH_PARENT_ENV = "RETOOL_END_WITH_PARENT"


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when its parent dies.

    So `kill -9` of a launcher leaves no process behind.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # the parent died between the two calls
        os.kill(os.getpid(), how)


def end_with_parent_if_asked() -> None:
    """Get SIGTERM when the parent dies, if a longer-running command of ours started this one."""
    if os.environ.pop(END_WITH_PARENT_ENV, None):
        die_with_parent(signal.SIGTERM)


def open_closed_outputs() -> None:
    """Let output that the caller closed (`>&-`) go nowhere.

    The next file that is opened would get its descriptor.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _discard(number)
            setattr(sys, name, open(number, "w", closefd=False, encoding="utf-8"))  # noqa: SIM115


def heed_sigquit() -> None:
    """Undo an inherited "ignore SIGQUIT", which a shell gives to its background processes.

    SGLang ends its server with SIGQUIT when a part of it has died. All processes of a run inherit
    from this one. If they ignored the signal, they would wait for the dead part for ever.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def bypass_proxy() -> None:
    """Name this node's addresses in no_proxy, after the user's own; children inherit it.

    A cluster's nodes often have http_proxy set, and a proxy leads to no server on this node.
    """
    own = ["localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()]
    with suppress(OSError):  # a host whose name no resolver knows
        own += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    given = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    named = [part.strip() for text in given for part in text.split(",")]
    value = ",".join(dict.fromkeys(part for part in (*named, *own) if part))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = value  # programs read one spelling or the other


def exit_on_sigterm(*, ctrl_c: bool = True) -> None:
    """Turn SIGTERM into SystemExit, so that ``finally`` blocks stop what this process started.

    A second SIGTERM is ignored, because timeout(1) sends two and the clean-up that the first one
    began must finish. SIGHUP, of a terminal that was closed, is the same, but for nohup. SIGINT is
    KeyboardInterrupt as ever, and known to ``left_by``; ``ctrl_c`` False leaves it to asyncio.
    """

    def leave(number: int, frame: object) -> NoReturn:
        _left_by.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    _left_by.clear()
    for each in (signal.SIGTERM, signal.SIGHUP, *([signal.SIGINT] if ctrl_c else [])):
        if each == signal.SIGTERM or signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, leave)


def left_by() -> int:
    """The signal by which ``exit_on_sigterm`` left, or 0.

    Code of others that it leaves, as an import, may raise another error on its way out. That one is
    only a consequence.
    """
    return _left_by[0] if _left_by else 0


@contextmanager
def without_hangups() -> Generator[None]:
    """What this thread starts never hears that the terminal was closed, so it lives until this
    process has ended it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def usual_exit_code() -> Generator[None]:
    """Make a SIGTERM that Ray hears exit with 143; its own handler, while it starts, says 15.

    The signal is known to ``left_by``, so that the user is told.
    """
    try:
        yield
    except SystemExit as left:
        if left.code == signal.SIGTERM:
            _left_by.append(signal.SIGTERM)
            raise SystemExit(128 + signal.SIGTERM) from left
        raise


@contextmanager
def output_to(log: Path) -> Generator[IO[str]]:
    """Append all output of this process, C libraries included, to ``log``; yield the terminal.

    The engines print whole configurations and hundreds of warnings. The terminal is for progress
    and, after the block, for errors. What C libraries say when the process ends goes to the log,
    too: triton's binding lists there what it has not freed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    atexit.unregister(_write_exit_output)  # of a block before this one: one log has the last words
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
            if terminals[number] and not os.isatty(original):  # it was closed
                _discard(original)
            os.dup2(original, number)
            os.close(original)


class _Terminal(io.TextIOWrapper):
    """Where progress is written: no harm if it is closed meanwhile."""

    def write(self, text: str, /) -> int:
        with self._lost():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._lost():
            super().flush()

    @contextmanager
    def _lost(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _discard(self.fileno())


def forget_closed_terminal() -> None:
    """Where the terminal of descriptors 1 and 2 was closed, let them take whatever is written."""
    for number in (1, 2):
        with suppress(OSError):  # closed by the caller
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                _discard(number)


def _discard(descriptor: int) -> None:
    """Let ``descriptor`` take whatever is written, and forget it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    else:
        os.set_inheritable(descriptor, True)


def _write_exit_output(log: Path) -> None:
    """Point descriptors 1 and 2 at ``log`` for the rest of the process.

    Python's own exit handlers that were registered before still follow, and then the libraries'.
    """
    _flush()
    with suppress(OSError), log.open("ab") as file:  # the folder may be gone
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

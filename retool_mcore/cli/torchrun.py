"""torchrun, for programs that tell a user's mistake themselves, and that save when asked to end.

python -m retool_mcore.cli.torchrun [torchrun's options] PROGRAM [arguments]

When a rank ends with a clear error, torchrun itself adds a traceback of its own, and the error is
no longer the last that a user reads. The same for nodes that do not meet. And its store listens on
the address of --master-addr or --local-addr alone.

At a signal torchrun would end the ranks within 30 s and raise another traceback. Here the first
signal is handed to the ranks, which end by themselves (run/ending.py); a second one ends them at
once.
"""

import logging
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack

import psutil

from retool_mcore.cli import tell_of_end
from retool_mcore.cli.common import tell
from retool_mcore.errors import EXIT_RETRYABLE, EXIT_USER_ERROR
from retool_mcore.run.ending import SAME_S, SIGNALS, exit_code
from retool_mcore.run.memory_kills import MemoryKills
from retool_mcore.run.status import shown

LOOK_EVERY_S = 0.2


class Handing:
    """Hands signals from the agent, this process, to the ranks of this node, its children."""

    def __init__(self) -> None:
        self.first, self._first_s = 0, 0.0
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hand)

    def _hand(self, number: int, frame: object) -> None:
        again = bool(self.first) and time.monotonic() - self._first_s > SAME_S
        if self.first and not again:
            return
        if not self.first:
            self.first, self._first_s = number, time.monotonic()
        for rank in psutil.Process().children():
            try:
                rank.send_signal(signal.SIGKILL if again else number)
            except psutil.NoSuchProcess:
                continue


def until_ranks(status: ExitStack) -> None:
    """Close ``status`` when this process has children: the first rank tells how it goes on."""

    def watch() -> None:
        while not psutil.Process().children():
            time.sleep(LOOK_EVERY_S)
        status.close()

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run torchrun; end as the ranks did, where they have said why, or tell that nodes miss."""
    with ExitStack() as status:
        status.enter_context(shown("sft"))
        until_ranks(status)
        _main(status)


def _main(status: ExitStack) -> None:
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]  half typed

    from retool_mcore.platforms.stores import STORE_PATCH

    STORE_PATCH.apply()
    handing, kills = Handing(), MemoryKills()
    sys.argv.insert(1, "--signals-to-handle=SIGQUIT")  # it leaves the others to ``handing``
    asked = {exit_code(number) for number in SIGNALS}
    # Of ranks that failed it logs what ChildFailedError says again.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)  # four lines on one thread for each rank
    try:
        with tempfile.TemporaryDirectory(prefix="retool-torchrun-") as folder:  # or it leaves one
            sys.argv.insert(1, f"--log-dir={folder}")
            try:
                torchrun()
            finally:
                status.close()
    except SignalException as error:  # Ctrl-\\
        raise SystemExit(128 + error.sigval) from error
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if handing.first:
            if first.exitcode == -handing.first != -signal.SIGINT:  # before it heeded the signal, in silence
                tell_of_end(handing.first)
            raise SystemExit(exit_code(handing.first)) from error
        if first.exitcode in (EXIT_USER_ERROR, EXIT_RETRYABLE, *asked):
            raise SystemExit(first.exitcode) from error
        if first.exitcode == -signal.SIGKILL:
            told = kills.words() or "The same command goes on from the newest checkpoint."
            tell(f"error: rank {first.local_rank} of this node was killed (SIGKILL). {told}", err=True)
            raise SystemExit(EXIT_RETRYABLE) from error
        raise
    except (DistNetworkError, DistStoreError) as error:  # of the store at which the nodes meet
        tell(
            f"error: the nodes did not meet, or node 0 has left: {str(error).splitlines()[0][:300]}. Start the same "
            "command on every node; NODES_WAIT_S is how long each waits for the others.",
            err=True,
        )
        raise SystemExit(EXIT_RETRYABLE) from error


if __name__ == "__main__":
    main()

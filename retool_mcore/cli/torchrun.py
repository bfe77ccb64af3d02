"""torchrun wrapper that forwards signals to the ranks and exits with a rank's exit code.

python -m retool_mcore.cli.torchrun [torchrun's options] PROGRAM [arguments]

torchrun itself kills the ranks within 30 s of a signal, and prints a traceback when a rank fails.
This wrapper forwards the first signal to the ranks, which save and exit (run/signals.py); a second
signal kills them. torchrun's rendezvous store listens only on the address of --master-addr or
--local-addr.
"""

import logging
import signal
import sys
import tempfile
import time
from contextlib import suppress

import psutil

from retool_mcore.cli import print_ended_by
from retool_mcore.cli.common import echo
from retool_mcore.errors import EXIT_RETRYABLE
from retool_mcore.run.signals import SAME_S, SIGNALS, exit_code


def main() -> None:
    """Run torchrun and exit with the exit code of the first failed rank."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]  half typed

    from retool_mcore.platforms.patches_torch import STORE_PATCH

    STORE_PATCH.apply()
    signals: list[tuple[int, float]] = []  # forwarded signals and their times

    def forward(number: int, frame: object) -> None:
        if not signals or time.monotonic() - signals[0][1] > SAME_S:
            signals.append((number, time.monotonic()))
            for rank in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(number if len(signals) == 1 else signal.SIGKILL)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # hide failed ranks
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)  # hide the note on OMP_NUM_THREADS
    try:
        with tempfile.TemporaryDirectory(prefix="retool-torchrun-") as logs:  # torchrun does not delete its own
            sys.argv[1:1] = [f"--log-dir={logs}", "--signals-to-handle=SIGQUIT"]  # we handle the others
            torchrun()
    except (DistNetworkError, DistStoreError) as error:
        reason = str(error).splitlines()[0][:300]
        echo(
            "error: the ranks did not connect in time (NODES_WAIT_S of launch/nodes.py), or node 0 has exited: "
            f"{reason}",
            err=True,
        )
        raise SystemExit(EXIT_RETRYABLE) from error
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        if signals:
            if first.exitcode == -signals[0][0] != -signal.SIGINT:  # killed before it set a handler: it printed nothing
                print_ended_by(signals[0][0])
            raise SystemExit(exit_code(signals[0][0])) from error
        if first.exitcode >= 0:
            raise SystemExit(first.exitcode) from error
        why = ", probably because the node ran out of memory: see dmesg" if first.exitcode == -signal.SIGKILL else ""
        name = signal.Signals(-first.exitcode).name
        echo(f"error: rank {first.local_rank} of this node was killed by {name}{why}.", err=True)
        raise SystemExit(EXIT_RETRYABLE) from error


if __name__ == "__main__":
    main()

"""torchrun, for programs that tell a user's mistake themselves.

python -m retool_mcore.cli.torchrun [torchrun's options] PROGRAM [arguments]

When a rank ends with a clear error, torchrun itself adds a traceback of its own, and the error is
no longer the last that a user reads. The same for nodes that do not meet. And its store listens on
the address of --master-addr or --local-addr alone.
"""

from __future__ import annotations

import logging

import typer

from retool_mcore.cli.common import EXIT_RETRYABLE, EXIT_USER_ERROR


def main() -> None:
    """Run torchrun; end with the exit code of a rank that has said why, or tell that nodes miss."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]  half typed

    from retool_mcore.platforms.stores import STORE_PATCH

    STORE_PATCH.apply()
    # Of ranks that failed it logs what ChildFailedError says again.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode in (EXIT_USER_ERROR, EXIT_RETRYABLE):
            raise SystemExit(first.exitcode) from error
        raise
    except (DistNetworkError, DistStoreError) as error:  # of the store at which the nodes meet
        typer.echo(
            f"error: the nodes did not meet, or node 0 has left: {str(error).splitlines()[0][:300]}. Start the same "
            "command on every node; NODES_WAIT_S is how long each waits for the others.",
            err=True,
        )
        raise SystemExit(EXIT_RETRYABLE) from error


if __name__ == "__main__":
    main()

"""torchrun, for programs that tell a user's mistake themselves.

python -m retool_mcore.cli.torchrun [torchrun's options] PROGRAM [arguments]

When a rank ends with a clear error, torchrun itself adds a traceback of its own, and the error is
no longer the last that a user reads. And its store listens on the address of --master-addr or
--local-addr alone.
"""

from __future__ import annotations

import logging

from retool_mcore.cli.common import EXIT_USER_ERROR


def main() -> None:
    """Run torchrun; end with ``EXIT_USER_ERROR`` where a rank did, because it has said why."""
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
        if first.exitcode == EXIT_USER_ERROR:
            raise SystemExit(EXIT_USER_ERROR) from error
        raise


if __name__ == "__main__":
    main()

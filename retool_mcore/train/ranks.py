"""The ranks of SFT: who holds the run, and what is told where one of them is lost."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from retool_mcore.errors import ConfigError, ReToolError, RunError
from retool_mcore.run.folder import lock_run

PEER_IS_GONE = (  # gloo's words, and NCCL's
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
)
HELD = "retool_run_is_held"  # a key of the store at which the ranks meet


class RankLost(RunError):
    """Another process of the run has ended; a new start goes on from the newest checkpoint.

    This is only a consequence. Of one node, torchrun ends this process before it reports it.
    """


@contextmanager
def told_as_lost() -> Generator[None]:
    """Raise RankLost for what torch raises where another rank, or node 0's store, has ended."""
    try:
        yield
    except RuntimeError as error:
        gone = isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in PEER_IS_GONE)
        if isinstance(error, ReToolError) or not gone:
            raise
        raise RankLost("another rank has ended; what it said is the cause") from error


@contextmanager
def held_by_first(store: Store, rank: int, run_dir: Path) -> Generator[None]:
    """Rank 0 holds the run's folder. The others touch nothing of it before they know.

    Raises ConfigError on every rank when another process holds it.
    """
    if rank != 0:
        if refused := store.get(HELD).decode():
            raise ConfigError(refused)
        yield
        return
    try:
        lock = lock_run(run_dir)
    except ConfigError as error:
        store.set(HELD, str(error))
        raise
    with lock:
        store.set(HELD, "")
        yield

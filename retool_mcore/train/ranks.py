"""Locks an SFT run's folder for all ranks, and reports the loss of a rank."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from retool_mcore.errors import ConfigError, ReToolError, RunError
from retool_mcore.run.folder import lock_run

PEER_IS_GONE = (  # in the error messages of gloo and NCCL
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
)
LOCK_ERROR = "retool_lock_error"  # key in the rendezvous store; its value is rank 0's error, or ""


class RankLost(RunError):
    """Another rank has died. A restart resumes from the newest checkpoint.

    The cause is in the other rank's error. On one node, torchrun usually kills this process before
    it can report this error.
    """


@contextmanager
def rank_loss_reported() -> Generator[None]:
    """Turn torch's error for a dead rank or a dead rendezvous store into RankLost."""
    try:
        yield
    except RuntimeError as error:
        gone = isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in PEER_IS_GONE)
        if isinstance(error, ReToolError) or not gone:
            raise
        raise RankLost("another rank has ended. Its error is the cause") from error


@contextmanager
def locked_by_rank_0(store: Store, rank: int, run_dir: Path) -> Generator[None]:
    """Rank 0 locks the run's folder. The other ranks wait until it has, then enter the block.

    Raises ConfigError on every rank if another process has the lock.
    """
    if rank != 0:
        if refused := store.get(LOCK_ERROR).decode():
            raise ConfigError(refused)
        yield
        return
    try:
        lock = lock_run(run_dir)
    except ConfigError as error:
        store.set(LOCK_ERROR, str(error))
        raise
    with lock:
        store.set(LOCK_ERROR, "")
        yield

"""verl's queue, started while the driver reads the data and the workers' processes come up.

verl waits for the queue's processes, which import torch and Ray one after another, and then reads
the data and starts its workers. Nothing is in the queue before the checkpoint is loaded.
"""

import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import transfer_queue as tq

_starts: list[Future[Any]] = []  # of this process's queue: none, or one


@contextmanager
def queue_beside() -> Generator[None]:
    """Make ``tq.init`` return at once when it is given settings, until the context ends."""
    whole = tq.init

    def init(conf: Any = None) -> Any:
        if conf is None:
            wait_for_queue()
            return whole()
        _starts[:] = [Future()]
        threading.Thread(target=_run, args=(_starts[0], whole, conf), daemon=True, name="queue").start()
        return conf

    tq.init = init
    try:
        yield
    finally:
        tq.init = whole


def _run(future: Future[Any], init: Any, conf: Any) -> None:
    try:
        future.set_result(init(conf))
    except BaseException as error:  # noqa: BLE001  whoever waits raises it
        future.set_exception(error)


def wait_for_queue() -> None:
    """Return when the queue is there. Raises what its start has raised."""
    for start in _starts:
        start.result()

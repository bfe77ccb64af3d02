"""What a step's rows say of themselves, read while the driver would only wait.

After the step, or before its update, 512 trajectories would wait for the same answers of verl's
queue.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from retool_mcore.verl.blocks import values_of_rows

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Of one step, whose rows may come in several batches; ``ask`` reads keys of a partition."""

    def __init__(self, ask: Callable[[list[str], str], dict[str, T]]) -> None:
        self._ask = ask
        self._known = dict[str, T]()
        self._reading = list[Future[dict[str, T]]]()

    def read(self, keys: Sequence[str], partition_id: str) -> None:
        """Begin to read what will be asked for, and return at once."""
        future = Future[dict[str, T]]()
        self._reading.append(future)
        asked = (future, list(keys), partition_id)
        # A daemon, so that a run that fails meanwhile ends without the queue's answer.
        threading.Thread(target=self._answer, args=asked, daemon=True, name="read ahead").start()

    def known(self) -> dict[str, T]:
        """What was begun, by key. What could not be read is left out: it may be gone."""
        reading, self._reading = self._reading, []
        for each in reading:
            if each.exception() is None:
                self._known |= each.result()
        return self._known

    def of(self, keys: Sequence[str], partition_id: str) -> list[T]:
        """Of each key in order. What is not known is read now, and what that raises is raised."""
        known = self.known()
        if unknown := [key for key in keys if key not in known]:
            self._known |= self._ask(unknown, partition_id)
        return [self._known[key] for key in keys]

    def _answer(self, future: Future[dict[str, T]], keys: list[str], partition_id: str) -> None:
        try:
            future.set_result(self._ask(keys, partition_id))
        except BaseException as error:  # noqa: BLE001  whoever asks raises it
            future.set_exception(error)


@dataclass(frozen=True)
class RowReport:
    turns: int  # messages, as verl counts them
    extra: dict[str, Any]  # of our agent loop and the reward


class RowReports(ReadAhead[RowReport]):
    """What trajectories say beside their tokens."""

    def __init__(self) -> None:
        super().__init__(_reports)


def _reports(keys: list[str], partition_id: str) -> dict[str, RowReport]:
    told = values_of_rows(keys, partition_id, "num_turns", "extra_fields")
    return {key: RowReport(int(turns), extra) for key, turns, extra in zip(keys, *told, strict=True)}

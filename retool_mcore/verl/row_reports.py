"""What a step's trajectories say of themselves beside their tokens, read while the actor learns.

The driver has nothing else to do then. After the step the metrics of 512 trajectories would wait
for the same answer of verl's queue.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from retool_mcore.verl.blocks import values_of_rows


@dataclass(frozen=True)
class RowReport:
    turns: int  # messages, as verl counts them
    extra: dict[str, Any]  # of our agent loop and the reward


class RowReports:
    """Of one step, whose rows may come in several batches."""

    def __init__(self) -> None:
        self._known = dict[str, RowReport]()
        self._reading = list[Future[dict[str, RowReport]]]()

    def read(self, keys: Sequence[str], partition_id: str) -> None:
        """Begin to read what ``of`` will be asked for, and return at once."""
        future = Future[dict[str, RowReport]]()
        self._reading.append(future)
        # A daemon, so that a run that fails meanwhile ends without the queue's answer.
        threading.Thread(target=_answer, args=(future, list(keys), partition_id), daemon=True, name="reports").start()

    def of(self, keys: Sequence[str], partition_id: str) -> list[RowReport]:
        """Of each key in order. What was not begun is read now. Raises what reading has raised."""
        reading, self._reading = self._reading, []
        for each in reading:
            self._known |= each.result()
        if unknown := [key for key in keys if key not in self._known]:
            self._known |= _reports(unknown, partition_id)
        return [self._known[key] for key in keys]


def _answer(future: Future[dict[str, RowReport]], keys: list[str], partition_id: str) -> None:
    try:
        future.set_result(_reports(keys, partition_id))
    except BaseException as error:  # noqa: BLE001  whoever asks raises it
        future.set_exception(error)


def _reports(keys: list[str], partition_id: str) -> dict[str, RowReport]:
    told = values_of_rows(keys, partition_id, "num_turns", "extra_fields")
    return {key: RowReport(int(turns), extra) for key, turns, extra in zip(keys, *told, strict=True)}

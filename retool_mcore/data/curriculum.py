"""The order of RL's prompts: every epoch anew by the seed, or by how often prompts are solved.

``SolveRateOrder`` is the sampler of data.curriculum below 1. It goes through the rows in
epochs, each in an order of its own, as without a curriculum, and passes over some of them:

- A row has a streak: how many of its groups in a row were all right (above 0) or all wrong (below
  0). A group that is mixed, and thus has something to compare, sets it to 0.
- Its share is 0.5 ** abs(streak), at least data.curriculum. An epoch takes it when the
  row's clock, which runs at that share, passes a whole number. A row of share 1 is in every epoch,
  one of 1/8 in exactly every eighth, so none vanishes. Where its clock starts is drawn from the
  seed, so rows of one share are spread over the epochs.

Nothing is drawn at random while the run goes on: position, streaks and the newest rows are the
whole state, and a run that resumes with them goes on in the same order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from retool_mcore.errors import DataError


class SolveRateOrder:
    """Row numbers without end, for a data loader; ``state_dict`` and ``load_state_dict`` are its.

    ``rows``: how many there are. ``apart``: how many rows in a row are all different, at most
    ``rows``: a batch that reaches over the end of an epoch holds no row twice.
    """

    def __init__(self, rows: int, *, seed: int, floor: float, apart: int) -> None:
        assert 0 < apart <= rows, f"{apart} different rows of {rows}"
        self.rows, self.seed, self.floor, self.apart = rows, seed, floor, apart
        self.streaks: dict[int, int] = {}  # of rows that were seen
        self.epoch, self.position = 0, 0
        self.recent: list[int] = []
        self._starts_N = np.random.default_rng((seed, rows)).random(rows)
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Rows of an epoch without a curriculum, as data loaders ask."""
        return self.rows

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self._next()

    def share(self, row: int) -> float:
        """The share of epochs that take the row; 1.0 before it was seen."""
        return max(self.floor, 0.5 ** abs(self.streaks.get(row, 0)))

    def observe(self, groups: Iterable[tuple[int, Sequence[bool]]]) -> None:
        """Take the answers of finished groups: each group's row, and which answers were right."""
        for row, right in groups:
            before = self.streaks.get(row, 0)
            if all(right):
                self.streaks[row] = max(before, 0) + 1
            elif not any(right):
                self.streaks[row] = min(before, 0) - 1
            else:
                self.streaks[row] = 0

    def metrics(self) -> dict[str, float]:
        """``curriculum/`` metrics, of all rows of the training file.

        always, never    rows whose last group was all right, all wrong
        mixed, unseen    rows whose last group was mixed; rows without a group so far
        mean_weight      mean share of epochs that take a row; 1: nothing is passed over
        epoch            epochs begun
        """
        streaks = list(self.streaks.values())
        always, never = sum(streak > 0 for streak in streaks), sum(streak < 0 for streak in streaks)
        passed_over = sum(1.0 - self.share(row) for row in self.streaks)
        found = {
            "always": always,
            "never": never,
            "mixed": len(streaks) - always - never,
            "unseen": self.rows - len(streaks),
            "mean_weight": 1.0 - passed_over / self.rows,
            "epoch": self.epoch + 1,
        }
        return {f"curriculum/{name}": float(value) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        state = {"rows": self.rows, "epoch": self.epoch, "position": self.position}
        return {**state, "recent": list(self.recent), "streaks": dict(self.streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises DataError when it is of a file with other rows."""
        if state["rows"] != self.rows:
            raise DataError(
                f"data.train_file has {self.rows} rows, and {state['rows']} when the checkpoint was saved, whose "
                "curriculum counts by row. Restore the file, or start a run with another run.name"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.recent, self.streaks = list(state["recent"]), dict(state["streaks"])
        self._order = self._order_of(self.epoch)

    def _next(self) -> int:
        while True:
            if self.position == self.rows:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            row = int(self._order[self.position])
            self.position += 1
            if row not in self.recent and self._is_taken(row):
                self.recent = [*self.recent, row][-(self.apart - 1) :] if self.apart > 1 else []
                return row

    def _is_taken(self, row: int) -> bool:
        share, start = self.share(row), float(self._starts_N[row])
        return int(share * (self.epoch + 1) + start) > int(share * self.epoch + start)

    def _order_of(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng((self.seed, self.rows, epoch)).permutation(self.rows)

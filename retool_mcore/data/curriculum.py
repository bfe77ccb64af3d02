"""The curriculum sampler: it skips prompts that the model always or never solves.

data.curriculum < 1 enables ``SolveRateOrder``. Like the default sampler, it iterates over the rows
in epochs, each with its own shuffle, but it skips some rows:

- A row's streak counts its last consecutive groups that were all correct (positive) or all wrong
  (negative). A mixed group, which has a learning signal, resets the streak to 0.
- A row's share is max(data.curriculum, 0.5 ** abs(streak)). A per-row phase advances by the share
  each epoch, and the epoch includes the row when the phase passes an integer. A row with share 1 is
  in every epoch, a row with share 1/8 in every eighth, so no row disappears. An epoch leaves out
  the most recent rows of the epoch before (see ``apart``). The seed sets each row's initial phase,
  which spreads rows of equal share over the epochs.

Sampling uses no random numbers beyond the seed's. The position, the streaks and the most recent
rows are the whole state, so a run that resumes from them continues in the same order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from retool_mcore.errors import DataError


class SolveRateOrder:
    """An infinite, stateful sampler of row indices for a data loader.

    ``rows``: number of rows. ``floor``: the minimum share. ``apart``: any ``apart``
    (<= ``rows``) consecutive indices are distinct, so a batch that spans two epochs has no
    duplicates.
    """

    def __init__(self, rows: int, *, seed: int, floor: float, apart: int) -> None:
        assert 0 < apart <= rows, f"{rows} rows cannot provide {apart} distinct ones"
        self.rows, self.seed, self.floor, self.apart = rows, seed, floor, apart
        self.streaks: dict[int, int] = {}  # row -> streak, for rows with a finished group
        self.epoch, self.position = 0, 0
        self.recent: list[int] = []
        self._starts_N = np.random.default_rng((seed, rows)).random(rows)
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Rows per epoch without a curriculum; data loaders need a length."""
        return self.rows

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self._next()

    def share(self, row: int) -> float:
        """The share of epochs that include the row; 1.0 until it has a finished group."""
        return max(self.floor, 0.5 ** abs(self.streaks.get(row, 0)))

    def observe(self, groups: Iterable[tuple[int, Sequence[bool]]]) -> None:
        """Update the streaks from finished groups: (row, whether each answer is correct)."""
        for row, right in groups:
            before = self.streaks.get(row, 0)
            if all(right):
                self.streaks[row] = max(before, 0) + 1
            elif not any(right):
                self.streaks[row] = min(before, 0) - 1
            else:
                self.streaks[row] = 0

    def metrics(self) -> dict[str, float]:
        """``curriculum/`` metrics over all rows of the training file.

        always, never    rows whose last group was all correct, or all wrong
        mixed, unseen    rows whose last group was mixed; rows without a group so far
        mean_share       mean share; 1 means that no row is skipped
        epoch            number of the current epoch, from 1
        """
        streaks = list(self.streaks.values())
        always, never = sum(streak > 0 for streak in streaks), sum(streak < 0 for streak in streaks)
        skipped = sum(1.0 - self.share(row) for row in self.streaks)
        counts = {
            "always": always,
            "never": never,
            "mixed": len(streaks) - always - never,
            "unseen": self.rows - len(streaks),
            "mean_share": 1.0 - skipped / self.rows,
            "epoch": self.epoch + 1,
        }
        return {f"curriculum/{name}": float(value) for name, value in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        state = {"rows": self.rows, "epoch": self.epoch, "position": self.position}
        return {**state, "recent": list(self.recent), "streaks": dict(self.streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises DataError if the number of rows differs."""
        if state["rows"] != self.rows:
            raise DataError(
                f"data.train_file has {self.rows} rows, but had {state['rows']} when the checkpoint was saved, and the "
                "curriculum's state is per row. Restore the file, or start a run with another run.name"
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
            if row not in self.recent and self._is_included(row):
                self.recent = [*self.recent, row][-(self.apart - 1) :] if self.apart > 1 else []
                return row

    def _is_included(self, row: int) -> bool:
        share, start = self.share(row), float(self._starts_N[row])
        return int(share * (self.epoch + 1) + start) > int(share * self.epoch + start)

    def _order_of(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng((self.seed, self.rows, epoch)).permutation(self.rows)

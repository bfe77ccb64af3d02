"""How many trajectories a step has lost: of groups that verl replaced, and of those it took."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.errors import RolloutError

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


class Verls:
    """Stands for verl's buffer. A batch: what it finds failed at each look, then what it takes.

    A group is its name and how many trajectories of it are there.
    """

    looks: list[dict[str, int]]
    takes: dict[str, int]

    def sample(self: Any, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        for failed in self.looks:
            there = {f"{uid}_{number}_0": {} for uid, count in failed.items() for number in range(count)}
            self.partitions = {partition_id: {**there, "old_0_0": {}, "well_0_0": {}}}
            self.failure_keys, self.finished_keys = {partition_id: set(failed)}, {partition_id: {"old", "well"}}
            self._dapo_filtered_keys(partition_id)
        uids, snapshot, _ = self._select_prompt_uids(partition_id, set(self.takes), batch_size)
        tags = [{"is_padding": False}] * len(snapshot)
        del uids
        return SimpleNamespace(keys=list(snapshot), tags=tags, partition_id=partition_id), {}

    def _dapo_filtered_keys(self: Any, *_: Any) -> Any:
        return set(), Counter()

    def _select_prompt_uids(self, partition_id: str, keys: list[str], batch_size: int) -> Any:
        del partition_id, batch_size
        snapshot = {f"{uid}_{number}_0": {} for uid in keys for number in range(self.takes[uid])}
        return list(keys), snapshot, dict.fromkeys(keys, 1)


def buffer(max_dropped_fraction: float) -> Any:
    """Groups of four in training and of two in validation, without the settings' file."""
    from retool_mcore.verl.replay import ReplayMixin

    class Buffer(ReplayMixin, Verls):  # pyright: ignore[reportIncompatibleMethodOverride]
        def __init__(self) -> None:
            self.group_size, self.max_dropped_fraction = {"train": 4, "val": 2}, max_dropped_fraction
            self.seed, self.compares_within_groups, self.observe = 0, False, None
            self.pop_drop_causes, self.trainer_mode = Counter, "colocate_async"

        def _measure(self, *_: Any) -> dict[str, float]:
            return {}

    return Buffer()


def test_each_failed_trajectory_counts_once_in_its_own_step():
    found = buffer(1.0)
    found.looks = [{"a": 3, "b": 1}, {"c": 2}]  # of three groups, at two looks, six are missing
    found.takes = {"d": 4, "e": 3, "f": 4}
    _, first = found.sample(1, "train", 3)
    assert first["rollout/dropped"] == 4 + 2 + 1
    found.looks, found.takes = [], {"g": 4, "h": 4, "i": 2}
    _, second = found.sample(2, "train", 3)
    assert second["rollout/dropped"] == 2, "none of the step before"


def test_failures_of_several_looks_are_held_against_the_limit_together():
    found = buffer(0.25)  # of twelve: three may be missing
    found.looks, found.takes = [{"a": 2}, {"b": 3}], {"d": 4, "e": 4, "f": 4}
    assert found.sample(1, "train", 3)[1]["rollout/dropped"] == 3
    found.looks = [{"a": 2}, {"b": 2}]
    with pytest.raises(RolloutError, match=r"4 of 12 trajectories of step 2 \(train\) were dropped \(33\.3%\)"):
        found.sample(2, "train", 3)
    found.looks = [{"a": 2}, {"b": 3}]
    assert found.sample(3, "train", 3)[1]["rollout/dropped"] == 3, "a step begins at 0"

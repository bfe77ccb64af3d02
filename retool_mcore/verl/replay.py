"""The replay buffers from which verl's trainer samples its batches.

They count dropped trajectories, measure behaviour and write trajectories to a file. verl loads them
through trainer.v1.sampler.custom_sampler. They differ from verl's replay buffers as follows:

- They poll for finished trajectories every 0.1 s. verl polls every 2 s, which is most of a small
  model's step.
- They count the trajectories that outages dropped, and stop the run if these exceed
  rollout.max_dropped_fraction of the batch. An exception in the agent loop or in a tool also drops
  a trajectory. In the modes that keep prompts in flight, verl then replaces the whole group.
- They skip a group with a single remaining trajectory, because it cannot be compared. (verl would
  use its reward as its advantage.)
"""

import logging
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer, ReplayBufferAsync

from retool_mcore.config.algorithm import REFILL_BATCHES
from retool_mcore.errors import RolloutError
from retool_mcore.rollout.records import RecordWriter, traces
from retool_mcore.run.trackers import Trace
from retool_mcore.verl.assign import groups_of_rows, real_keys, uid_of
from retool_mcore.verl.keys.rollout import RUN_CONFIG, settings_of_run
from retool_mcore.verl.measure import (
    accuracy_interval,
    answers_of_groups,
    batch_metrics,
    read_extras,
    write_groups,
)

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1


class ReplayMixin:
    """Mixin for one of verl's replay buffers; list it before verl's class.

    ``sampler_kwargs`` has the path of the run's settings. With algorithm.filter_groups (DAPO's
    dynamic sampling) verl swaps a group whose answers are all right or all wrong for a new prompt.
    The setting limits the new prompts per step, in batches of prompts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run_config = kwargs["sampler_kwargs"][RUN_CONFIG]
        run = settings_of_run(run_config)
        batch = run.train.prompts_per_step
        self.group_size = {"train": run.rollout.group_size, "val": run.validation.n}
        self.max_dropped_fraction = run.rollout.max_dropped_fraction
        self.writer = RecordWriter(Path(run_config).parent / "trajectories")
        self.record_groups, self.seed = run.rollout.record_groups, run.run.seed
        self.tracked = run.rollout.tracked_trajectories
        self.traces: list[Trace] = []  # of trajectories recorded since the last row of metrics
        self.compares_within_groups = run.algorithm.compares_within_groups
        self.max_refills = run.algorithm.max_refill_batches * batch
        # For the current batch:
        self.refilled = 0  # replacement prompts
        self.failed = 0  # missing trajectories of groups that verl replaced because one failed
        self.expected = 0  # number of trajectories if nothing fails
        self.global_steps = 0
        self.val_metrics: dict[str, float] = {}  # of the last validation batch
        # Called with the answers of groups, for the curriculum, before the checkpoint is saved.
        self.observe: Callable[[list[tuple[int, list[bool]]]], None] | None = None
        # Filter by correctness, not by reward: from a group that is all wrong the model cannot
        # learn to answer right, whatever the shaped rewards are.
        metric = "acc" if run.algorithm.filter_groups else None
        kwargs |= {"poll_interval": POLL_INTERVAL_S, "filter_groups_metric": metric, "train_batch_size": batch}
        # With filtered groups, verl fetches prompts one by one, so that it can replace exactly the
        # evicted ones.
        kwargs["gen_batch_size"] = 1 if metric else batch
        # Returns the errors that dropped trajectories since the last call.
        self.pop_drop_causes: Callable[[], Counter[str]] = Counter
        self._add_prompts = kwargs["refill_fn"]
        self.while_waiting: Callable[[], None] = lambda: None  # called at each poll of an unfinished batch
        super().__init__(*args, **(kwargs | {"refill_fn": self._refill}))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample a batch as verl does, and count dropped trajectories and replacement prompts.

        Raises RolloutError if more than rollout.max_dropped_fraction of the trajectories dropped.
        """
        self.global_steps, self.refilled, self.failed = global_steps, 0, 0
        self.expected = batch_size * self.group_size[partition_id]
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "train":
            self._observe_answers(real_keys(batch), partition_id)
        if partition_id == "val":  # verl drops the metrics returned here; ReToolTrainer takes these instead
            measured = {**self._measure(batch.keys, partition_id), **self.dropped}
            self.val_metrics = {f"val/{name}": value for name, value in measured.items()}
            return batch, metrics
        return batch, {**metrics, **self.dropped, "rollout/refilled_prompts": self.refilled}

    def step_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> dict[str, float]:
        """Metrics of the trajectories that the step trained on; call while they are in the queue.

        Also writes some groups to the trajectory file. ``metrics``: verl's metrics of the step,
        with the counts of filtered groups.
        """
        counts = metrics.get(DAPO_FILTERED_REWARD_COUNTS_KEY)
        discarded = int(metrics.get("training/filter_groups/discarded_surplus_samples", 0))
        return self._measure(real_keys(batch), batch.partition_id, counts, discarded)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.while_waiting()
        return super()._wait_for_next_poll(partition_id, last_debug_time)  # type: ignore[misc]

    def _refill(self, prompts: int) -> None:
        """Submit ``prompts`` replacement prompts for verl. Raises RolloutError above the limit."""
        self.refilled += prompts
        if self.refilled > self.max_refills:
            raise RolloutError(
                f"step {self.global_steps} needed {self.refilled} replacement prompts and is still not full. "
                f"The limit is {self.max_refills}: algorithm.filter_groups ({REFILL_BATCHES} if it is 0) * "
                "train.prompts_per_step. If the filter is on, most groups are all right or all wrong: use other "
                "problems, or a larger rollout.group_size. If trajectories failed, the log has the reasons: look for "
                "'Error in _run_prompt'"
            )
        self._add_prompts(prompts)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Run verl's filter on the groups that outages did not empty; it fails on empty ones.

        Empty groups count as dropped when verl selects them. Right after this call verl replaces
        the filtered groups, so the curriculum gets their answers here. In the modes that keep
        prompts in flight, verl also replaces each group with a failed trajectory; the group's
        missing trajectories count as dropped here.
        """
        finished, present = self.finished_keys[partition_id], self.partitions[partition_id]
        empty = finished - {uid_of(key) for key in present}
        finished -= empty
        filtered, counts = super()._dapo_filtered_keys(partition_id)  # type: ignore[misc]
        finished |= empty
        self._observe_answers([key for key in present if uid_of(key) in filtered], partition_id)
        failed = self.failure_keys[partition_id] if self.trainer_mode != "sync" else set[str]()
        if failed:
            finished_sessions = {tuple(key.rsplit("_", 2)[:2]) for key in present if uid_of(key) in failed}
            self.failed += self.group_size[partition_id] * len(failed) - len(finished_sessions)
            self._require_few_dropped(self.failed, partition_id)
        return filtered, counts

    def _require_few_dropped(self, dropped: int, partition_id: str) -> None:
        """Raise RolloutError if ``dropped`` is more than rollout.max_dropped_fraction allows."""
        if dropped <= self.max_dropped_fraction * self.expected:
            return
        causes, step = self.pop_drop_causes(), f"step {self.global_steps} ({partition_id})"
        # By type, because messages may differ in a detail such as a duration.
        kinds = {cause.partition(":")[0] for cause in causes}
        most_frequent = causes.most_common(1)[0][0] if causes else "unknown"
        resume = "Fix it and run the same command again; it resumes from the last checkpoint."
        if dropped == self.expected and len(kinds) == 1:
            raise RolloutError(
                f"All {dropped} trajectories of {step} failed with {most_frequent}. The log has the traceback. {resume}"
            )
        raise RolloutError(
            f"{dropped} of {self.expected} trajectories of {step} were dropped ({dropped / self.expected:.1%}), "
            f"more than rollout.max_dropped_fraction = {self.max_dropped_fraction:.1%}. The most frequent cause is "
            f"{most_frequent}. The log has all: look for 'dropped' and 'Error in _run_prompt'. {resume}"
        )

    def _observe_answers(self, keys: list[str], partition_id: str) -> None:
        if self.observe is not None and keys:
            self.observe(answers_of_groups(keys, read_extras(keys, partition_id)))

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        """Select prompts as verl does, then drop groups with one trajectory if groups are compared.

        verl calls this once per batch, before it removes anything from the queue. verl selects the
        prompts of the earliest steps. Among prompts of the same step the seed decides, not the
        order in which they finished.
        """
        shuffled = sorted(sampleable_keys, key=lambda uid: zlib.crc32(f"{self.seed}:{uid}".encode()))
        uids, snapshot, steps = super()._select_prompt_uids(partition_id, shuffled, batch_size)  # type: ignore[misc]
        size = self.group_size[partition_id]
        present = Counter(uid for uid, _, _ in {tuple(key.rsplit("_", 2)) for key in snapshot} if uid in set(uids))
        dropped = self.failed + self.expected - sum(present.values())
        self.dropped = {"rollout/dropped": dropped}
        self._require_few_dropped(dropped, partition_id)
        if dropped:
            self.pop_drop_causes()  # clears them for the next batch
        compared = self.compares_within_groups and partition_id == "train"
        single = {uid for uid in uids if present[uid] == 1 < size} if compared else set[str]()
        if single:
            keys = [key for key in snapshot if key.rsplit("_", 2)[0] in single]
            tq.kv_clear(partition_id=partition_id, keys=keys)
            snapshot = {key: tag for key, tag in snapshot.items() if key not in set(keys)}
        return uids, snapshot, steps

    def _measure(self, keys: list[str], partition_id: str, *filtered: Any) -> dict[str, float]:
        extras = read_extras(keys, partition_id)
        recorded = write_groups(
            self.writer,
            keys,
            extras,
            partition_id=partition_id,
            step=self.global_steps,
            groups=self.record_groups,
            seed=self.seed,
        )
        self.traces += traces(recorded, self.tracked)
        metrics = batch_metrics(keys, extras, *filtered)
        return metrics | accuracy_interval(keys, extras) if partition_id == "val" else metrics


class SyncReplay(ReplayMixin, ReplayBuffer):
    """Replay buffer of verl's synchronous trainer."""


class AsyncReplay(ReplayMixin, ReplayBufferAsync):
    """Replay buffer of verl's asynchronous trainers."""


def clear_orphans() -> None:
    """Remove trajectories without a prompt from the queue that a checkpoint restored.

    verl saves the queue while it still contains the trajectories of the saved step. Their prompts
    are gone, so nothing would ever read them, and each resume would add the trajectories of one
    more step.
    """
    for partition_id, items in (tq.kv_list() or {}).items():
        prompts = {key for key, tag in items.items() if tag.get("is_prompt", False)}
        orphans = [key for key in items if key not in prompts and uid_of(key) not in prompts]
        if orphans:
            tq.kv_clear(partition_id=partition_id, keys=orphans)


def require_learnable(rows: KVBatchMeta, step: int, settings: str) -> float:
    """The fraction of trajectories without a token in the loss, padding rows excluded.

    Raises RolloutError if none has such a token; the error names ``settings`` as the cause.
    """
    keys = real_keys(rows)
    data: Any = tq.kv_batch_get(keys=keys, partition_id=rows.partition_id, select_fields=["response_mask"])
    idle = sum(not bool(mask.any()) for mask in data["response_mask"].unbind())
    if idle == len(keys):
        raise no_learnable_response(step, settings)
    return idle / len(keys)


def no_learnable_response(step: int, settings: str) -> RolloutError:
    """The error for a step in which ``settings`` excluded every response from the loss."""
    return RolloutError(
        f"No response of step {step} has a token to learn from: {settings} excluded all of them. Loosen that "
        "setting and run the same command again; it resumes from the last checkpoint."
    )


def sequence_lengths(rows: KVBatchMeta) -> list[int]:
    """Number of tokens of each trajectory, prompt included; padding rows are skipped."""
    return [tag["seq_len"] for tag, group in zip(rows.tags, groups_of_rows(rows), strict=True) if group is not None]

"""What verl's trainer samples its batches from: outages accounted for, behaviour measured,
trajectories written.

Chosen through trainer.v1.sampler.custom_sampler; ``verl.keys.ppo`` passes ``sampler_kwargs``.
Compared with verl's own:
- it looks for finished trajectories every 0.1 s, not every 2 s, which is most of a small model's step;
- trajectories that outages dropped are counted, and above ``max_dropped_fraction`` of the batch the run stops;
- a group that kept a single trajectory has nothing to compare with: that one is left out as well. (verl would take
  its reward for its advantage.)
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer, ReplayBufferAsync

from retool_mcore.errors import RolloutError
from retool_mcore.rollout.measure import batch_metrics, mismatch, read_extras, write_groups
from retool_mcore.rollout.records import RecordWriter

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1


class _Accounting:
    """Mixed in before one of verl's replay buffers. Keys of ``sampler_kwargs``:

    group_size, val_group_size, max_dropped_fraction, trajectory_dir, train_batch_size;
    ``record_groups`` are written of each step, chosen by ``seed``; ``compares_groups``: advantages
    are taken within groups; for DAPO's dynamic sampling ``filter_groups_metric``, as
    algorithm.filter_groups.metric: another prompt takes the place of a group in which it is the
    same for all; ``max_refill_batches``: of such prompts, for one batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = dict(kwargs["sampler_kwargs"])
        self.group_size = {"train": int(settings["group_size"]), "val": int(settings["val_group_size"])}
        self.max_dropped_fraction = float(settings["max_dropped_fraction"])
        self.writer = RecordWriter(Path(settings["trajectory_dir"]))
        self.record_groups, self.seed = int(settings["record_groups"]), int(settings["seed"])
        self.compares_groups = bool(settings["compares_groups"])
        self.max_refills = int(settings["max_refill_batches"]) * int(settings["train_batch_size"])
        self.refilled = 0  # prompts sampled in place of others, for the batch that is waited for
        self.dropped_total = 0
        self.global_steps = 0
        self.val_metrics: dict[str, float] = {}  # of the last validation batch
        metric, batch = settings.get("filter_groups_metric"), int(settings["train_batch_size"])
        kwargs |= {"poll_interval": POLL_INTERVAL_S, "filter_groups_metric": metric, "train_batch_size": batch}
        # # verl fetches prompts one by one when groups are filtered, so that it can refill exactly
        # what it evicts.
        kwargs["gen_batch_size"] = 1 if metric else batch
        self._add_prompts = kwargs["refill_fn"]
        super().__init__(*args, **(kwargs | {"refill_fn": self._refill}))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's sample, with what it cost. Raises RolloutError above max_dropped_fraction."""
        self.global_steps, self.refilled = global_steps, 0
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "val":  # verl drops the metrics returned here; ReToolTrainer takes these instead
            measured = {**self._measure(batch.keys, partition_id), **self.dropped}
            self.val_metrics = {f"val/{name}": value for name, value in measured.items()}
            return batch, metrics
        return batch, {**metrics, **self.dropped, "rollout/refilled_prompts": self.refilled}

    def step_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> dict[str, float]:
        """Of all that a step has learnt from, while verl's queue still has it; some groups go to
        the trajectory file.

        ``metrics``: verl's of the step, which say what was filtered.
        """
        counts = metrics.get(DAPO_FILTERED_REWARD_COUNTS_KEY)
        discarded = int(metrics.get("training/filter_groups/discarded_surplus_samples", 0))
        return self._measure(_real_keys(batch), batch.partition_id, counts, discarded)

    def _refill(self, prompts: int) -> None:
        """What verl calls for ``prompts`` new ones. Raises RolloutError instead of sampling for
        ever.
        """
        self.refilled += prompts
        if self.refilled > self.max_refills:
            raise RolloutError(
                f"step {self.global_steps} has asked for {self.refilled} prompts in place of others and is not full; "
                f"rollout.max_refill_batches * train.prompts_per_step = {self.max_refills} is the limit. Under "
                "algorithm.filter_groups most groups are then all right or all wrong: take other problems, or a larger "
                "rollout.group_size. Of trajectories that failed the log says why: look for 'Error in _run_prompt'"
            )
        self._add_prompts(prompts)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """verl's, which takes a group that an outage left empty for one without the metric and ends
        the run.
        """
        finished = self.finished_keys[partition_id]
        empty = finished - {key.rsplit("_", 2)[0] for key in self.partitions[partition_id]}
        finished -= empty
        try:
            return super()._dapo_filtered_keys(partition_id)  # type: ignore[misc]
        finally:
            finished |= empty  # counted as dropped when they are chosen

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        """verl's choice of prompts, without groups of one. Called once a batch, before anything is
        taken out.

        verl takes those that were started first; among these the seed decides, not which came to an
        end first.
        """
        shuffled = sorted(sampleable_keys, key=lambda uid: zlib.crc32(f"{self.seed}:{uid}".encode()))
        uids, snapshot, steps = super()._select_prompt_uids(partition_id, shuffled, batch_size)  # type: ignore[misc]
        size = self.group_size[partition_id]
        present = Counter(uid for uid, _, _ in {tuple(key.rsplit("_", 2)) for key in snapshot} if uid in set(uids))
        expected = size * len(uids)
        dropped = expected - sum(present.values())
        self.dropped_total += dropped
        self.dropped = {"rollout/dropped": dropped, "rollout/dropped_total": self.dropped_total}
        if dropped > self.max_dropped_fraction * expected:
            raise RolloutError(
                f"{dropped} of {expected} trajectories of step {self.global_steps} ({partition_id}) were dropped, "
                f"{dropped / expected:.1%}; rollout.max_dropped_fraction = {self.max_dropped_fraction:.1%}. The log "
                "says why for each: look for 'dropped' and 'Error in _run_prompt'. Mend the sandbox or the engine and "
                "start the same command again; it continues from the last checkpoint"
            )
        compared = self.compares_groups and partition_id == "train"
        lonely = {uid for uid in uids if present[uid] == 1 < size} if compared else set[str]()
        if lonely:
            keys = [key for key in snapshot if key.rsplit("_", 2)[0] in lonely]
            tq.kv_clear(partition_id=partition_id, keys=keys)
            snapshot = {key: tag for key, tag in snapshot.items() if key not in set(keys)}
        return uids, snapshot, steps

    def _measure(self, keys: list[str], partition_id: str, *filtered: Any) -> dict[str, float]:
        extras = read_extras(keys, partition_id)
        to = {"partition_id": partition_id, "step": self.global_steps}
        write_groups(self.writer, keys, extras, **to, groups=self.record_groups, seed=self.seed)
        return batch_metrics(keys, extras, *filtered)


class SyncReplay(_Accounting, ReplayBuffer):
    """For verl's synchronous trainer."""


class AsyncReplay(_Accounting, ReplayBufferAsync):
    """For verl's asynchronous trainers."""


def mismatch_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """``mismatch/`` metrics of a batch: the engine's log-probabilities against the actor's before
    its update.
    """
    names = ["rollout_log_probs", "old_log_probs", "response_mask"]
    data = _rows(batch, names)
    rollout_N, actor_N, mask_N = (torch.cat(list(data[name].unbind())) for name in names)
    sampled = mask_N.bool()
    return mismatch(rollout_N[sampled], actor_N[sampled])


def sequence_lengths(batch: KVBatchMeta) -> list[int]:
    """Tokens of each trajectory of a batch, its prompt included."""
    data = _rows(batch, ["prompts", "responses"])
    pairs = zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
    return [len(prompt) + len(response) for prompt, response in pairs]


def groups_of_rows(batch: KVBatchMeta) -> list[str | None]:
    """The prompt's name of each row; None for a row that only fills the batch up."""
    pairs = zip(batch.keys, batch.tags, strict=True)
    return [None if tag.get("is_padding", False) else key.rsplit("_", 2)[0] for key, tag in pairs]


def _real_keys(batch: KVBatchMeta) -> list[str]:
    return [key for key, group in zip(batch.keys, groups_of_rows(batch), strict=True) if group is not None]


def _rows(batch: KVBatchMeta, names: list[str]) -> Any:
    return tq.kv_batch_get(keys=_real_keys(batch), partition_id=batch.partition_id, select_fields=names)

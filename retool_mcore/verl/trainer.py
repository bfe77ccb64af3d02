"""Our part of verl's PPO trainers: metrics that survive a kill, checkpoints complete or absent.

verl's trainers run unchanged. These subclasses, registered under names of their own, give the
metrics our names, write them to a JSONL file, and publish a checkpoint only when all of it is on
disk. verl truncates its own tracker file before it writes it, and its own clean-up forgets old
checkpoints across restarts, so neither is used.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig, open_dict
from ray.exceptions import RayTaskError
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from retool_mcore.errors import ReToolError
from retool_mcore.model.files import read_config
from retool_mcore.model.shape import shape_of_config
from retool_mcore.platforms.base import get_platform
from retool_mcore.platforms.pickles import files_are_data
from retool_mcore.run import checkpoint, saving, start
from retool_mcore.run.metrics import EXPERTS, MetricWriter, memory_by_rank, require_finite, token_rates
from retool_mcore.verl import loop_workers
from retool_mcore.verl.asked_to_end import EndingMixin
from retool_mcore.verl.async_save import seed_at
from retool_mcore.verl.dealing import deal, order_for_ranks
from retool_mcore.verl.engine_gap import first_update, gap_metrics, store_actor_log_probs
from retool_mcore.verl.engines import DetachedEnginesMixin
from retool_mcore.verl.goal import BestAndCurriculum
from retool_mcore.verl.in_flight import InFlightMixin
from retool_mcore.verl.keys.ppo import run_config_of
from retool_mcore.verl.keys.rollout import TRAINER_MODES
from retool_mcore.verl.replay import (
    clear_orphans,
    groups_of_rows,
    require_learnable,
    sequence_lengths,
)
from retool_mcore.verl.rl_metrics import RENAMED, EngineLoad, StepClock, row_of
from retool_mcore.verl.run_settings import settings_of_run
from retool_mcore.verl.token_means import mean_of_updates
from retool_mcore.verl.unpadded import UnpaddedTrainer
from retool_mcore.verl.update_worker import KEEP_LOG_PROBS
from retool_mcore.verl.workers import worker_class

PHASES = {  # timers inside a step; together with time_other_s they add up to time_step_s
    "gen": "generation",
    "engine_sleep": "engine_sleep",
    "reward": "reward",
    "old_log_prob": "old_log_prob",
    "ref": "reference",
    "values": "values",
    "adv": "advantage",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "save_checkpoint": "checkpoint",
    "update_weights": "weight_sync",
}
COUNTS = ("rollout/dropped", "rollout/refilled_prompts")  # per mini-batch, where a step samples several


def phase_times(timing_raw: Mapping[str, float], tool_wait_s: float) -> dict[str, float]:
    """A step's seconds by phase, from its timers; together they add up to the step.

    verl counts the engine's going to sleep and ``tool_wait_s`` as generation; here they are phases
    of their own.
    """
    times = {f"time_{name}_s": float(timing_raw[theirs]) for theirs, name in PHASES.items() if theirs in timing_raw}
    if "time_generation_s" in times:
        times["time_generation_s"] -= times.get("time_engine_sleep_s", 0.0)
        times["time_tool_wait_s"] = min(tool_wait_s, times["time_generation_s"])
        times["time_generation_s"] -= times["time_tool_wait_s"]
    step_s = float(timing_raw["step"])
    times |= {"time_other_s": step_s - sum(times.values()), "time_step_s": step_s}
    return times | ({"time_validate_after_s": float(timing_raw["testing"])} if "testing" in timing_raw else {})


@contextmanager
def unwrap_worker_errors() -> Iterator[None]:
    """Raise a worker's ReToolError as the worker raised it, without Ray's wrapping."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ReToolError):
            raise error.cause from error
        raise


class WorkersSave:
    """The save in flight of all roles' workers; a ``saving.Pending``."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def ended(self) -> bool:
        return all(all(group.save_ended()) for group in self._groups)

    def finish(self) -> None:
        with unwrap_worker_errors():
            for group in self._groups:
                group.finish_save()

    def kill(self) -> None:
        """Does nothing: a failed run ends its workers, and each worker's writer ends with it."""


class TrainerMixin(BestAndCurriculum, InFlightMixin, EndingMixin):
    """Mixed in before one of verl's trainers, whose registered name is ``verl_mode``."""

    verl_mode: str

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl compares the name, not the class
        self._run = settings_of_run(run_config_of(config))
        super().__init__(config)
        platform = get_platform(self._run.run.platform)
        self._starting = True
        self._saver = saving.Saver(self._run, self._write_checkpoint)
        self.updates_of_a_batch = self._run.train.updates_per_step
        self._writer: MetricWriter | None = None
        self._clock = StepClock()
        self._load = EngineLoad(self)
        values = read_config(self._run.model.path)
        self._shape = shape_of_config(values) if values else None  # None: not in the hub cache
        self._peak_flops = (platform.device.peak_flops or 0.0) * self._run.train_gpus()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, remote in self.role_worker_mapping.items():
            self.role_worker_mapping[role] = ray.remote(worker_class(remote.__ray_actor_class__, self._run.memory))
        start.begin(self._run.run.dir, "workers")
        loop_workers.create_workers(self._run)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.val_dataset.held_out = True

    def fit(self, agent_loop_manager: Any) -> None:
        start.begin(self._run.run.dir, "weights")
        for group in self._saved_groups():
            group.belong_to(str(self._run.run.dir.absolute()))
        with self._saver:
            try:
                super().fit(agent_loop_manager)
            finally:
                if self._writer is not None:
                    self._writer.close()

    def on_step_begin(self) -> None:
        self._clock.step_begins()
        self._forget_step()
        self.replay_buffer.reports = self._reports
        self.replay_buffer.read_scores = self._signal.read_ahead
        super().on_step_begin()
        if self._starting:
            start.begin(self._run.run.dir, "steps")
        self._saver.poll()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._writer = MetricWriter(self._run, resumed_step=self.global_steps - 1)
        if self.validated and self.global_steps == 1:
            self._writer.write(0, row_of(self.validated), self.replay_buffer.traces)
        self.replay_buffer.traces = []
        self.replay_buffer.writer.keep_up_to(self.global_steps - 1)
        self._clock.row_written()

    def on_sample_end(self) -> None:
        self._load.ask()
        with marked_timer("engine_sleep", self.timing_raw):
            super().on_sample_end()

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen") -> Any:
        """Deal the batch's groups to its updates, each over all data-parallel ranks.

        verl would cut the batch in the order in which it came. An update learns from
        ``train.mini_batch_prompts`` prompts, however many of their trajectories outages dropped.
        """
        run = self._run
        prompts = run.train.mini_batch_prompts * self.updates_of_a_batch
        batch = upsample_batch_to_divisible_size(batch, prompts * run.rollout.group_size, self.tokenizer.eos_token_id)
        lengths = [tag["seq_len"] for tag in batch.tags]
        seed = (run.run.seed, self.global_steps, self.local_trigger_step)
        dealt = deal(groups_of_rows(batch), self.updates_of_a_batch, seed)
        order = order_for_ranks(dealt, lengths, run.dp)
        batch.reorder(order)
        by_rank = np.array_split(np.asarray(order), run.dp)
        metrics |= log_seqlen_unbalance(lengths, [part.tolist() for part in by_rank], prefix=logging_prefix)
        return batch

    def on_validate_begin(self) -> None:
        self._load.keep()
        if self._writer is None:
            start.begin(self._run.run.dir, "validation")
            self.replay_buffer.writer.keep_up_to(self.global_steps - 1)
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self._load.forget()

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict, **kwargs: Any) -> None:
        self._clock.metrics_begin()
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        metrics |= self._mismatch.metrics()
        buffer = self.replay_buffer
        metrics |= buffer.step_metrics(batch, metrics)
        metrics |= buffer.val_metrics  # of a validation in this step, which verl drops
        metrics |= self.goal_metrics(bool(buffer.val_metrics))
        buffer.val_metrics = {}
        self.stop_without_progress(self.global_steps)
        ours = {name: float(metrics[theirs]) for theirs, name in RENAMED.items() if theirs in metrics}
        of_experts = [name for name in metrics if name.startswith(f"actor/{EXPERTS}")]
        ours |= {name.removeprefix("actor/"): float(metrics.pop(name)) for name in of_experts}
        ours |= phase_times(timing_raw, metrics.get("behavior/slowest_tool_s", 0.0))
        lengths = sequence_lengths(batch)
        ours |= {"tokens": sum(lengths), **token_rates(sum(lengths), ours, self._run.cluster.num_gpus)}
        if self._shape and "time_update_actor_s" in ours:
            ours["flops"] = self._shape.train_flops(lengths, self._run.lora)
            if self._peak_flops:
                ours["mfu"] = ours["flops"] / (self._peak_flops * ours["time_update_actor_s"])
        ours |= memory_by_rank(self.actor_rollout_wg.peak_memory_gib())
        ours |= self._load.metrics() | self.engine_metrics()
        require_finite(ours, self.global_steps)
        metrics |= ours | self._clock.row_written()
        if self._starting:
            metrics |= start.start_times(self._run.run.dir)
            self._starting = False
        assert self._writer is not None, "on_train_begin makes the writer before the first step"
        self._writer.write(self.global_steps, row_of(metrics), buffer.traces)
        buffer.traces = []

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Advantages, after a look at what masks have left to learn from."""
        if self._run.algorithm.masks_responses:
            named = f"algorithm.mask = {json.dumps(self._run.algorithm.mask)}"
            metrics["loss/masked_fraction"] = require_learnable(batch, self.global_steps, named)
        return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        keeps = self._run.algorithm.old_log_prob == "rollout"
        batch.extra_info[KEEP_LOG_PROBS] = keeps
        batch = super()._update_actor(batch, metrics)
        if keeps:
            store_actor_log_probs(self.actor_rollout_wg, batch)
            if self.local_trigger_step == 0:
                compared = first_update(batch, self.updates_of_a_batch, self._run.dp)
                metrics |= gap_metrics(compared, self._run.algorithm, self._mismatch)
        return batch

    def _save_checkpoint(self) -> None:
        self._saver.save(self.global_steps)

    def _write_checkpoint(self, folder: str, step: int) -> WorkersSave | None:
        """verl's own saving; verl uses the same folder for this step."""
        del step
        with unwrap_worker_errors():
            super()._save_checkpoint()
        self.write_data_state(Path(folder).parent)
        return WorkersSave(self._saved_groups()) if self._run.checkpoint.asynchronous else None

    def _load_checkpoint(self) -> None:
        start.begin(self._run.run.dir, "checkpoint")
        saved = checkpoint.find_resume(self._run)
        if saved is not None and not saved.has_random_states_of(self._run):
            for group in self._saved_groups():
                group.load_random_states_afresh(seed_at(self._run.run.seed, saved.step))
        with files_are_data():
            super()._load_checkpoint()
        clear_orphans()
        self.prompts_restored()
        self.resume_best(saved.step if saved is not None else 0)
        if self._run.rollout.gpus:  # engines with their own devices; runner.py begins the stage of the others
            start.begin(self._run.run.dir, "engines")

    def _saved_groups(self) -> list[Any]:
        return [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]


@register_trainer(TRAINER_MODES["sync"])
class ReToolTrainer(TrainerMixin, PPOTrainerSync, UnpaddedTrainer):
    """Each step waits for all of its trajectories."""

    verl_mode = "sync"


@register_trainer(TRAINER_MODES["partial_rollout"])
class ReToolPartialRolloutTrainer(TrainerMixin, PPOTrainerColocateAsync, UnpaddedTrainer):
    """More prompts are in flight than a step needs; unfinished ones continue in the next step."""

    verl_mode = "colocate_async"


@register_trainer(TRAINER_MODES["async"])
class ReToolAsyncTrainer(DetachedEnginesMixin, TrainerMixin, PPOTrainerSeparateAsync, UnpaddedTrainer):
    """The engines have devices of their own and go on sampling while the actor learns.

    A step is several mini-batches, each sampled when it is to be learnt from; the engines' weights
    change at the end of the step.
    """

    verl_mode = "separate_async"

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.updates_of_a_batch = 1

    def _setup(self) -> None:
        # verl 0.9.1 passes print's flush=True to a log call of level INFO, a TypeError where that
        # level is on. Remove this when _setup in trainer_separate_async.py no longer does so.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """With one update per step, compute directly; verl would copy the weights for nothing.

        In that case the weights are those at the step's start.
        """
        if self._run.train.updates_per_step == 1:
            return UnpaddedTrainer._compute_old_log_prob(self, batch, metrics)
        return super()._compute_old_log_prob(batch, metrics)

    def step(self, metrics: dict[str, Any], timing_raw: dict) -> Any:
        self._counted: Counter[str] = Counter()
        self._updates: list[dict[str, Any]] = []
        batch = super().step(metrics, timing_raw)
        metrics |= mean_of_updates(self._updates)
        metrics |= self._counted  # verl averages these over mini-batches, and sums the running total
        metrics["rollout/dropped_total"] = self.replay_buffer.dropped_total
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict, sample_batch_size: int) -> Any:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        self._counted.update({name: metrics[name] for name in COUNTS})
        self._updates.append(dict(metrics))
        return batch

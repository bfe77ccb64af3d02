"""Our part of verl's PPO trainers: metrics that survive a kill, and checkpoints that are complete or absent.

verl's trainers run unchanged; these subclasses, registered under names of their own, give their metrics our names and a
JSONL file, and publish a checkpoint only when all of it is on disk. verl's own tracker file is truncated before it is
written and its own clean-up forgets across restarts, so neither is used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real  # numpy's integers are of it, and verl's extremes are such
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from ray.exceptions import RayTaskError
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.profiler import marked_timer
from verl.workers.rollout.llm_server import LLMServerClient

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import ReToolError
from retool_mcore.models import read_shape, train_flops
from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.replay import mismatch_metrics, sequence_lengths
from retool_mcore.train import checkpoint
from retool_mcore.train.engine_checkpoint import seed_at
from retool_mcore.train.metrics import MetricWriter, require_finite
from retool_mcore.train.workers import SAVING
from retool_mcore.verl_config import run_config_file
from retool_mcore.verl_config_rollout import TRAINER_MODES

# Our names for what verl reports, so that SFT, RL and perf/ speak of the same things.
RENAMED = {
    "critic/score/mean": "reward",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "critic/vf_loss": "value_loss",
    "response_length/mean": "response_tokens",
    "training/num_turns/mean": "num_turns",
    "training/rollout_probs_diff_mean": "rollout_actor_prob_diff_mean",
    "training/rollout_probs_diff_max": "rollout_actor_prob_diff_max",
    "perf/total_num_tokens": "tokens",
    "perf/throughput": "tokens_per_s",
    "actor/perf/max_memory_allocated_gb": "memory_gib",
}
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
COUNTS = ("rollout/dropped", "rollout/refilled_prompts")  # of one mini-batch where a step samples several


def phase_times(timing_raw: Mapping[str, float], tool_wait_s: float) -> dict[str, float]:
    """A step's seconds by phase, from its timers. They add up: what verl counts as generation is without the engine's
    going to sleep here, and without ``tool_wait_s``."""
    times = {f"time_{name}_s": float(timing_raw[theirs]) for theirs, name in PHASES.items() if theirs in timing_raw}
    if "time_generation_s" in times:
        times["time_generation_s"] -= times.get("time_engine_sleep_s", 0.0)
        times["time_tool_wait_s"] = min(tool_wait_s, times["time_generation_s"])
        times["time_generation_s"] -= times["time_tool_wait_s"]
    step_s = float(timing_raw["step"])
    times |= {"time_other_s": step_s - sum(times.values()), "time_step_s": step_s}
    return times | ({"time_validate_after_s": float(timing_raw["testing"])} if "testing" in timing_raw else {})


@contextmanager
def worker_errors_are_told() -> Iterator[None]:
    """Raise what a worker said to the user as it was raised there, without the way it took through Ray."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ReToolError):
            raise error.cause from error
        raise


class WorkersSave:
    """The save in flight of all roles' workers; a ``checkpoint.Pending``."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def ended(self) -> bool:
        return all(all(group.save_ended()) for group in self._groups)

    def finish(self) -> None:
        with worker_errors_are_told():
            for group in self._groups:
                group.finish_save()

    def kill(self) -> None:
        """Nothing to do: a run that failed ends its workers, and each worker's writer ends with it."""


class _Ours(PPOTrainer):
    """Mixed in before one of verl's trainers, whose registered name is ``verl_mode``."""

    verl_mode: str

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl compares the name, not the class
        self._run = load_config(RlConfig, run_config_file(config))
        super().__init__(config)
        self._saver = checkpoint.Saver(self._run, self._write_checkpoint)
        self._writer: MetricWriter | None = None
        self._shape = read_shape(self._run.model.path)  # {} for a hub name
        self._peak_flops = (get_platform(self._run.run.platform).peak_flops or 0.0) * self._run.train_gpus()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, remote in self.role_worker_mapping.items():
            self.role_worker_mapping[role] = ray.remote(SAVING[remote.__ray_actor_class__])

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.val_dataset.held_out = True

    def fit(self, agent_loop_manager: Any) -> None:
        with self._saver:
            super().fit(agent_loop_manager)

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self._saver.poll()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._writer = MetricWriter(self._run.run.dir, resumed_step=self.global_steps - 1)

    def on_sample_end(self) -> None:
        with marked_timer("engine_sleep", self.timing_raw):
            super().on_sample_end()

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        metrics |= mismatch_metrics(batch)
        buffer = self.replay_buffer
        metrics |= buffer.val_metrics  # of a validation in this step; verl drops them
        buffer.val_metrics = {}
        ours = {name: float(metrics[theirs]) for theirs, name in RENAMED.items() if theirs in metrics}
        ours |= phase_times(timing_raw, metrics.get("behavior/slowest_tool_s", 0.0))
        if self._shape and "time_update_actor_s" in ours:
            ours["flops"] = train_flops(self._shape, sequence_lengths(batch))
            if self._peak_flops:
                ours["mfu"] = ours["flops"] / (self._peak_flops * ours["time_update_actor_s"])
        require_finite(ours, self.global_steps)
        metrics |= ours
        assert self._writer is not None, "on_train_begin makes the writer before the first step"
        self._writer.write(self.global_steps, {k: float(v) for k, v in metrics.items() if isinstance(v, Real)})

    def _save_checkpoint(self) -> None:
        self._saver.save(self.global_steps)

    def _write_checkpoint(self, folder: str, step: int) -> WorkersSave | None:
        """verl's own saving, into the folder of this step that it has a name for, too."""
        del folder, step
        with worker_errors_are_told():
            super()._save_checkpoint()
        return WorkersSave(self._saved_groups()) if self._run.checkpoint.asynchronous else None

    def _load_checkpoint(self) -> None:
        saved = checkpoint.find_resume(self._run)
        if saved is not None and not saved.has_random_states_of(self._run):
            for group in self._saved_groups():
                group.load_random_states_afresh(seed_at(self._run.run.seed, saved.step))
        super()._load_checkpoint()

    def _saved_groups(self) -> list[Any]:
        return [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]


@register_trainer(TRAINER_MODES["sync"])
class ReToolTrainer(_Ours, PPOTrainerSync):
    """Each step waits for all of its trajectories."""

    verl_mode = "sync"


@register_trainer(TRAINER_MODES["partial_rollout"])
class ReToolPartialRolloutTrainer(_Ours, PPOTrainerColocateAsync):
    """More prompts are in flight than a step needs; what a step leaves unfinished goes on in the next."""

    verl_mode = "colocate_async"

    def get_llm_client(self) -> LLMServerClient:
        """The plain client: our loop goes on after an abort by itself, and so knows each token's version."""
        return self.llm_server_manager.get_client()


@register_trainer(TRAINER_MODES["async"])
class ReToolAsyncTrainer(_Ours, PPOTrainerSeparateAsync):
    """The engines have devices of their own and go on sampling while the actor learns.

    A step is several mini-batches, each sampled when it is to be learnt from; the engines' weights change at its end.
    """

    verl_mode = "separate_async"

    def _setup(self) -> None:
        # verl 0.9.1 hands print's flush=True to a log line of level INFO, a TypeError where that level is on.
        # Remove when trainer_separate_async.py's _setup no longer does.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()

    def get_llm_client(self) -> LLMServerClient:
        """The plain client, as in ReToolPartialRolloutTrainer."""
        return self.standalone_server_manager.get_client()

    def step(self, metrics: dict[str, Any], timing_raw: dict) -> Any:
        self._counted: Counter[str] = Counter()
        batch = super().step(metrics, timing_raw)
        metrics |= self._counted  # verl takes the mean over mini-batches, of the total the sum
        metrics["rollout/dropped_total"] = self.replay_buffer.dropped_total
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict, sample_batch_size: int) -> Any:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        self._counted.update({name: metrics[name] for name in COUNTS})
        return batch

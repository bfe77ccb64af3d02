"""The trainer around a step: set-up, prompts, stop on request, checkpoints, validation, metrics.

``step.py`` has the step itself and registers the trainers of the three modes. ``engines.py``
restarts dead engines. We do not use verl's checkpoint tracker file, which verl truncates before it
writes it, nor verl's clean-up of old checkpoints, which forgets them when a run restarts.
"""

import copy
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from numbers import Real  # includes numpy integers, which verl's minima and maxima are
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from retool_mcore.data.curriculum import SolveRateOrder
from retool_mcore.model.files import read_config
from retool_mcore.model.shape import shape_of_config
from retool_mcore.platforms.base import get_platform
from retool_mcore.run import checkpoint, start
from retool_mcore.run.checkpoint import BestKeeper, lacks_value
from retool_mcore.run.metrics import EXPERTS, MetricWriter, require_finite, token_rates
from retool_mcore.run.signals import EndedBySignal, StopSignals
from retool_mcore.verl.agent_loop import create_router, create_workers
from retool_mcore.verl.checkpoint import WorkersSave, unwrap_worker_errors
from retool_mcore.verl.engines import EngineManager
from retool_mcore.verl.keys.rollout import settings_of_run
from retool_mcore.verl.keys.tree import run_config_of
from retool_mcore.verl.replay import clear_orphans, sequence_lengths
from retool_mcore.verl.update_worker import LOSS_TOKENS
from retool_mcore.verl.workers import worker_class

TRAIN = "train"  # verl's partition of the transfer queue
PHASES = (  # consecutive timers of a step; with timing_s/other they add up to timing_s/step
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "save_checkpoint"),
    "update_weights",
)


class StoppedBeforeUpdate(Exception):
    """The run got a stop request, and the step stops before its first update."""


class RlRun(EngineManager):
    """Mixin for verl's trainer ``verl_mode``; list it before verl's class."""

    verl_mode: str
    updates_per_batch: int  # optimizer updates per sampled batch
    queue_started: Future[Any]  # done when the transfer queue can be used
    validated: Mapping[str, Any]  # metrics of the last validation, which may precede the first step
    _order: SolveRateOrder | None = None  # order of the training rows; None without a curriculum

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl branches on the name, not on the class
        self._run = settings_of_run(run_config_of(config))
        super().__init__(config)
        platform = get_platform(self._run.run.platform)
        self.updates_per_batch = self._run.train.updates_per_step
        self._saver = checkpoint.Saver(self._run, self._write_checkpoint)
        self._writer: MetricWriter | None = None
        values = read_config(self._run.model.path)
        self._shape = shape_of_config(values) if values else None  # None: config not in the hub cache
        self._peak_flops = (platform.device.peak_flops or 0.0) * self._run.train_gpus()

    # ---------------------------------------------------------------- set-up

    def _init_resource_pool_mgr(self) -> None:
        """Replace verl's training workers by ours; start agent-loop workers and router.

        verl calls this after it has loaded the data sets and before it builds any worker.
        """
        super()._init_resource_pool_mgr()
        self._order_training_rows()
        actor = DetachActorWorker if self._run.train.mode == "async" else ActorRolloutRefWorker
        for role in self.role_worker_mapping:
            verl_class = TrainingWorker if role == Role.Critic else actor
            self.role_worker_mapping[role] = ray.remote(worker_class(verl_class, self._run.memory))
        start.begin(self._run.run.dir, "workers")
        create_workers(self._run)
        rollout = self.config.actor_rollout_ref.rollout
        if not rollout.router_config_path:  # otherwise the user has configured another router
            self._router = create_router(self._run, full_determinism=rollout.full_determinism)

    def _load_checkpoint(self) -> None:
        self.queue_started.result()  # a checkpoint has prompts that the queue held
        super()._load_checkpoint()

    def on_init_end(self) -> None:
        """Restore our state; verl has loaded the checkpoint that ``checkpoint.resume`` chose."""
        clear_orphans()
        self._find_restored_prompts()
        self._resume_best(self.global_steps)
        super().on_init_end()
        self.replay_buffer.while_waiting = self.while_sampling

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's loop until ``train.steps``, a signal, or ``best.patience`` ends it.

        Raises EndedBySignal if a signal stopped the run before an update.
        """
        start.begin(self._run.run.dir, "weights")
        self.replay_buffer.pop_drop_causes = agent_loop_manager.pop_drop_causes
        for group in self._saved_groups():
            group.start_heartbeat(str(self._run.run.dir.absolute()))
        with self._saver, StopSignals(self._run.checkpoint.grace_s) as self._ending:
            try:
                super().fit(agent_loop_manager)
            except StoppedBeforeUpdate:
                self._save_previous_step()
                raise EndedBySignal(self._ending.first_signal, self._saver.describe_kept()) from None
            finally:
                if self._writer is not None:
                    self._writer.close()

    def on_train_begin(self) -> None:
        self.replay_buffer.val_metrics = {}  # the first validation gets its own row, below
        super().on_train_begin()
        self._stop_without_progress(self.global_steps - 1)
        self._writer = MetricWriter(self._run, resumed_step=self.global_steps - 1)
        if self.validated and self.global_steps == 1:
            self._writer.write(0, row_of(self.validated), self.replay_buffer.traces)
        self.replay_buffer.traces = []
        self.replay_buffer.writer.drop_rows_after(self.global_steps - 1)
        self._row_written_s = time.perf_counter()
        start.begin(self._run.run.dir, "steps")

    def on_step_begin(self) -> None:
        self._step_began_s = time.perf_counter()
        super().on_step_begin()
        self._saver.poll()

    # --------------------------------------------------------------- prompts

    _has_fetched = False  # whether the next step's prompts are already in the queue
    _uid_step = -1  # the last step whose prompts got uids
    _uid_count = 0  # number of uids in that step

    def _fetch_one_gen_batch(self) -> Any:
        """Fetch prompts as verl does, with uids from step and position that a resume repeats."""
        batch = super()._fetch_one_gen_batch()
        if self._uid_step != self.global_steps:
            self._uid_step, self._uid_count = self.global_steps, 0
        uids = [prompt_uid(self.global_steps, self._uid_count + position) for position in range(len(batch))]
        self._uid_count += len(batch)
        batch["uid"] = tu.get_tensordict({"uid": np.array(uids, dtype=object)})["uid"]
        return batch

    def prepare_step(self) -> dict[str, Any]:
        """Submit the step's prompts, unless they are already in flight."""
        if self._has_fetched:
            self._has_fetched = False
            return {}
        return super().prepare_step()

    def submit_next_prompts(self) -> None:
        """Submit the next step's prompts now instead of when it begins."""
        self.global_steps += 1
        try:
            self.prepare_step()
        finally:
            self.global_steps -= 1
        self._has_fetched = True

    def _find_restored_prompts(self) -> None:
        """Find prompts of an interrupted step in the queue that the checkpoint restored.

        The resumed step then submits no prompts. Otherwise one batch more than configured would be
        in flight.
        """
        positions = positions_of_step(self.global_steps + 1)
        self._has_fetched = bool(positions)
        self._uid_step, self._uid_count = self.global_steps + 1, max(positions, default=-1) + 1

    # -------------------------------------------------------- stop on request

    # Before its first update, a step has not changed the weights, and the data loader returns the
    # same prompts again, so the run can stop at once and repeat the step later. After the first
    # update, the run finishes the step and saves it before it sends the weights to the engines.
    # In the modes that keep prompts in flight across steps, the checkpoint contains verl's queue.
    # A sampled batch has left that queue, so in these modes the run finishes a sampled step.

    _ending: StopSignals | None = None
    _sampling = False
    _loader_state: Any = None  # the data loader's state at the end of the last step
    _stopped = False

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Allow the run to stop while it waits for a batch.

        After an exception ``_sampling`` stays set, for the checkpoint that follows.
        """
        self._sampling = True
        self.stop_if_requested()  # if the batch is ready, the replay buffer never calls while_sampling
        yield
        self._sampling = False

    def while_sampling(self) -> None:
        """Called by the replay buffer at each poll of an unfinished batch."""
        if self._sampling:
            self.stop_if_requested()
        self.replace_dead_engines()

    def stop_if_requested(self) -> None:
        """Raise StoppedBeforeUpdate if the run was asked to stop and can repeat the step."""
        if self._ending is None or not self._ending.first_signal or self.local_trigger_step > 0:
            return
        if self._sampling or self.trainer_mode == "sync":
            raise StoppedBeforeUpdate

    def save_if_requested(self) -> None:
        """Save the step if the run was asked to stop; call before the weight sync."""
        if self._ending is None:
            return
        if self.trainer_mode == "sync":
            self._loader_state = copy.deepcopy(self.train_dataloader.state_dict())
        if self._ending.first_signal:
            self._save_once(self.global_steps)

    def _save_previous_step(self) -> None:
        if self._sampling and not self._run.rollout.gpus:  # colocated engines occupy the GPUs that the save needs
            syncs: Any = self.checkpoint_manager
            syncs.abort_replicas()
            self.detach_dead_engines()
            self.on_sample_end()
        self.global_steps -= 1
        self._stopped = True
        self._save_once(self.global_steps)
        self._saver.wait()

    def _save_once(self, step: int) -> None:
        """Save the step, unless it is already saved or the run saves no checkpoints."""
        saved = [complete.step for complete in checkpoint.complete_checkpoints(self._run.run.dir / "checkpoints")]
        if step and step not in (*saved, self._saver.begun) and self._run.saved_every:
            self._saver.save(step)

    # ----------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        self._saver.save(self.global_steps)

    def _write_checkpoint(self, folder: str, step: int) -> WorkersSave | None:
        """Let verl write the checkpoint of the current step, into ``folder``."""
        with unwrap_worker_errors():
            super()._save_checkpoint()
        if self._stopped and self._loader_state is not None:
            torch.save(self._loader_state, Path(folder).parent / "data.pt")  # from the end of the saved step
        return WorkersSave(self._saved_groups()) if self._run.checkpoint.asynchronous else None

    def _saved_groups(self) -> list[Any]:
        return [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]

    # ------------------------------------------------- validation, best, curriculum

    def _order_training_rows(self) -> None:
        """Mark validation rows as held out, and apply the curriculum's order to training rows."""
        self.val_dataset.held_out = True
        data, loader = self._run.data, self.train_dataloader
        if data.curriculum == 1:
            return
        self._order = SolveRateOrder(
            len(self.train_dataset),
            seed=self._run.run.seed,
            floor=data.curriculum,
            apart=self._run.train.prompts_per_step,
        )
        self.train_dataloader = StatefulDataLoader(  # a new loader: sampler and batch size are constructor arguments
            dataset=self.train_dataset,
            batch_size=loader.batch_size,
            num_workers=0,
            drop_last=True,
            collate_fn=loader.collate_fn,
            sampler=self._order,
        )
        self.replay_buffer.observe = self._order.observe

    def _resume_best(self, step: int) -> None:
        """Restore the best step and the curriculum at ``step``.

        Repeats the validation of ``step`` if the run was killed before it finished. verl has read
        the data loader's state, which includes the curriculum's.
        """
        self._best = BestKeeper(self._run, step)
        if self._order is not None:
            self.train_dataloader_it = iter(self.train_dataloader)  # applies the state now, not at the first batch
        self.validated = {}
        initial = self._run.validation.before and step == 0
        with open_dict(self.config):
            self.config.trainer.val_before_train = initial or lacks_value(self._run, step)

    @property
    def validates_now(self) -> bool:
        """Whether a validation follows this step. No training prompts may run during it."""
        every: int = self.config.trainer.test_freq
        return every > 0 and self.global_steps % every == 0

    def on_validate_begin(self) -> None:
        self.collect_engine_load()
        if self._writer is None:
            start.begin(self._run.run.dir, "validation")
            self.replay_buffer.writer.drop_rows_after(self.global_steps - 1)
        super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        self.validated = {**metrics, **self.replay_buffer.val_metrics}
        self._best.record_validation(self.global_steps, self.validated)
        return metrics

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.fetch_engine_load()  # discards the load of the validation

    def _stop_without_progress(self, step: int) -> None:
        """Make ``step`` the last one if best.patience is exhausted."""
        if self._best.stopped_early:
            self.total_training_steps = step

    # --------------------------------------------------------------- metrics

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict, **kwargs: Any) -> None:
        """Write the step's row of metrics.jsonl.

        The row has verl's metrics, those of the trajectories, times, rates and memory.
        """
        begin_s = time.perf_counter()
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        buffer = self.replay_buffer
        metrics |= buffer.step_metrics(batch, metrics)
        metrics |= buffer.val_metrics  # of this step's validation; verl drops them
        metrics |= self._best.metrics() if buffer.val_metrics else {}
        metrics |= self._order.metrics() if self._order is not None else {}
        buffer.val_metrics = {}
        self._stop_without_progress(self.global_steps)

        ours = {LOSS_TOKENS: float(metrics[f"actor/{LOSS_TOKENS}"])} if f"actor/{LOSS_TOKENS}" in metrics else {}
        expert_names = [name for name in metrics if name.startswith(f"actor/{EXPERTS}")]
        ours |= {name.removeprefix("actor/"): float(metrics.pop(name)) for name in expert_names}
        ours |= phase_times(timing_raw, metrics.get("behavior/slowest_tool_s", 0.0))
        lengths = sequence_lengths(batch)
        ours |= token_rates(sum(lengths), ours, self._run.cluster.num_gpus)
        if self._shape and "timing_s/update_actor" in ours:
            ours["flops"] = self._shape.train_flops(lengths, self._run.lora)
            if self._peak_flops:
                ours["mfu"] = ours["flops"] / (self._peak_flops * ours["timing_s/update_actor"])
        ours["memory_gib"] = max(self.actor_rollout_wg.peak_memory_gib())
        ours |= self.engine_metrics()
        require_finite(metrics, self.global_steps)
        now_s = time.perf_counter()
        ours["timing_s/between_steps"], ours["timing_s/metrics"] = (
            self._step_began_s - self._row_written_s,
            now_s - begin_s,
        )
        self._row_written_s = now_s
        metrics |= ours
        assert self._writer is not None, "on_train_begin makes the writer before the first step"
        self._writer.write(self.global_steps, row_of(metrics), buffer.traces)
        buffer.traces = []


def row_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics of a step's row, each under one name."""
    row = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    if row.get("critic/score/mean") == row.get("critic/rewards/mean"):  # no KL penalty is in the reward
        row.pop("critic/score/mean", None)
    if "response_length/mean" in row:  # a validation's row lacks it and keeps our name
        row.pop("behavior/response_tokens", None)
    return row


def prompt_uid(step: int, position: int) -> str:
    """The uid of a prompt: the step that submits it and its position. Uids sort in this order."""
    return f"{step:06d}-{position:05d}"


def positions_of_step(step: int) -> list[int]:
    """Positions of those prompts in verl's queue that ``step`` submitted."""
    items = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
    uids = [uid.split("-") for uid, tag in items.items() if tag.get("is_prompt", False)]
    return [int(position) for submitted, position in uids if int(submitted) == step]


def phase_times(timing_raw: Mapping[str, float], tool_wait_s: float) -> dict[str, float]:
    """The ``timing_s/*`` metrics of a step, in seconds, named as in run/metric_table.py.

    ``timing_raw``: verl's timers. ``tool_wait_s``: time that the slowest trajectory waited for
    tools.
    """
    times = {f"timing_s/{name}": float(seconds) for name, seconds in timing_raw.items()}
    phases_s = sum(times.get(f"timing_s/{name}", 0.0) for name in PHASES)
    times["timing_s/other"] = times["timing_s/step"] - phases_s
    if "timing_s/gen" in times:
        times["timing_s/tool_wait"] = min(tool_wait_s, times["timing_s/gen"] - times.get("timing_s/engine_sleep", 0.0))
    return times

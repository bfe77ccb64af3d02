"""What surrounds a step: set-up, prompts, ending on request, checkpoints, validation, metrics.

``step.py`` has the step itself and registers the trainers of the three modes. The engines' restart
is in ``engines.py``. verl truncates its own tracker file before it writes it, and its own clean-up
forgets old checkpoints across restarts, so neither is used.
"""

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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
from retool_mcore.run import checkpoint, saving, start
from retool_mcore.run.best import BestKeeper
from retool_mcore.run.ending import Ended, Ending
from retool_mcore.run.metrics import EXPERTS, MetricWriter, require_finite, token_rates
from retool_mcore.verl import loop_workers
from retool_mcore.verl.checkpoint import WorkersSave, unwrap_worker_errors
from retool_mcore.verl.engines import EngineRestarts
from retool_mcore.verl.keys.ppo import run_config_of
from retool_mcore.verl.replay import clear_orphans, sequence_lengths
from retool_mcore.verl.rl_metrics import EngineLoad, StepClock, row_of
from retool_mcore.verl.run_settings import settings_of_run
from retool_mcore.verl.token_means import LOSS_TOKENS
from retool_mcore.verl.workers import worker_class

TRAIN = "train"  # verl's partition of the transfer queue
PHASES = (  # timers of a step, one after another; together with timing_s/other they add up to timing_s/step
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "save_checkpoint"),
    "update_weights",
)


class StoppedBeforeUpdate(Exception):
    """The step ends before its first update, because the run was asked to end."""


class RlRun(EngineRestarts):
    """Mixed in before one of verl's trainers, whose registered name is ``verl_mode``."""

    verl_mode: str
    updates_per_batch: int  # optimizer updates that learn from one sampled batch
    validated: Mapping[str, Any]  # the last validation's metrics; when the first step begins, the start's
    _order: SolveRateOrder | None = None  # the curriculum's, of the training rows

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl compares the name, not the class
        self._run = settings_of_run(run_config_of(config))
        super().__init__(config)
        platform = get_platform(self._run.run.platform)
        self.updates_per_batch = self._run.train.updates_per_step
        self._saver = saving.Saver(self._run, self._write_checkpoint)
        self._writer: MetricWriter | None = None
        self._clock = StepClock()
        self._load = EngineLoad(self.servers)
        self._starting = True
        values = read_config(self._run.model.path)
        self._shape = shape_of_config(values) if values else None  # None: not in the hub cache
        self._peak_flops = (platform.device.peak_flops or 0.0) * self._run.train_gpus()

    # ---------------------------------------------------------------- set-up

    def _init_resource_pool_mgr(self) -> None:
        """verl's, with our workers in place of verl's; creates the agent loops meanwhile.

        The data sets are read by now, and no worker is built yet.
        """
        super()._init_resource_pool_mgr()
        self._order_training_rows()
        actor = DetachActorWorker if self._run.train.mode == "async" else ActorRolloutRefWorker
        for role in self.role_worker_mapping:
            verls = TrainingWorker if role == Role.Critic else actor
            self.role_worker_mapping[role] = ray.remote(worker_class(verls, self._run.memory))
        start.begin(self._run.run.dir, "workers")
        loop_workers.create_workers(self._run)

    def on_init_end(self) -> None:
        """verl has loaded the checkpoint that ``checkpoint.resume`` chooses, if there is one."""
        clear_orphans()
        self._prompts_restored()
        self._resume_best(self.global_steps)
        super().on_init_end()
        self.replay_buffer.while_waiting = self.while_sampling

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop over steps, until ``train.steps``, a signal, or ``best.patience`` ends it."""
        start.begin(self._run.run.dir, "weights")
        self.replay_buffer.causes = agent_loop_manager.causes
        for group in self._saved_groups():
            group.belong_to(str(self._run.run.dir.absolute()))
        with self._saver, Ending(self._run.checkpoint.grace_s) as self._ending:
            try:
                super().fit(agent_loop_manager)
            except StoppedBeforeUpdate:
                self._save_previous_step()
                raise Ended(self._ending.asked, self._saver.what_is_kept()) from None
            finally:
                if self._writer is not None:
                    self._writer.close()

    def on_train_begin(self) -> None:
        self.replay_buffer.val_metrics = {}  # the start's validation has its own row
        super().on_train_begin()
        self._stop_without_progress(self.global_steps - 1)
        self._writer = MetricWriter(self._run, resumed_step=self.global_steps - 1)
        if self.validated and self.global_steps == 1:
            self._writer.write(0, row_of(self.validated), self.replay_buffer.traces)
        self.replay_buffer.traces = []
        self.replay_buffer.writer.keep_up_to(self.global_steps - 1)
        self._clock.row_written()

    def on_step_begin(self) -> None:
        self._clock.step_begins()
        super().on_step_begin()
        if self._starting:
            start.begin(self._run.run.dir, "steps")
        self._saver.poll()

    # --------------------------------------------------------------- prompts

    _has_fetched = False  # the coming step's prompts are in the queue already
    _named_step = -1  # the step whose prompts were named last
    _named = 0  # how many of that step's prompts have names

    def _fetch_one_gen_batch(self) -> Any:
        """verl's prompts, named by step and place so that a resumed run gives the same names."""
        batch = super()._fetch_one_gen_batch()
        if self._named_step != self.global_steps:
            self._named_step, self._named = self.global_steps, 0
        names = [prompt_name(self.global_steps, self._named + place) for place in range(len(batch))]
        self._named += len(batch)
        batch["uid"] = tu.get_tensordict({"uid": np.array(names, dtype=object)})["uid"]
        return batch

    def prepare_step(self) -> dict[str, Any]:
        """verl's, which submits the step's prompts, unless they are in flight already."""
        if self._has_fetched:
            self._has_fetched = False
            return {}
        return super().prepare_step()

    def submit_next_prompts(self) -> None:
        """Submit the next step's prompts now rather than at its begin."""
        self.global_steps += 1
        try:
            self.prepare_step()
        finally:
            self.global_steps -= 1
        self._has_fetched = True

    def _prompts_restored(self) -> None:
        """After a checkpoint's queue was loaded: a step that was stopped has its prompts in it.

        The step that repeats it fetches none; it would otherwise have a batch more in flight than
        the settings say.
        """
        places = places_of_step(self.global_steps + 1)
        self._has_fetched = bool(places)
        self._named_step, self._named = self.global_steps + 1, max(places, default=-1) + 1

    # -------------------------------------------------------- end on request

    # Until its first update a step has changed nothing but the engines' requests: the weights are
    # those of the step before, and the data loader gives the same prompts again. From then on the
    # step is finished, and saved before its weights go to the engines. Where prompts are in flight
    # over steps they are saved in verl's queue; a sampled batch has left the queue, so there a step
    # is finished once it is sampled.

    _ending: Ending | None = None
    _sampling = False
    _loader_state: Any = None  # of the data loader, at the end of the last step
    _stopped = False

    @contextmanager
    def may_be_interrupted(self) -> Generator[None]:
        """While a batch is awaited; an exception leaves ``_sampling`` set for the save after it."""
        self._sampling = True
        self.stop_if_asked()  # a batch that is ready already would not be waited for
        yield
        self._sampling = False

    def while_sampling(self) -> None:
        """The replay buffer calls it between two looks at an unfinished batch."""
        if self._sampling:
            self.stop_if_asked()
        self.replace_dead_engines()

    def stop_if_asked(self) -> None:
        """Raise StoppedBeforeUpdate if the run was asked to end and the step can be repeated."""
        if self._ending is None or not self._ending.asked or self.local_trigger_step > 0:
            return
        if self._sampling or self.trainer_mode == "sync":
            raise StoppedBeforeUpdate

    def save_if_asked(self) -> None:
        """At the end of a step, before its weights go to the engines."""
        if self._ending is None:
            return
        if self.trainer_mode == "sync":
            self._loader_state = copy.deepcopy(self.train_dataloader.state_dict())
        if self._ending.asked:
            self._save_once(self.global_steps)

    def _save_previous_step(self) -> None:
        if self._sampling and not self._run.rollout.gpus:  # the save needs the devices that sampling has
            syncs: Any = self.checkpoint_manager
            syncs.abort_replicas()
            self.detach_dead_engines()
            self.on_sample_end()
        self.global_steps -= 1
        self._stopped = True
        self._save_once(self.global_steps)
        self._saver.wait()

    def _save_once(self, step: int) -> None:
        """Save the step, unless it is saved already or the run keeps nothing."""
        saved = [each.step for each in checkpoint.complete_checkpoints(self._run.run.dir / "checkpoints")]
        if step and step not in (*saved, self._saver.begun) and self._run.saved_every:
            self._saver.save(step)

    # ----------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        self._saver.save(self.global_steps)

    def _write_checkpoint(self, folder: str, step: int) -> WorkersSave | None:
        """verl's own saving; verl uses the same folder for this step."""
        del step
        with unwrap_worker_errors():
            super()._save_checkpoint()
        if self._stopped and self._loader_state is not None:
            torch.save(self._loader_state, Path(folder).parent / "data.pt")  # as the step before had left it
        return WorkersSave(self._saved_groups()) if self._run.checkpoint.asynchronous else None

    def _saved_groups(self) -> list[Any]:
        return [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]

    # ------------------------------------------------- validation, best, curriculum

    def _order_training_rows(self) -> None:
        """Mark validation rows as held out; give training rows the curriculum's order."""
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
        self.train_dataloader = StatefulDataLoader(  # sampler and batch size are arguments of a loader
            dataset=self.train_dataset,
            batch_size=loader.batch_size,
            num_workers=0,
            drop_last=True,
            collate_fn=loader.collate_fn,
            sampler=self._order,
        )
        self.replay_buffer.observe = self._order.observe

    def _resume_best(self, step: int) -> None:
        """Continue from ``step``: its best step, and its validation again if a kill took that.

        Called when the data loader's state is loaded; the curriculum's state comes with it.
        """
        self._best = BestKeeper(self._run, step)
        if self._order is not None:
            self.train_dataloader_it = iter(self.train_dataloader)  # loads the state now, not at the first batch
        self.validated = {}
        with open_dict(self.config):
            self.config.trainer.val_before_train = self._best.lacks(step) or (self._run.validation.before and step == 0)

    @property
    def validates_now(self) -> bool:
        """Whether a validation follows this step; it has the engines for itself."""
        every: int = self.config.trainer.test_freq
        return every > 0 and self.global_steps % every == 0

    def on_validate_begin(self) -> None:
        self._load.keep()
        if self._writer is None:
            start.begin(self._run.run.dir, "validation")
            self.replay_buffer.writer.keep_up_to(self.global_steps - 1)
        super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        self.validated = {**metrics, **self.replay_buffer.val_metrics}
        self._best.validated(self.global_steps, self.validated)
        return metrics

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self._load.forget()

    def _stop_without_progress(self, step: int) -> None:
        """No step after ``step`` if best.patience is spent."""
        if self._best.given_up:
            self.total_training_steps = step

    # --------------------------------------------------------------- metrics

    def keep_engine_load(self) -> None:
        """Keep how many requests the engines had; before they sleep or take the next step's."""
        self._load.keep()

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: dict, **kwargs: Any) -> None:
        """Write the step's row: verl's metrics, the trajectories', times, rates and memory."""
        self._clock.metrics_begin()
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        buffer = self.replay_buffer
        metrics |= buffer.step_metrics(batch, metrics)
        metrics |= buffer.val_metrics  # of a validation in this step, which verl drops
        metrics |= self._best.metrics() if buffer.val_metrics else {}
        metrics |= self._order.metrics() if self._order is not None else {}
        buffer.val_metrics = {}
        self._stop_without_progress(self.global_steps)

        ours = {LOSS_TOKENS: float(metrics[f"actor/{LOSS_TOKENS}"])} if f"actor/{LOSS_TOKENS}" in metrics else {}
        of_experts = [name for name in metrics if name.startswith(f"actor/{EXPERTS}")]
        ours |= {name.removeprefix("actor/"): float(metrics.pop(name)) for name in of_experts}
        ours |= phase_times(timing_raw, metrics.get("behavior/slowest_tool_s", 0.0))
        lengths = sequence_lengths(batch)
        ours |= token_rates(sum(lengths), ours, self._run.cluster.num_gpus)
        if self._shape and "timing_s/update_actor" in ours:
            ours["flops"] = self._shape.train_flops(lengths, self._run.lora)
            if self._peak_flops:
                ours["mfu"] = ours["flops"] / (self._peak_flops * ours["timing_s/update_actor"])
        ours["memory_gib"] = max(self.actor_rollout_wg.peak_memory_gib())
        ours |= self._load.metrics() | self.engine_metrics()
        require_finite(metrics, self.global_steps)
        metrics |= ours | self._clock.row_written()
        if self._starting:
            metrics |= start.start_times(self._run.run.dir)
            self._starting = False
        assert self._writer is not None, "on_train_begin makes the writer before the first step"
        self._writer.write(self.global_steps, row_of(metrics), buffer.traces)
        buffer.traces = []


def prompt_name(step: int, place: int) -> str:
    """The step that submits the prompt and its place in the step; names sort in that order."""
    return f"{step:06d}-{place:05d}"


def places_of_step(step: int) -> list[int]:
    """The places of the prompts in verl's queue that ``step`` has submitted."""
    items = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
    names = [name.split("-") for name, tag in items.items() if tag.get("is_prompt", False)]
    return [int(place) for submitted, place in names if int(submitted) == step]


def phase_times(timing_raw: Mapping[str, float], tool_wait_s: float) -> dict[str, float]:
    """A step's seconds, verl's own timers among them, by the names of run/metric_table.py.

    ``tool_wait_s``: what the interpreter takes in the slowest trajectory.
    """
    times = {f"timing_s/{name}": float(seconds) for name, seconds in timing_raw.items()}
    phases_s = sum(times.get(f"timing_s/{name}", 0.0) for name in PHASES)
    times["timing_s/other"] = times["timing_s/step"] - phases_s
    if "timing_s/gen" in times:
        times["timing_s/tool_wait"] = min(tool_wait_s, times["timing_s/gen"] - times.get("timing_s/engine_sleep", 0.0))
    return times

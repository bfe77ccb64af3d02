"""Runs RL with verl: writes the settings into the run's folder, starts Ray, runs the trainer."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayError
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.logging_utils import configure_verl_logging
from verl.workers.rollout.replica import RolloutReplicaRegistry

from retool_mcore.config import RlConfig
from retool_mcore.data.chat import end_of_turn
from retool_mcore.data.prompt_format import pin_date, record_format
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.errors import RunError
from retool_mcore.platforms.base import Platform
from retool_mcore.platforms.patches_verl import MASTER_PORT_PATCH
from retool_mcore.platforms.rollout_engines import ENGINES
from retool_mcore.process import exit_on_sigterm, sighup_blocked
from retool_mcore.run.environment import write_environment
from retool_mcore.run.start import begin
from retool_mcore.verl import step  # noqa: F401  registers our trainers with verl
from retool_mcore.verl.agent_loop import LoopManager
from retool_mcore.verl.failure import ProcessWatch, error_for_user
from retool_mcore.verl.keys.rollout import settings_of_run, write_settings
from retool_mcore.verl.keys.tree import ppo_tree, run_config_of
from retool_mcore.verl.ray_cluster import ray_arguments

# Polls its argument for the error of a dead process, and ends the run with that error.
PollUntilError = Callable[[Callable[[], RunError | None]], AbstractContextManager[None]]


class Driver:
    """Runs verl's trainer in this process instead of in a Ray actor.

    verl's own task runner is a Ray actor, which imports the whole trainer a second time. verl's
    nsys option profiles the workers but not this process, which uses no GPU.
    """

    has_ray = False

    def run(self, config: DictConfig) -> None:
        self.has_ray = True
        exit_on_sigterm()  # replaces the handler that Ray installed
        settings = settings_of_run(run_config_of(config))
        begin(settings.run.dir, "driver")
        use_few_threads()
        MASTER_PORT_PATCH.apply()
        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        # The queue and the engine start while verl builds the training workers. Not before Ray
        # has started: verl sets SGLANG_USE_CPU_ENGINE while it imports SGLang, and Ray's processes
        # would inherit it.
        pool = ThreadPoolExecutor(2)
        queue = pool.submit(tq.init, config.transfer_queue)
        try:
            start_engines(settings, config, pool)
            trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
            trainer.queue_started = queue
            trainer.init()
            begin(settings.run.dir, "agent_loops")
            services = (trainer.get_llm_client(), trainer.get_teacher_client(), trainer.get_reward_handles())
            trainer.fit(LoopManager.create(config, *services))
        finally:
            stop_starting(queue)
            pool.shutdown()
            tq.close()

    def options(self, **_: Any) -> Driver:
        """Imitate this method of a Ray actor class; see ``remote``."""
        return self

    def remote(self) -> Any:
        """Imitate a Ray actor class; ``run_ppo`` calls ``run.remote(config)`` on the result."""
        return SimpleNamespace(run=SimpleNamespace(remote=lambda config: ray.put(self.run(config))))


def use_few_threads() -> None:
    """Let torch use at most half of the cores in this process, and at most 8.

    The engines and workers are busy on the others, and a thread per core would wait for them: the
    mismatch metrics of a step of 0.5B took 1.4 s with 16 threads on 16 cores, and 0.1 s with 8.
    """
    torch.set_num_threads(max(1, min(torch.get_num_threads() // 2, 8)))


def stop_starting(queue: Future[Any]) -> None:
    """End the start of the transfer queue, if it has not finished.

    Ray must not shut down while another thread calls it: the process would hang or exit with 1. The
    thread waits for actors, which Ray may be unable to place, so they are killed.
    """
    while not queue.done():
        for actor in ray.util.list_named_actors(all_namespaces=True):
            with suppress(ValueError):  # it has died
                ray.kill(ray.get_actor(**actor))
        wait([queue], timeout=0.2)


def start_engines(settings: RlConfig, config: DictConfig, pool: ThreadPoolExecutor) -> None:
    """Import the engine in ``pool``, and let verl wait for it when it needs the replicas' class."""
    name = config.actor_rollout_ref.rollout.name
    replica = pool.submit(import_engine, settings, config, RolloutReplicaRegistry._registry[name])

    @cache  # verl calls it twice in mode "async"
    def load() -> type:
        begin(settings.run.dir, "engines")
        return replica.result()

    RolloutReplicaRegistry.register(name, load)


def import_engine(settings: RlConfig, config: DictConfig, load: Callable[[], type]) -> type:
    """Import the engine and return its replica class: ours for SGLang, else verl's.

    Also start the processes of our servers, which then import SGLang. Each import takes seconds.
    """
    rollout = config.actor_rollout_ref.rollout  # may differ from our settings by [verl_overrides]
    replica = load()  # also installs what importing verl's SGLang modules needs
    if not ENGINES[rollout.name].our_server:
        return replica
    from retool_mcore.verl.sglang_server import MeasuredReplica, create_servers

    if settings.cluster.nodes == 1:
        gpus = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        create_servers(settings.serving_gpus() // gpus)
    return MeasuredReplica


def run(config: RlConfig, platform: Platform, resume_from: Path | None, watch: PollUntilError) -> None:
    """Start or join Ray and run to ``train.steps``; ``watch`` ends the run if a process dies.

    Writes our settings and verl's into the run's folder. Re-raises a worker's ReToolError. Raises
    RunError if Ray does not start, or if a process of the run dies or fails.
    """
    tree = ppo_tree(config, platform, resume_from)
    write_settings(config)
    _record_prompt_format(config)
    (config.run.dir / "verl.yaml").write_text(OmegaConf.to_yaml(tree, resolve=True), encoding="utf-8")
    write_environment(config.run.dir, platform)
    with ray_arguments(config) as arguments:
        with open_dict(tree):
            tree.ray_kwargs.ray_init = {**tree.ray_kwargs.get("ray_init", {}), **arguments}
        _run(config, tree, watch)


def _record_prompt_format(config: RlConfig) -> None:
    """Record how the run renders problems, and the date in its prompts, in the run's folder."""
    day = pin_date(config.run.dir, config.model.path)
    tokenizer = tokenizer_of(config.model, day=day)
    record_format(config.run.dir, config.data_files[0][1], end_of_turn(tokenizer), config.rollout.protocol)


def _run(config: RlConfig, tree: DictConfig, watch: PollUntilError) -> None:
    begin(config.run.dir, "ray")
    driver = Driver()
    try:
        with (
            watch(ProcessWatch(config).error),
            sighup_blocked(),
        ):  # SIGHUP would end Ray's processes before the driver has saved
            run_ppo(tree, task_runner_class=driver)
    except BaseException as error:
        if isinstance(error, RayError):
            traceback.print_exception(error)  # to the run's log
        traceback.clear_frames(error.__traceback__)  # closes verl's progress bar, whose last output goes to the log
        if isinstance(error, RayError):
            raise error_for_user(error, config) from error
        if isinstance(error, Exception) and config.cluster.nodes == 1 and not driver.has_ray:
            log = config.run.dir / "logs" / "rl.log"
            raise RunError(f"Ray did not start: {str(error).rstrip('.')}. See {log}. Run the command again.") from error
        raise
    finally:
        ray.shutdown()

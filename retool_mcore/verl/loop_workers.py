"""Creates the agent-loop workers while the training workers build the model.

verl creates the agent-loop workers last. Each then imports verl and SGLang and opens the sandbox
before its first prompt, which took 22 s of a first validation of 40 s on an H100 node. Here they
start earlier and get verl's settings later, when verl creates its agent-loop manager.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from retool_mcore.config import RlConfig
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.platforms.base import get_platform
from retool_mcore.verl.agent_loop import causes, sandbox_of
from retool_mcore.verl.run_settings import settings_of_run

logger = logging.getLogger(__name__)

# verl exports its worker as a Ray actor class; a subclass needs the plain class behind it.
_remote: Any = AgentLoopWorkerTQ
_Worker: Any = _remote.__ray_actor_class__


class CountCauses(logging.Handler):
    """Counts exceptions that verl only logs as causes of dropped trajectories."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            first = error.cause if isinstance(error, RayTaskError) else error  # RayTaskError: from a reward worker
            causes[f"{type(first).__name__}: {first}"] += 1


class LoopWorker(_Worker):
    """verl's agent-loop worker, created before verl's settings exist."""

    def __init__(self) -> None:
        """Do nothing; ``construct`` calls verl's constructor later."""

    async def warm_up(self, run_config: str) -> None:
        """Open the sandbox and import sglang_server, which unpickling an engine's handle needs."""
        config = settings_of_run(run_config)
        if get_platform(config.run.platform).rollout.engine.own_server:
            importlib.import_module("retool_mcore.verl.sglang_server")
        if sandbox := sandbox_of(run_config):
            try:
                await sandbox.open()
            except SandboxUnavailable as error:  # each tool call retries, and counts as an outage if that fails
                logger.warning("the sandbox could not be opened yet: %s", error)

    def construct(self, *settings: Any) -> None:
        super().__init__(*settings)
        logging.getLogger(AgentLoopManagerTQ.__module__).addHandler(CountCauses(logging.ERROR))

    async def take_causes(self) -> dict[str, int]:
        """How many trajectories each exception or outage dropped since the last call."""
        taken = dict(causes)
        causes.clear()
        return taken


_created: list[tuple[Any, Any]] = []  # each worker, and the Ray reference of its warm-up call


def create_workers(config: RlConfig) -> None:
    """Create the agent-loop workers, spread over the run's nodes round-robin as verl does."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    for number in range(config.rollout.agent_workers):
        node = NodeAffinitySchedulingStrategy(node_id=nodes[number % len(nodes)], soft=True)
        worker: Any = ray.remote(LoopWorker).options(scheduling_strategy=node).remote()
        _created.append((worker, worker.warm_up.remote(str(config.run.config_file))))


class LoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, with the workers of ``create_workers``."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> LoopManager:
        manager = cls(*args, **kwargs)
        ray.get([warm_up for _, warm_up in _created])
        manager.agent_loop_workers = [worker for worker, _ in _created]
        settings = (manager.config, manager.llm_client, manager.teacher_client, manager.reward_loop_worker_handles)
        ray.get([worker.construct.remote(*settings) for worker in manager.agent_loop_workers])
        _created.clear()
        return manager

    def causes(self) -> Counter[str]:
        """The sum of ``take_causes`` over all workers."""
        taken = ray.get([worker.take_causes.remote() for worker in self.agent_loop_workers])
        return sum(map(Counter, taken), Counter())

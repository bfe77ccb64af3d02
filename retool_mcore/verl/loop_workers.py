"""The processes of the agent loops, started while the model is built.

verl makes them when everything else is there, and they then import verl, SGLang and the sandbox's
warm image before the first prompt: 22 s of the 40 s of a first validation on an H100 node. An early
worker has this behind it by then. It gets its settings when verl asks for it.
"""

import asyncio
import logging
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from retool_mcore.config import RlConfig
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.verl.agent_loop import sandbox_of
from retool_mcore.verl.router import import_server_class
from retool_mcore.verl.run_settings import settings_of_run
from retool_mcore.verl.without_megatron import leave_out, put_off

leave_out()
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ  # noqa: E402

logger = logging.getLogger(__name__)

# verl exports its worker as a Ray actor class; a subclass needs the plain class behind it.
_remote: Any = AgentLoopWorkerTQ
_Worker: Any = _remote.__ray_actor_class__


class EarlyLoops(_Worker):
    """A worker of the agent loops that exists before verl's settings do."""

    def __init__(self) -> None:
        """Nothing yet: ``construct`` is verl's constructor."""

    async def warm_up(self, run_config: str) -> None:
        """Import what the first answer of an engine would import, and open the sandbox."""
        config = settings_of_run(run_config)
        import_server_class(config)
        if sandbox := sandbox_of(run_config):
            try:
                await sandbox.open()
            except SandboxUnavailable as error:  # each call opens it again, and counts as an outage if that fails
                logger.warning("the sandbox could not be opened yet: %s", error)

    def construct(self, config: Any, *settings: Any) -> None:
        with put_off(config.actor_rollout_ref.model.external_lib):
            super().__init__(config, *settings)


_waiting: list[tuple[Any, Any]] = []  # workers, and the end of their warming up


def start_early(config: RlConfig) -> None:
    """Start the workers of a run, spread over its nodes as verl spreads them."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    for number in range(config.rollout.agent_workers):
        node = NodeAffinitySchedulingStrategy(node_id=nodes[number % len(nodes)], soft=True)
        worker: Any = ray.remote(EarlyLoops).options(scheduling_strategy=node).remote()
        _waiting.append((worker, worker.warm_up.remote(str(config.run.config_file))))


class LoopManager(AgentLoopManagerTQ):
    """verl's manager of the agent loops, with the early workers in place of its own."""

    async def _init_agent_loop_workers(self) -> None:
        settings = (self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles)
        self.agent_loop_workers = [worker for worker, _ in _waiting]
        warm = [done for _, done in _waiting]
        _waiting.clear()
        await asyncio.gather(*warm, *(worker.construct.remote(*settings) for worker in self.agent_loop_workers))

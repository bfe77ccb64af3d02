"""verl's SGLang replica with a seed of its own, that can be started again, and early servers.

verl makes a replica's server when Megatron has built the model, and that process then imports
SGLang and verl before it does anything: 23 s on an H200 node. An early server has this behind it
by then. It gets its settings when verl asks for the server.

Import it through ``rl_metrics.measure_sglang``, which first has verl install what its SGLang
modules need.
"""

import asyncio
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutMode

from retool_mcore.config import RlConfig
from retool_mcore.platforms.absent import MEGATRON, absent
from retool_mcore.platforms.engine_key import KEY_PATCH
from retool_mcore.platforms.rollout_engines import SGLANG
from retool_mcore.verl.keys.rollout import trajectories_in_flight
from retool_mcore.verl.run_settings import settings_of_run
from retool_mcore.verl.sglang_server import MeasuredServer, actor_class

with absent(MEGATRON):
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

RAY_CONCURRENCY = 1000  # Ray's own, if that many requests are enough
GONE_PAUSE_S = 0.5


class MeasuredReplica(SGLangReplica):
    """verl's n-th replica, whose random numbers start from the run's seed + n.

    run.seed reaches all replicas as the same engine_kwargs.sglang.random_seed. With the same seed,
    two engines would give one prompt the same responses where its group is spread over both.
    """

    def __init__(self, replica_rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, *args, **kwargs)
        self.server_class = _waiting.pop(replica_rank, None) or actor_class(MeasuredServer)
        self.config = copy.deepcopy(self.config)  # one object for all replicas
        self.config.engine_kwargs[SGLANG.name][SGLANG.seed_argument] += replica_rank

    @property
    def max_concurrency(self) -> int:
        """The number of requests that Ray hands one server at the same time."""
        return requests_at_once(settings_of_run(str(Path(self.config.router_config_path).with_name("config.toml"))))

    async def launch_servers(self) -> None:
        await super().launch_servers()
        await asyncio.gather(*(worker.__ray_call__.remote(_send_key) for worker in self.workers))

    async def relaunch(self) -> None:
        """Start the servers again on the same devices, under the same names, with new ports.

        Of a replica over several nodes, those that are left are ended first. Raises Ray's error of
        a server that does not start.
        """
        for server in self.servers:
            ray.kill(server)
            await _gone(server)
        self.servers.clear()
        self.server_class = actor_class(MeasuredServer)  # an early one is for the first start
        await self.launch_servers()
        if self.rollout_mode == RolloutMode.STANDALONE:
            await asyncio.gather(*(worker.__ray_call__.remote(_forget_engine) for worker in self.workers))


def requests_at_once(config: RlConfig) -> int:
    """All that training can have in flight, so that none waits in Ray, where nobody counts it.

    The engine starts rollout.max_running_requests of them and counts the others in engine/queued.
    More, as a validation may have, wait in Ray, and calls that control the engine do not.
    """
    return max(RAY_CONCURRENCY, trajectories_in_flight(config))


async def _gone(server: Any) -> None:
    """Return when Ray has noticed that the actor is dead, and its name is free."""
    while True:
        try:
            await server.until_it_dies.remote()
        except ActorUnavailableError:
            await asyncio.sleep(GONE_PAUSE_S)
        except RayActorError:
            return


def _send_key(_: Any) -> None:
    """In a process that sends weights to the servers: with their key from now on."""
    KEY_PATCH.apply()


def _forget_engine(worker: CheckpointEngineWorker) -> None:
    """In the process beside an engine: look the server up anew for the next weights."""
    worker.server_adapter._engine = None


class LateSettings(MeasuredServer):
    """A server that exists before its settings do."""

    def __init__(self) -> None:
        """Nothing yet: ``construct`` is verl's constructor."""

    def construct(self, environment: Mapping[str, str], **settings: Any) -> None:
        os.environ.update(environment)
        super().__init__(**settings)


class EarlyServer:
    """One early server, in place of the actor class that verl makes a server of."""

    def __init__(self, replica_rank: int, requests: int) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        environment = {**dict.fromkeys(get_platform().ray_noset_envvars(), "1"), **get_platform().rollout_env_vars()}
        self._actor: Any = (
            actor_class(LateSettings)
            .options(
                name=f"sglang_server_{replica_rank}_0",  # verl's workers look it up
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": environment},
                max_concurrency=requests,
            )
            .remote()
        )
        self._environment: Mapping[str, str] = {}

    def options(self, *, runtime_env: Mapping[str, Any], **_: Any) -> Self:
        """As of a Ray actor class; see ``remote``."""
        self._environment = runtime_env["env_vars"]
        return self

    def remote(self, **settings: Any) -> Any:
        """The actor, which has these settings from now on."""
        ray.get(self._actor.construct.remote(self._environment, **settings))
        return self._actor


_waiting: dict[int, EarlyServer] = {}  # by replica


def start_early(config: RlConfig) -> None:
    """Start the servers of a run on one node.

    Of several it is not known yet where an engine will be.
    """
    if config.cluster.nodes == 1:
        for replica_rank in range(config.serving_gpus() // config.rollout.engine_tp):
            _waiting[replica_rank] = EarlyServer(replica_rank, requests_at_once(config))

"""verl's SGLang replica with its own seed and a restart.

Import it through ``runner.register_engine``, which first has verl install what its SGLang
modules need.
"""

import asyncio
import copy
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from retool_mcore.config import RlConfig
from retool_mcore.platforms.patches_verl import KEY_PATCH
from retool_mcore.platforms.rollout_engines import SGLANG
from retool_mcore.verl.keys.rollout import trajectories_in_flight
from retool_mcore.verl.run_settings import settings_of_run
from retool_mcore.verl.sglang_server import MeasuredServer, actor_class

RAY_CONCURRENCY = 1000  # Ray's own, if that many requests are enough
GONE_PAUSE_S = 0.5


class MeasuredReplica(SGLangReplica):
    """verl's n-th replica, whose random numbers start from the run's seed + n.

    run.seed reaches all replicas as the same engine_kwargs.sglang.random_seed. With the same seed,
    two engines would give one prompt the same responses where its group is spread over both.
    """

    def __init__(self, replica_rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, *args, **kwargs)
        self.server_class = actor_class(MeasuredServer)
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

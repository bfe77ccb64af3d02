"""Sends all turns of a trajectory to the same engine, whose cache holds the earlier turns.

verl's own router remembers the last 10,000 trajectories, but a step of the paper has 16,384 in
flight. If the router forgot a trajectory between two turns, whichever engine is free would prefill
it from its beginning.

Ray imports an engine's class with its handle, which takes 20 s. So the router's process is created
while the training workers build the model, and gets its engines later.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from retool_mcore.config import RlConfig
from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.engine import EngineUnavailable
from retool_mcore.verl.keys.rollout import trajectories_in_flight
from retool_mcore.verl.run_settings import RUN_CONFIG, settings_of_run


class Router(GlobalRequestLoadBalancer):
    """verl's router, with room for all trajectories in flight.

    verl finds it through the run's ``router.yaml``, as ``ROUTER``.
    """

    def __init__(self, servers: dict[str, Any], settings: Mapping[str, Any]) -> None:
        run = settings_of_run(settings[RUN_CONFIG])
        super().__init__(servers, max_cache_size=trajectories_in_flight(run))

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """verl's. Raises EngineUnavailable while every engine is being restarted."""
        if not self.get_all_servers():
            raise EngineUnavailable("every engine of the run has died")
        return super().acquire_server(request_id)


class EarlyRouter(Router):
    """A router that exists before its engines."""

    def __init__(self) -> None:
        """Does nothing: ``construct`` calls the router's constructor."""

    def warm_up(self, run_config: str) -> None:
        import_engine_class(settings_of_run(run_config))

    def construct(self, servers: dict[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(servers, settings)


ROUTER: Any = ray.remote(Router)  # verl calls its ``remote``


def create_router(config: RlConfig) -> None:
    """Create the router that verl's first call with engines gets."""
    actor: Any = ray.remote(EarlyRouter).remote()
    actor.warm_up.remote(str(config.run.config_file))
    verls = ROUTER.remote

    def early(servers: dict[str, Any], settings: Mapping[str, Any]) -> Any:
        if not servers:
            return verls(servers, settings)
        ROUTER.remote = verls
        ray.get(actor.construct.remote(servers, settings))
        return actor

    ROUTER.remote = early


def import_engine_class(config: RlConfig) -> None:
    """Import the class of the run's engines, as Ray does with a handle of one."""
    if get_platform(config.run.platform).rollout.engine.own_server:
        importlib.import_module("retool_mcore.verl.sglang_server")

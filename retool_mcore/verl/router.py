"""Sends all turns of a trajectory to the same engine, whose cache holds the earlier turns.

verl's own router remembers the last 10,000 trajectories, but a step of the paper has 16,384 in
flight. If the router forgot a trajectory between two turns, whichever engine is free would prefill
it from its beginning.
"""

from collections.abc import Mapping
from typing import Any

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

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


ROUTER: Any = ray.remote(Router)  # verl calls its ``remote``

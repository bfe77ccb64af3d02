"""Which engine samples a trajectory's turns: always the same one, whose cache holds the turns
before.

verl's own router remembers the last 10,000 trajectories; a step of the paper has 16,384 in flight,
and those that it forgets in between two turns would be prefilled from their beginning, on whichever
engine is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


class Router(GlobalRequestLoadBalancer):
    """verl's, with room for all trajectories in flight. verl finds it by the run's ``router.yaml``."""

    def __init__(self, servers: dict[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(servers, max_cache_size=int(settings["trajectories"]))

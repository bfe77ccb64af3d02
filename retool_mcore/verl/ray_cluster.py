"""Which Ray cluster a run uses: its own on one node, the launch script's otherwise."""

from __future__ import annotations

import os
from typing import Any

STARTED_FOR_RUN = "RETOOL_RAY_ADDRESS"  # launch/nodes.sh sets it to the RAY_ADDRESS that it sets


def ray_init_keys(nodes: int) -> dict[str, Any]:
    """Arguments of ``ray.init`` beside those in the settings; changes RAY_ADDRESS.

    Ray connects to whatever RAY_ADDRESS or /tmp/ray/ray_current_cluster names. On one node that is
    some other user's or program's cluster, or a dead one, unless our script started it.
    """
    address = os.environ.get("RAY_ADDRESS")
    if nodes > 1 or (address and address == os.environ.get(STARTED_FOR_RUN)):
        return {}
    os.environ.pop("RAY_ADDRESS", None)  # or the run's processes inherit it
    return {"address": "local"}

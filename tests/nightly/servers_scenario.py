"""Run by test_servers.py in its own process: our SGLang server under Ray.

Stubs replace what needs a model. Prints one JSON object in its last line.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import ray

from retool_mcore.platforms import get_platform


class Gate:
    """SGLang's tokenizer manager: it ends all requests when it is asked to abort them."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def pause_generation(self, _: Any) -> None:
        self.opened.set()


def busy_server(server: type) -> type:
    """Our server with requests that last until they are aborted, in place of SGLang's."""

    class Busy(server):
        def __init__(self) -> None:
            self.node_rank, self.started, self._polls = 0, 0, []

        async def launch_server(self) -> None:
            self.tokenizer_manager = Gate()

        async def generate(self) -> None:
            self.started += 1
            self._polls.append((self.started, 0))
            await self.tokenizer_manager.opened.wait()

    return Busy


def controlled(server: Any, requests: int) -> int:
    """How many of the requests had started when all were aborted."""
    ray.get(server.launch_server.remote())
    calls = [server.generate.remote() for _ in range(requests)]
    started = 0
    while (polls := ray.get(server.pop_load_polls.remote(), timeout=300)) or not started:  # until no more of them start
        started = max([started, *(running for running, _ in polls)])
        time.sleep(1.0)
    ray.get(server.abort_all_requests.remote(), timeout=300)
    ray.get(calls, timeout=300)
    return started


def main() -> dict[str, Any]:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.get("sglang")
    from retool_mcore.verl import sglang_server

    busy = busy_server(sglang_server.MeasuredServer)
    room = object.__new__(sglang_server.MeasuredReplica).max_concurrency
    server: Any = ray.remote(busy).options(max_concurrency=room).remote()
    return {"started of 1536": controlled(server, 1536), "room": room}


if __name__ == "__main__":
    get_platform("cpu").activate()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found = main()
    ray.shutdown()
    print(json.dumps(found))

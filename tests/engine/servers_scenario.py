"""Run by test_servers.py in its own process: our SGLang server and agent loops under Ray.

Stubs replace what needs a model. Prints one JSON object in its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.network import engine_key

PATHS = ("/update_weights_from_tensor", "/generate", "/abort_request", "/release_memory_occupation")


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
    while (polls := ray.get(server.take_polls.remote(), timeout=300)) or not started:  # until no more of them start
        started = max([started, *(running for running, _ in polls)])
        time.sleep(1.0)
    ray.get(server.abort_all_requests.remote(), timeout=300)
    ray.get(calls, timeout=300)
    return started


def seeds_of(replica: Any) -> list[int]:
    """Of three replicas that verl makes with one configuration, and then of the configuration."""
    shared = SimpleNamespace(engine_kwargs={"sglang": {"random_seed": 7}})
    replica.SGLangReplica.__init__ = lambda self, replica_rank, config: setattr(self, "config", config)
    made = [replica.MeasuredReplica(rank, shared) for rank in range(3)]
    return [each.engine_kwargs["sglang"]["random_seed"] for each in (*(one.config for one in made), shared)]


def answers(module: Any) -> dict[str, list[int]]:
    """What SGLang's server says to a request for each path: without the run's key, and with it."""
    from starlette.testclient import TestClient

    async def launched(self: Any) -> None:
        """Nothing: the model is not there."""

    with (
        mock.patch.object(module.SGLangHttpServer, "launch_server", launched),
        mock.patch.dict(os.environ, RAY_AUTH_TOKEN="a secret"),
    ):
        server = object.__new__(module.MeasuredServer)
        server.node_rank = 1  # of the first one, requests are counted
        asyncio.run(server.launch_server())
        client = TestClient(module.app, raise_server_exceptions=False)
        keys = [{}, {"Authorization": "Bearer a guess"}, {"Authorization": f"Bearer {engine_key()}"}]
        return {path: [client.post(path, json={}, headers=key).status_code for key in keys] for path in PATHS}


def loops(folder: str) -> dict[str, Any]:
    """The agent loops' worker that is created first, and what verl then gives it."""
    from retool_mcore.verl import agent_loop
    from retool_mcore.verl.keys.rollout import write_settings

    class Reporting(agent_loop.LoopWorker):
        def construct(self, tree: Any, *more: Any) -> None:
            self.settings = [OmegaConf.to_container(tree), *more]

        def report(self) -> list[Any]:
            from retool_mcore.verl.agent_loop import sandbox_of

            sandbox = sandbox_of(str(config.run.config_file))
            assert sandbox is not None
            return [
                self.settings,
                bool(sandbox.level),  # which raises before the sandbox is open
                "retool_mcore.verl.sglang_server" in sys.modules,
            ]

    config = load_config(RlConfig, "configs/rl_tiny_cpu.toml", [f"run.root={folder}", "rollout.agent_workers=1"])
    config.run.dir.mkdir()
    write_settings(config)
    agent_loop.LoopWorker = Reporting
    agent_loop.create_workers(config)
    router = agent_loop.create_router(config, full_determinism=False)
    [(early, _)] = agent_loop._created
    tree = OmegaConf.create({"actor_rollout_ref": {"rollout": {}, "model": {}}})
    manager = agent_loop.LoopManager.create(tree, "client", None, [])
    [worker] = manager.agent_loop_workers
    imported = ray.get(router.__ray_call__.remote(lambda _: "retool_mcore.verl.sglang_server" in sys.modules))
    ray.get(router.add_servers.remote({"address": early}))
    address, server = ray.get(router.acquire_server.remote("a trajectory"))
    return {
        "same": worker._actor_id == early._actor_id,
        "report": ray.get(worker.report.remote()),
        "router": [imported, address, server._actor_id == early._actor_id],
    }


def early_server(module: Any) -> dict[str, Any]:
    """The server that verl gets for a name whose process runs already, and for another name."""

    class Recording(module.MeasuredServer):
        def construct(self, **arguments: Any) -> None:
            self.arguments = arguments

        def recorded(self) -> dict[str, Any]:
            return self.arguments

    module.MeasuredServer = Recording
    module.create_servers(1)
    [early] = module._early.values()
    options = {"name": "sglang_server_0_0", "max_concurrency": 4}
    first = module.ServerClass().options(**options).remote(replica_rank=0)
    other = module.ServerClass().options(**{**options, "name": "sglang_server_1_0"}).remote(replica_rank=1)
    return {
        "same": [server._actor_id == early._actor_id for server in (first, other)],
        "constructed": ray.get([server.recorded.remote() for server in (first, other)]),
    }


def main() -> dict[str, Any]:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.get("sglang")
    from retool_mcore.verl import sglang_server

    busy = busy_server(sglang_server.MeasuredServer)
    room = object.__new__(sglang_server.MeasuredReplica).max_concurrency
    server: Any = ray.remote(busy).options(max_concurrency=room).remote()
    found: dict[str, Any] = {"started of 1536": controlled(server, 1536), "room": room}
    found |= {"seeds": seeds_of(sglang_server), "answers": answers(sglang_server)}
    found["early"] = early_server(sglang_server)
    with tempfile.TemporaryDirectory() as folder:
        return {**found, "loops": loops(folder)}


if __name__ == "__main__":
    get_platform("cpu").activate()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found = main()
    ray.shutdown()
    print(json.dumps(found))

"""Run by test_servers.py in its own process: our SGLang server and agent loops under Ray.

Stubs replace what needs a model. Prints one JSON object in its last line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayError

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform


def seeds_of(replica: Any) -> list[int]:
    """Of three replicas that verl makes with one configuration, and then of the configuration."""
    shared = SimpleNamespace(engine_kwargs={"sglang": {"random_seed": 7}})
    replica.SGLangReplica.__init__ = lambda self, replica_rank, config: setattr(self, "config", config)
    made = [replica.MeasuredReplica(rank, shared) for rank in range(3)]
    return [each.engine_kwargs["sglang"]["random_seed"] for each in (*(one.config for one in made), shared)]


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


def early_servers(module: Any) -> dict[str, Any]:
    """The servers that verl gets for a name whose process runs already and for another name.

    verl's constructor refuses the arguments of both.
    """
    module.create_servers(1)
    [early] = module._early.values()
    servers = [
        module.ServerClass().options(name=f"sglang_server_{place}_0", max_concurrency=4).remote(unknown=place)
        for place in (0, 1)
    ]
    errors: list[str] = []
    for server in servers:
        try:
            ray.get(server.launch_server.remote())
        except RayError as error:
            errors.append(str(error))
    return {"early": [server._actor_id == early._actor_id for server in servers], "errors": errors}


def main() -> dict[str, Any]:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.get("sglang")
    from retool_mcore.verl import sglang_server

    found: dict[str, Any] = {"seeds": seeds_of(sglang_server), "servers": early_servers(sglang_server)}
    with tempfile.TemporaryDirectory() as folder:
        return {**found, "loops": loops(folder)}


if __name__ == "__main__":
    get_platform("cpu").activate()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found = main()
    ray.shutdown()
    print(json.dumps(found))

"""Run by test_early_servers.py in its own process: servers of SGLang that start before the model.

A stub takes the place of SGLang's server, which needs a model to construct. Prints one JSON object
in its last line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import ray
from ray.util import list_named_actors

from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform


class Stub:
    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def construct(self, environment: Mapping[str, str], **settings: Any) -> None:
        os.environ.update(environment)
        self.settings = settings

    def told(self) -> list[Any]:
        return [self.settings, os.environ.get("RETOOL_TEST")]


def early_of(replica: Any, *words: str) -> list[int]:
    """Start them; returns which replicas have one, by the names that verl's workers look up."""
    replica._waiting.clear()
    for name in _named():  # of the call before
        ray.kill(ray.get_actor(name))
    while _named():
        time.sleep(0.05)
    replica.start_early(load_config(RlConfig, "configs/rl_tiny_cpu.toml", list(words)))
    assert len(_named()) == len(replica._waiting)
    return sorted(int(name.split("_")[2]) for name in _named())


def seeds_of(replica: Any) -> list[int]:
    """Of three replicas that verl makes with one configuration, and then of the configuration."""
    shared = SimpleNamespace(engine_kwargs={"sglang": {"random_seed": 7}})
    replica.SGLangReplica.__init__ = lambda self, replica_rank, config: setattr(self, "config", config)
    replica._waiting.clear()
    made = [replica.MeasuredReplica(rank, shared) for rank in range(3)]
    return [each.engine_kwargs["sglang"]["random_seed"] for each in (*(one.config for one in made), shared)]


def _named() -> list[str]:
    return [name for name in list_named_actors() if name.startswith("sglang_server_")]


def main() -> dict[str, Any]:
    from verl.workers.rollout import replica as verls

    verls._load_sglang()
    from retool_mcore.verl import sglang_replica as ours

    ours.LateSettings = Stub
    found: dict[str, Any] = {
        "async": early_of(ours, "train.mode=async", "rollout.gpus=4", "rollout.engine_tp=2", "cluster.gpus_per_node=8"),
        "two_nodes": early_of(ours, "cluster.nodes=2"),
        "one_node": early_of(ours, "cluster.gpus_per_node=2"),
    }
    named = ray.get_actor("sglang_server_1_0")
    before = ray.get(named.told.remote())
    server = ours._waiting.pop(1).options(runtime_env={"env_vars": {"RETOOL_TEST": "here"}}, name="unused")
    server = server.remote(replica_rank=1)
    same = server._actor_id == named._actor_id
    found |= {"before": before, "after": ray.get(server.told.remote()), "same": same}
    return {**found, "seeds": seeds_of(ours)}


if __name__ == "__main__":
    get_platform("cpu").activate()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found = main()
    ray.shutdown()
    print(json.dumps(found))

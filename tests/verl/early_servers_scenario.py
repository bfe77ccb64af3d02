"""Run by test_early_servers.py in its own process: servers of SGLang that start before the model.

A stub takes the place of SGLang's server, which needs a model to construct. Prints one JSON object
in its last line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import ray

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
    replica._waiting.clear()
    replica.start_early(load_config(RlConfig, "configs/rl_tiny_cpu.toml", list(words)))
    return sorted(replica._waiting)


def main() -> dict[str, Any]:
    from verl.workers.rollout import replica as verls

    verls._load_sglang()
    from retool_mcore.verl import sglang_replica as ours

    ours.LateSettings = Stub
    found: dict[str, Any] = {
        "async": early_of(ours, "train.mode=async", "rollout.gpus=1", "cluster.gpus_per_node=2"),
        "two_nodes": early_of(ours, "cluster.nodes=2"),
        "one_node": early_of(ours, "cluster.gpus_per_node=2"),
    }
    named = ray.get_actor("sglang_server_1_0")
    before = ray.get(named.told.remote())
    server = ours._waiting.pop(1).options(runtime_env={"env_vars": {"RETOOL_TEST": "here"}}, name="unused")
    server = server.remote(replica_rank=1)
    same = server._actor_id == named._actor_id
    return {**found, "before": before, "after": ray.get(server.told.remote()), "same": same}


if __name__ == "__main__":
    get_platform("cpu").activate()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found = main()
    ray.shutdown()
    print(json.dumps(found))

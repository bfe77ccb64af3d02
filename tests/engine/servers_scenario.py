"""Run by test_servers.py in its own process, because verl puts stubs of vLLM into it."""

import json
from types import SimpleNamespace

from retool_mcore.platforms import get_platform


def seeds() -> list[int]:
    """Of three replicas that verl makes with one configuration, and then of the configuration."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.get("sglang")
    from retool_mcore.verl import sglang_server

    shared = SimpleNamespace(engine_kwargs={"sglang": {"random_seed": 7}})
    sglang_server.SGLangReplica.__init__ = lambda self, replica_rank, config: setattr(self, "config", config)
    made = [sglang_server.MeasuredReplica(rank, shared) for rank in range(3)]
    return [each.engine_kwargs["sglang"]["random_seed"] for each in (*(one.config for one in made), shared)]


if __name__ == "__main__":
    get_platform("cpu").activate()
    print(json.dumps(seeds()))

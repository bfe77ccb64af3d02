"""verl's rollout replicas, each with random numbers of its own.

run.seed reaches all of them as one engine_kwargs.sglang.random_seed. Two engines that start from the same seed would
give one prompt the same responses, where its group is spread over both.
"""

from __future__ import annotations

import copy
from typing import Any

from verl.workers.rollout import replica

SEED = "random_seed"


def register() -> None:
    """Tell verl, in the process that starts its replicas."""
    replica.RolloutReplicaRegistry.register("sglang", load_sglang)


def load_sglang() -> type[Any]:
    """verl's class of SGLang replicas, whose n-th starts from the seed + n."""
    base: Any = replica._load_sglang()  # verl's loader also readies this process for SGLang

    class SeededReplica(base):
        def __init__(self, replica_rank: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(replica_rank, *args, **kwargs)
            self.config = copy.deepcopy(self.config)  # one object for all replicas
            self.config.engine_kwargs["sglang"][SEED] += replica_rank

    return SeededReplica

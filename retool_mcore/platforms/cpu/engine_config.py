"""verl's Megatron engine config, extended by float32.

CPUs gain nothing from 16-bit training, and tests need exact results.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from verl.workers.config import McoreEngineConfig


@dataclass
class CpuEngineConfig(McoreEngineConfig):
    """verl's McoreEngineConfig, which also accepts ``dtype`` "float32".

    verl's tree selects it by ``_target_``.
    """

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype == "float32":
            object.__setattr__(self, "dtype", "bfloat16")  # passes verl's check; the dataclass is frozen
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # verl's trainer sends the critic's configuration to a worker that has not yet imported
        # model.external_lib. Unpickling the configuration therefore imports the engine.
        self.__dict__.update(state)
        importlib.import_module("retool_mcore.platforms.cpu.engine")

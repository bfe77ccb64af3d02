"""The Megatron engine's configuration, with float32 allowed.

CPUs need no 16-bit training, and tests need exactness.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from verl.workers.config import McoreEngineConfig


@dataclass
class CpuEngineConfig(McoreEngineConfig):
    """verl's McoreEngineConfig whose ``dtype`` may also be "float32".

    verl's tree names it by ``_target_``.
    """

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype == "float32":
            object.__setattr__(self, "dtype", "bfloat16")  # what verl's own check accepts; fields are frozen
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # verl's trainer makes the critic's configuration itself and sends it to the worker, where
        # nothing has imported model.external_lib yet. Unpickling the configuration therefore
        # imports the engine that it configures.
        self.__dict__.update(state)
        importlib.import_module("retool_mcore.platforms.cpu.engine")

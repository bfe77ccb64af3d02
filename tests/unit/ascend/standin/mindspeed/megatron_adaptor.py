"""Importing it is what patches Megatron-core; ``repatch`` is what verl's engine calls with the
run's settings.
"""

import sys

MEGATRON_WAS_LOADED = "megatron.core" in sys.modules
REPATCHED: list[dict] = []


def repatch(options: dict) -> None:
    REPATCHED.append(dict(options))

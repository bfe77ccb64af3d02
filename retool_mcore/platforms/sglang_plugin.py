"""SGLang's entry point (group ``sglang.srt.plugins``), which each of its processes calls.

It does nothing outside a run of ours.
"""

import importlib
import os

from retool_mcore.platforms.absent import MEGATRON, absent
from retool_mcore.platforms.base import PLATFORM_ENV, get_platform
from retool_mcore.platforms.patches import Seam, apply_all
from retool_mcore.platforms.stores import STORE_PATCH
from retool_mcore.platforms.versions import requirement

DUMPER_SEAM = Seam(
    target="sglang.srt.debug_utils.dumper._MegatronPlugin",
    reason="it imports Megatron and Transformer Engine into each engine, and the module is imported without them",
    applies_to=requirement("sglang"),
    remove_when="SGLang imports Megatron when a dump asks for its ranks",
)


def load() -> None:
    if name := os.environ.get(PLATFORM_ENV):
        with absent(MEGATRON):  # a dump would name the ranks of a trainer: no engine has any
            importlib.import_module("sglang.srt.debug_utils.dumper")
        apply_all((STORE_PATCH, *get_platform(name).sglang_patches()))

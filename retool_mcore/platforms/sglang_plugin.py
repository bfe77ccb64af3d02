"""Our plugin for SGLang (entry point group ``sglang.srt.plugins``), called in each SGLang process.

It does nothing in processes that belong to no run of ours.
"""

import os

from retool_mcore.platforms.base import PLATFORM_ENV, get_platform
from retool_mcore.platforms.patches import apply_all
from retool_mcore.platforms.patches_torch import STORE_PATCH

MODELS_ENV = "SGLANG_EXTERNAL_MODEL_PACKAGE"  # SGLang registers the models of this package


def load() -> None:
    if name := os.environ.get(PLATFORM_ENV):
        os.environ.setdefault(MODELS_ENV, "retool_mcore.platforms.sglang_models")
        apply_all((STORE_PATCH, *get_platform(name).sglang_patches()))

"""SGLang's entry point (group ``sglang.srt.plugins``), called in each of its processes; inert outside a CPU run."""

from __future__ import annotations

import os

from retool_mcore.platforms.base import PLATFORM_ENV


def load() -> None:
    if os.environ.get(PLATFORM_ENV) != "cpu":
        return
    from retool_mcore.platforms.cpu.patches import SGLANG_PATCHES
    from retool_mcore.platforms.patches import apply_all

    apply_all(SGLANG_PATCHES)

"""Run in a process of its own with the stand-ins on the path: verl's NPU code paths, up to where a
kernel would run.

Prints one JSON object. ``python -m tests.unit.ascend.npu_scenario``.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from retool_mcore.config import SftConfig, load_config
from retool_mcore.platforms import get_platform

CONFIG = Path(__file__).parents[3] / "configs" / "sft_qwen2.5_7b_a2x8.toml"


def found() -> dict[str, Any]:
    platform = get_platform("ascend")
    platform.activate()
    platform.activate()
    import mindspeed.megatron_adaptor as mindspeed
    from verl.utils import device
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.mindspeed import transformer_impl

    import ascend.engine  # noqa: F401  verl imports it as model.external_lib
    from retool_mcore.platforms.patches_bridge import MODEL_PATCH
    from retool_mcore.verl.keys.tree import sft_parts, sft_sections
    from retool_mcore.verl.plugin import assert_loaded

    assert_loaded()
    run = load_config(SftConfig, CONFIG, ["parallel.tp=2", "parallel.cp=2", "memory.recompute=full"])
    # What verl's engine hands to MindSpeed before it makes the process groups.
    transformer_impl._mindspeed_repatch(sft_parts(run, platform, sft_sections(run, platform))["engine"])
    verl = {
        "device": device.get_device_name(),
        "backend": device.get_nccl_backend(),
        "resource": device.get_resource_name(),
        "visible_devices": device.get_visible_devices_keyword(),
        "engine": EngineRegistry.get_engine_cls(model_type="language_model", backend="megatron").__name__,
    }
    options = {key: str(value) for key, value in mindspeed.REPATCHED[-1].items()}
    return {
        "verl": verl,
        "mindspeed_came_first": not mindspeed.MEGATRON_WAS_LOADED,
        "options": options,
        "checks_tensors": MODEL_PATCH.applied,
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = found()
    print(json.dumps(result))

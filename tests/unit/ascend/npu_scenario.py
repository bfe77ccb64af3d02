"""Run in a process of its own with the stand-ins on the path: verl's NPU code paths, up to where a
kernel would run.

Prints one JSON object. ``python -m tests.unit.ascend.npu_scenario NAME``.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[3] / "configs"


def activated() -> dict[str, Any]:
    from retool_mcore.platforms import get_platform
    from retool_mcore.verl.plugin import assert_loaded

    platform = get_platform("ascend")
    platform.activate()
    platform.activate()
    assert_loaded()
    import mindspeed.megatron_adaptor as mindspeed
    import torch_npu
    from verl.utils import device
    from verl.workers.engine import EngineRegistry

    platform.set_device(3)
    platform.synchronize()
    return {
        "device": device.get_device_name(),
        "backend": device.get_nccl_backend(),
        "resource": device.get_resource_name(),
        "visible_devices": device.get_visible_devices_keyword(),
        "engine": EngineRegistry.get_engine_cls(model_type="language_model", backend="megatron").__name__,
        "mindspeed_came_first": not mindspeed.MEGATRON_WAS_LOADED,
        "peak_gib": platform.peak_memory_gib(),
        "calls": sorted(set(torch_npu.CALLS)),
    }


def repatched() -> dict[str, Any]:
    """What verl's MindSpeed engine hands to MindSpeed before it makes the process groups."""
    from retool_mcore.config import SftConfig, load_config
    from retool_mcore.platforms import get_platform

    platform = get_platform("ascend")
    platform.activate()
    import mindspeed.megatron_adaptor as mindspeed
    from verl.workers.engine.mindspeed import transformer_impl

    from retool_mcore.verl.keys.tree import sft_parts, sft_sections

    settings = ["parallel.tp=2", "parallel.cp=2", "memory.recompute=full"]
    run = load_config(SftConfig, CONFIGS / "sft_qwen2.5_7b_a2x8.toml", settings)
    engine_config = sft_parts(run, platform, sft_sections(run, platform))["engine"]
    transformer_impl._mindspeed_repatch(engine_config)
    return {key: str(value) for key, value in mindspeed.REPATCHED[-1].items()}


def dry_run() -> dict[str, Any]:
    """The launcher's own dry run; trainer.device through verl's auto_set_device."""
    from retool_mcore.config import RlConfig, load_config
    from retool_mcore.train.dry_run import dry_run as report

    run = load_config(RlConfig, CONFIGS / "rl_qwen2.5_7b_a2x8.toml", ["model.path=Qwen/Qwen2.5-7B-Instruct"])
    text = report(run)
    import torch_npu
    from omegaconf import OmegaConf
    from verl.utils.device import auto_set_device

    tree = OmegaConf.create({"trainer": {"device": "cuda"}})
    auto_set_device(tree)
    return {"report": text, "device": tree.trainer.device, "calls": sorted(set(torch_npu.CALLS))}


def late() -> dict[str, Any]:
    """Megatron imported before the platform was activated."""
    import megatron.core  # noqa: F401

    from retool_mcore.errors import PlatformError
    from retool_mcore.platforms import get_platform

    try:
        get_platform("ascend").activate()
    except PlatformError as error:
        return {"error": str(error)}
    return {"error": ""}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = {"activated": activated, "repatched": repatched, "dry_run": dry_run, "late": late}[sys.argv[1]]()
    print(json.dumps(result))

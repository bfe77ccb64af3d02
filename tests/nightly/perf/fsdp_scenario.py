"""Run by test_fsdp_bench.py in its own process: the FSDP2 worker of perf trains on the CPU.

verl registers its FSDP engine for CUDA and NPU only; it is registered for the CPU here, unchanged.
Prints the loss and the learning rate of each step. perf/ has to be on the path.
"""

from pathlib import Path
from typing import Any

from fsdp_bench import configurations, fsdp_worker
from sft_steps import train
from verl.workers.config import HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from retool_mcore.config import SftConfig, load_config
from retool_mcore.data.tasks import make_task
from retool_mcore.platforms.base import get_platform
from tests.scenario import ROOT, tell_as_one_rank


def rows(folder: Path) -> list[dict[str, Any]]:
    task = folder / "task"
    make_task(task)
    overrides = [f"model.path={task}/model", f"data.train_file={task}/sft_train.parquet"]
    overrides += [f'validation.files=["{task}/sft_val.parquet"]', "train.steps=4"]
    config = load_config(SftConfig, ROOT / "configs" / "sft_tiny_cpu.toml", overrides)
    choices = {"checkpointing": False, "liger": False, "fused": False, "prefetch": True, "reshard": True}
    _, engine = configurations(config.model.path, 4096, **choices)
    model = HFModelConfig(
        path=config.model.path,
        use_remove_padding=False,  # needs flash-attn
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(FSDPEngineWithLMHead)
    steps = train(fsdp_worker(config, model, engine), config, get_platform("cpu"))
    return [{"loss": row["loss"], "lr": row["lr"]} for row in steps]


if __name__ == "__main__":
    tell_as_one_rank(rows)

r"""Measures verl's own FSDP engine on the batches of an SFT case, for comparison with ours.

    torchrun --nproc-per-node 2 perf/fsdp_bench.py sft_7b_h200x2 --model DIR \
        --data DIR/sft.parquet --out fsdp.json

It uses the same sequences in the same order, the same timing of a step and the same count of FLOPs
as launch/sft_mcore.py. Only the engine differs: verl's FSDP2 on transformers, which needs
flash-attn. A run whose loss does not fall ends with an error, because it did not train.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from bench import config_of, length_histogram, provenance, summarize
from sft_steps import join_group, train

from retool_mcore.cli.common import guarded
from retool_mcore.config import SftConfig
from retool_mcore.errors import ConfigError
from retool_mcore.verl.sft_engine import start

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # CUDA's default is 8; our platform sets 1 for Megatron, which slows FSDP


def fsdp_worker(config: SftConfig, model: Any, engine: Any) -> Any:
    """verl's training worker with its FSDP engine instead of Megatron's."""
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPOptimizerConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    class ScheduledWorker(TrainingWorker):  # type: ignore[misc]
        """Steps the learning-rate schedule with each update, as verl's SFT trainer does."""

        def train_batch(self, data: Any) -> Any:
            tu.assign_non_tensor(data, update_lr_scheduler=True)
            return super().train_batch(data)

    optimizer = FSDPOptimizerConfig(
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        betas=(config.optim.betas[0], config.optim.betas[1]),
        clip_grad=config.optim.clip_grad,
        total_training_steps=config.train.steps,
        lr_scheduler_type=config.optim.schedule,
        lr_warmup_steps_ratio=config.optim.warmup_fraction,
        min_lr_ratio=config.optim.min_lr / config.optim.lr,
        override_optimizer_config={"fused": True},
    )
    worker = ScheduledWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    start(worker)
    return worker


@guarded
def bench(
    case: Annotated[str, typer.Argument(help="a table of perf/cases.toml, of kind sft")],
    *,
    model: Annotated[str, typer.Option()],
    data: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()] = Path("fsdp.json"),
    warmup: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 10,
    tokens: Annotated[int, typer.Option(help="per micro-batch and GPU, at least the longest sequence")] = 16384,
    checkpointing: Annotated[bool, typer.Option(help="recompute every layer")] = True,
    liger: Annotated[bool, typer.Option(help="Liger's kernels for norms, RoPE and SwiGLU")] = False,
    fused: Annotated[bool, typer.Option(help="verl's fused output layer and cross-entropy")] = True,
    prefetch: Annotated[bool, typer.Option()] = True,
    reshard: Annotated[bool, typer.Option(help="all-gather weights again for the backward pass")] = True,
) -> None:
    config = config_of(SftConfig, case, model, data, steps=warmup + steps)
    os.environ[CONNECTIONS] = "8"
    platform = join_group("cuda")
    require_fast_loss(fused=fused)
    choices = {"checkpointing": checkpointing, "liger": liger, "fused": fused, "prefetch": prefetch, "reshard": reshard}
    rows = train(fsdp_worker(config, *configurations(model, tokens, **choices)), config, platform)
    require_training(rows)
    if dist.get_rank() == 0:
        record = {
            "case": case,
            "engine": "fsdp2",
            "choices": choices | {"tokens": tokens},
            "provenance": provenance(config),
            "lengths": length_histogram(rows[warmup:]),
            "steps": rows[warmup:],
            "summary": summarize(rows[warmup:]),
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(json.dumps({"case": case, "engine": "fsdp2", **choices, **record["summary"]}))
    dist.destroy_process_group()


def require_training(rows: Sequence[dict[str, float]]) -> None:
    """Raise ConfigError unless the loss (nats per token) fell from the first row to the last."""
    first, last = rows[0]["loss"], rows[-1]["loss"]
    if not last < first:
        raise ConfigError(
            f"The FSDP run's loss went from {first:.4g} to {last:.4g} in {len(rows)} steps, so it did not train. "
            "Check its learning rate and the data before you compare speeds."
        )


def require_fast_loss(*, fused: bool) -> None:
    """Raise ConfigError if verl would use a slow loss, which would flatter our result."""
    from verl.utils import torch_functional

    if not fused and not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:  # verl's spelling
        raise ConfigError(
            "--no-fused needs flash-attn's cross-entropy kernel. Without it, verl computes the loss row by row, "
            "several times slower. Install flash-attn with flash_attn.ops.triton."
        )


def configurations(
    model: str, tokens: int, *, checkpointing: bool, liger: bool, fused: bool, prefetch: bool, reshard: bool
) -> tuple[Any, Any]:
    """verl's configurations of model and engine."""
    from verl.workers.config import FSDPEngineConfig, HFModelConfig

    return (
        HFModelConfig(
            path=model,
            use_remove_padding=True,
            enable_gradient_checkpointing=checkpointing,
            use_liger=liger,
            use_fused_kernels=fused,
            fused_kernel_options={"impl_backend": "triton"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            forward_prefetch=prefetch,
            reshard_after_forward=reshard,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=tokens,
            infer_max_token_len_per_gpu=tokens,
            use_fused_kernels=fused,
        ),
    )


if __name__ == "__main__":
    typer.run(bench)

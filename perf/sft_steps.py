"""Runs the steps of an SFT case under torchrun, with the engine of a benchmark.

Sequences, their order, the timing of a step and the count of FLOPs are the same as in
launch/sft_mcore.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from retool_mcore.config import SftConfig
from retool_mcore.data.sft import BatchesOfRank, load_sft
from retool_mcore.data.tokenizer import tokenizer_of
from retool_mcore.platforms.base import Platform, get_platform
from retool_mcore.run.metrics import PhaseTimer, step_rates
from retool_mcore.verl.plugin import assert_loaded
from retool_mcore.verl.sft_engine import SftEngine, time_optimizer


def join_group(platform_name: str) -> Platform:
    platform = get_platform(platform_name)
    platform.activate()
    assert_loaded()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(platform.device.comm_backend)
    return platform


def train(
    worker: Any,
    config: SftConfig,
    platform: Platform,
    around: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext(),
) -> list[dict[str, float]]:
    """Train verl's ``worker`` for train.steps steps; returns a row of metrics for each.

    ``around(step)`` is a context manager around the step's update; its own time counts as
    timing_s/other.
    """
    timer = PhaseTimer()
    time_optimizer(worker.engine, platform, timer)
    engine = SftEngine(worker, config, platform)
    data = load_sft(config.train_files, tokenizer_of(config.model), config.data.max_length_tokens)
    batches = BatchesOfRank(
        data.examples, config.train.global_batch, config.run.seed, engine.dp_size, engine.dp_rank,
        hidden_size=engine.shape.hidden,
    )  # fmt: skip
    rows: list[dict[str, float]] = []
    timer.flush()
    for step in range(1, config.train.steps + 1):
        with timer.span("data"):
            sequences = batches(step)
        with around(step), timer.span("forward_backward"):
            metrics = engine.train_batch(sequences)
        times = timer.flush()
        rows.append({"step": step, **metrics, **step_rates(metrics, times, platform, dist.get_world_size()), **times})
    return rows

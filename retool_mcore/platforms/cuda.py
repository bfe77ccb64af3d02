"""Class Cuda: NVIDIA GPUs, where verl's, Megatron-core's and SGLang's own defaults hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import PLATFORM_ENV, EnvVar, Platform
from retool_mcore.platforms.patches import Patch


class Cuda(Platform):
    """Transformer Engine layers, NCCL, SGLang with its CUDA kernels. No patches."""

    name = "cuda"
    device = "cuda"
    comm_backend = "cpu:gloo,cuda:nccl"
    verl_platform = "nvidia"
    ray_resource = "GPU"
    rollout_engines = ("sglang",)
    train_dtypes = ("bfloat16",)
    external_lib = ""
    engine_config_class = "verl.workers.config.McoreEngineConfig"
    attention_backend = "flash"
    free_cache_engine = True
    enforce_eager = False
    peak_flops = 989e12  # H100 and H200 SXM, dense bfloat16, NVIDIA's data sheet

    def check_machine(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise PlatformError(
                f'run.platform = "cuda", and torch {torch.__version__} sees no CUDA device. Check nvidia-smi and that '
                'torch is a CUDA build, or set run.platform to "cpu".'
            )

    def environment(self) -> Sequence[EnvVar]:
        return (
            EnvVar(PLATFORM_ENV, self.name, "our plugins know the run's platform"),
            EnvVar("VERL_PLATFORM", self.verl_platform, "no guessing in processes that see no device"),
            EnvVar("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron overlaps communication in launch order", forced=False),
            EnvVar("TOKENIZERS_PARALLELISM", "false", "its threads die in forked workers, with a warning each"),
        )

    def patches(self) -> Sequence[Patch]:
        return ()

    def activate(self) -> None:
        os.environ.update(self.process_env())
        self.check_machine()

    def set_device(self, local_rank: int) -> None:
        import torch

        torch.cuda.set_device(local_rank)

    def peak_memory_gib(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30

    def sglang_engine_kwargs(self) -> dict[str, Any]:
        return {}

    def sglang_command(
        self, model_path: str, port: int, *, dtype: str, max_running_requests: int, tp: int = 1
    ) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", model_path, "--dtype", dtype, "--tp-size", str(tp)]
        return [*command, "--max-running-requests", str(max_running_requests)]

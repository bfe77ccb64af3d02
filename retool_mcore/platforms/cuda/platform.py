"""Platform `cuda`: NVIDIA GPUs with Transformer Engine's layers, NCCL and fused kernels."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import (
    PLATFORM_ENV,
    SGLANG_PLUGINS,
    DeviceFacts,
    EnvVar,
    Platform,
    RolloutFacts,
    TrainingFacts,
    check_entry_points,
    sorted_by_library,
    training_patches,
)
from retool_mcore.platforms.patches import Patch, Seam
from retool_mcore.platforms.rollout_engines import SGLANG

KERNELS = Path(__file__).parent / "kernels"  # replacements of apex's modules, on PYTHONPATH if apex is missing
TRANSFORMER_ENGINE = "transformer_engine"
CUPY = "cupy"
DEEP_GEMM = "deep_gemm"


class Cuda(Platform):
    """Transformer Engine layers, NCCL, SGLang with its CUDA kernels."""

    name = "cuda"
    install = "make install-cuda"
    verl_platform = "nvidia"
    device = DeviceFacts(
        name="cuda",
        comm_backend="cpu:gloo,cuda:nccl",
        ray_resource="GPU",
        peak_flops=989e12,  # H100 and H200 SXM, dense bfloat16, NVIDIA's data sheet
    )
    training = TrainingFacts(
        dtypes=("bfloat16",),
        engine_config_class="verl.workers.config.McoreEngineConfig",
        external_lib="retool_mcore.platforms.cuda.engine",
        # We measured each option on H200s, see perf/LOG.md.
        transformer_options={
            "attention_backend": "fused",  # cuDNN through Transformer Engine; does not need flash-attn
            "bias_activation_fusion": True,  # SwiGLU in one kernel; autograd saves two fewer intermediates
            "bias_dropout_fusion": True,  # adds the residual in one kernel
            "apply_rope_fusion": True,
            "gradient_accumulation_fusion": True,  # the wgrad GEMM accumulates into the gradient buffer
        },
        # Reduce gradients while the backward pass computes those of earlier layers.
        ddp_options={"overlap_grad_reduce": True},
    )
    rollout = RolloutFacts(engine=SGLANG, free_cache_engine=True, enforce_eager=False, weight_transport=("nccl", None))

    def check_machine(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise PlatformError(
                f'run.platform = "cuda", but torch {torch.__version__} sees no CUDA device. Check nvidia-smi and that '
                'torch is a CUDA build, or set run.platform to "cpu".'
            )

    def facts(self) -> Mapping[str, str]:
        import torch

        versions = {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "CUDA": str(torch.version.cuda)}
        return versions | {"driver": _driver()}

    def environment(self) -> Sequence[EnvVar]:
        return (
            EnvVar(PLATFORM_ENV, self.name, "names the run's platform for our plugins"),
            EnvVar(
                "VERL_PLATFORM", self.verl_platform, "selects verl's platform in processes without a visible device"
            ),
            EnvVar("PYTHONPATH", _python_path(), "finds our replacement of apex's kernel if apex is not installed"),
            EnvVar(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                "Megatron overlaps communication only if kernels run in launch order",
                forced=False,
            ),
            EnvVar(
                "SGLANG_JIT_DEEPGEMM_PRECOMPILE",
                "0",
                "FP8 engines compile a kernel at its first use, instead of minutes for all sizes before the start",
                forced=False,
            ),
            EnvVar(
                "NVTE_USE_CUTLASS_GROUPED_GEMM",
                "1",
                "one grouped GEMM for the experts of a layer instead of one GEMM per expert",
                forced=False,
            ),
            EnvVar("TOKENIZERS_PARALLELISM", "false", "a fork loses the tokenizer's threads and prints a warning"),
        )

    def patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.patches_torch import STORE_PATCH
        from retool_mcore.platforms.patches_verl import API_KEY_PATCH, MASTER_PORT_PATCH

        keys = (API_KEY_PATCH,) if self.sglang_patches() else ()
        run_patches = (*self.training_patches(), *self.sglang_patches(), *self.weight_sync_patches())
        return sorted_by_library((STORE_PATCH, *run_patches, *keys, MASTER_PORT_PATCH))

    def training_patches(self) -> Sequence[Patch]:
        if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
            return ()
        from retool_mcore.platforms.cuda.patches import ADAM_PATCH
        from retool_mcore.platforms.patches_verl import LOG_PROB_PATCH

        return (*training_patches(), LOG_PROB_PATCH, ADAM_PATCH)

    def seams(self) -> Sequence[Seam]:
        from retool_mcore.platforms.cuda.patches import SEAMS

        return SEAMS

    def sglang_patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.patches_sglang import HOST_COPY_PATCH, shared_patches

        return (HOST_COPY_PATCH, *shared_patches()) if importlib.util.find_spec(SGLANG.name) else ()

    def weight_sync_patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.patches_verl import FLAT_BUCKET_PATCH

        return (FLAT_BUCKET_PATCH,) if importlib.util.find_spec(SGLANG.name) else ()

    def activate(self) -> None:
        os.environ.update(self.process_env())
        if str(KERNELS) in os.environ["PYTHONPATH"] and str(KERNELS) not in sys.path:
            sys.path.append(str(KERNELS))
        self.check_machine()

    def check_settings(self, config: RunConfig) -> None:
        super().check_settings(config)
        needs = {
            "parallel.cp": config.parallel.cp > 1,
            "model.fp8": config.model.fp8 != "off",
            "memory.adam_states": config.memory.adam_states != "float32",
        }
        used = [name for name, wanted in needs.items() if wanted]
        if used and importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
            raise PlatformError(
                f"{config.source}: the value of {' and '.join(used)} needs Transformer Engine, which is not "
                "installed. Install the extra `cuda`, or leave the setting at its default."
            )
        if not isinstance(config, RlConfig):
            return
        check_entry_points(SGLANG_PLUGINS)
        if config.train.mode == "async" and importlib.util.find_spec(CUPY) is None:
            raise PlatformError(
                f'{config.source}: train.mode = "async" sends weights with verl\'s "nccl" engine, which needs CuPy, '
                "which is not installed. Install the one for this torch's CUDA (cupy-cuda12x, cupy-cuda13x), or set "
                'train.mode = "partial_rollout" and rollout.gpus = 0.'
            )

    def remarks(self, config: RunConfig) -> Sequence[str]:
        warnings: list[str] = []
        if config.model.fp8 != "off" and config.parallel.ep > 1:
            warnings.append(
                f'model.fp8 = "{config.model.fp8}" with experts (parallel.ep = {config.parallel.ep}): each expert\'s '
                "small matrices are quantized one by one, so Qwen3-30B-A3B's layers train slower than in "
                'bfloat16 (perf/RESULTS.md). Set model.fp8 = "off".'
            )
        if isinstance(config, RlConfig) and config.rollout.precision == "fp8":
            warnings += _without_deep_gemm(config.rollout.engine_args.get("fp8_gemm_runner_backend", "auto"))
        return warnings

    def set_device(self, local_rank: int) -> None:
        import torch

        torch.cuda.set_device(local_rank)
        # Packed batches have a different length at each step, which fragments fixed segments. We
        # cannot set this in the environment, because SGLang's memory saver rejects it there. verl
        # toggles it itself if actor and engine share a GPU.
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory_gib(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30

    def gpu_percent(self) -> float | None:
        import torch

        if importlib.util.find_spec("pynvml") is None:
            return None
        return float(torch.cuda.utilization())

    def rollout_engine_kwargs(self) -> dict[str, Any]:
        # Capturing CUDA graphs for prefills takes a minute of each start. rollout.engine_args can
        # enable them.
        return {"cuda_graph_backend_prefill": "disabled"}

    def only_devices(self, indices: Sequence[int]) -> dict[str, str]:
        name = "CUDA_VISIBLE_DEVICES"
        seen = [device for device in os.environ.get(name, "").split(",") if device]
        return {name: ",".join(seen[index] if seen else str(index) for index in indices)}


def _driver() -> str:
    """The driver's version, and the number and name of the GPUs in CUDA_VISIBLE_DEVICES.

    Raises PlatformError if other processes use half of a GPU's memory: the first step would
    probably run out of it. Less is permitted, so that small jobs can share a GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return "unknown, because nvidia-smi is not on the PATH"
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,driver_version,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise PlatformError(f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:300]}. Check the driver.")
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # UUIDs may be abbreviated. MIG devices are not among the rows, so with them all rows count.
    rows = [
        row for row in rows if any(word and (word == row[0] or row[1].startswith(word)) for word in visible)
    ] or rows
    busy = [f"{index} ({used} of {total} MiB)" for index, *_, used, total in rows if int(used) > int(total) / 2]
    if busy:
        raise PlatformError(
            f"other processes use most of the memory of GPU {', '.join(busy)}. Stop them, or hide the GPU with "
            "CUDA_VISIBLE_DEVICES."
        )
    return f"{rows[0][3]}, {len(rows)} x {rows[0][2]}"


def _python_path() -> str:
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(KERNELS)]
    try:
        apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda")
    except ImportError:
        apex = None
    if apex is None or Path(str(apex.origin)).parent == KERNELS:
        parts.append(str(KERNELS))
    return os.pathsep.join(parts)


def _without_deep_gemm(backend: str) -> Sequence[str]:
    """Warnings about FP8 engines that do not use DeepGEMM."""
    if backend not in ("auto", "cutlass") or (backend == "auto" and importlib.util.find_spec(DEEP_GEMM)):
        return ()
    return (
        f'rollout.precision = "fp8" with {"no DeepGEMM installed" if backend == "auto" else "CUTLASS GEMMs"}: '
        "engines then sample no faster than in bfloat16 (perf/RESULTS.md). Install sgl-deep-gemm, and leave "
        "fp8_gemm_runner_backend to SGLang.",
    )

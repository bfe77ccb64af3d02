"""Platform `cpu`: laptops and CI machines. One process per training rank, with gloo."""

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retool_mcore.config import EvaluationConfig, RlConfig, RunConfig
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.base import (
    NO_FUSED_KERNELS,
    PLATFORM_ENV,
    SGLANG_PLUGINS,
    DeviceFacts,
    EnvVar,
    HostFacts,
    Platform,
    RolloutFacts,
    TrainingFacts,
    check_entry_points,
    sorted_by_library,
)
from retool_mcore.platforms.patches import Patch, apply_all
from retool_mcore.platforms.rollout_engines import SGLANG

STUBS = Path(__file__).parent / "stubs"  # import stubs of packages without a CPU build
IN_FP8 = ("precision", "kv_cache")  # settings of [rollout] whose value is "model" or "fp8"
MAX_TOTAL_TOKENS = 32_768  # size of the server's KV cache in tokens
MAX_STATES = 384  # states of linear attention, on a CPU three per running request; by default half of the memory


class Cpu(Platform):
    """The platform without accelerators.

    It rejects processes that see an accelerator, because its patches assume that there is none.
    """

    name = "cpu"
    install = "make install"
    verl_platform = "cpu"
    # Ray's "GPU" is a logical resource here: ray.init(num_gpus=<processes>).
    device = DeviceFacts(name="cpu", comm_backend="gloo", ray_resource="GPU", peak_flops=None)
    training = TrainingFacts(
        dtypes=("float32", "bfloat16"),
        engine_config_class="retool_mcore.platforms.cpu.engine_config.CpuEngineConfig",
        external_lib="retool_mcore.platforms.cpu.engine",
        transformer_options={"attention_backend": "auto", **NO_FUSED_KERNELS},
    )
    rollout = RolloutFacts(
        engine=SGLANG,
        free_cache_engine=False,  # SGLang's release_memory_occupation frees nothing on CPU
        enforce_eager=True,
        weight_transport=("tcp", "retool_mcore.platforms.cpu.weights"),
    )
    # A laptop's run needs a tenth of a cluster's resources. min_address_space_gib is measured
    # (preflight/limits.py).
    host = HostFacts(shm_gib=0.5, open_files=4096, has_devices=False, min_address_space_gib=8)

    def check_machine(self) -> None:
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            raise PlatformError(
                f'run.platform = "cpu", but this process sees an accelerator ({accelerator.type}). '
                'Set run.platform to "cuda" or "ascend", or hide the device from the run with CUDA_VISIBLE_DEVICES="".'
            )

    def environment(self) -> Sequence[EnvVar]:
        path = os.pathsep.join([str(STUBS), *(p for p in _python_path() if p != str(STUBS))])
        return (
            EnvVar(PLATFORM_ENV, self.name, "activates our plugins of verl and SGLang in this run's processes only"),
            EnvVar(
                "VERL_PLATFORM", self.verl_platform, "makes a failed plugin an error instead of a fallback to nvidia"
            ),
            EnvVar(
                "PYTHONPATH",
                path,
                "finds our stubs of torchvision and sgl_kernel, which have no CPU build",
            ),
            EnvVar("SGLANG_USE_CPU_ENGINE", "1", "selects SGLang's plain PyTorch layers"),
            EnvVar(
                "TORCHDYNAMO_DISABLE", "1", "Megatron-core would compile small functions: minutes of g++ without a gain"
            ),
            EnvVar("OMP_NUM_THREADS", "1", "one process per core; more threads than cores are slower", forced=False),
            EnvVar("TOKENIZERS_PARALLELISM", "false", "a fork loses the tokenizer's threads and prints a warning"),
            EnvVar(
                "HF_HUB_OFFLINE",
                "1",
                "models are local directories; a lookup on the hub could hang the run",
                forced=False,
            ),
            EnvVar(
                "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT",
                "30",
                "seconds for each of three attempts; batches are small here, so a lost node is found in minutes",
                forced=False,
            ),
            EnvVar("RAY_USAGE_STATS_ENABLED", "0", "sends no usage statistics", forced=False),
        )

    def patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.cpu.bridge import import_bridge
        from retool_mcore.platforms.cpu.patches import ENGINE_PATCHES, PROCESS_PATCHES
        from retool_mcore.platforms.patches_torch import STORE_PATCH
        from retool_mcore.platforms.patches_verl import API_KEY_PATCH, MASTER_PORT_PATCH

        import_bridge()  # the patches name modules that only it can import
        run_patches = (*ENGINE_PATCHES, *self.sglang_patches(), *self.weight_sync_patches())
        return sorted_by_library((STORE_PATCH, *PROCESS_PATCHES, *run_patches, API_KEY_PATCH, MASTER_PORT_PATCH))

    def sglang_patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.cpu.patches import SGLANG_PATCHES
        from retool_mcore.platforms.patches_sglang import shared_patches

        return (*shared_patches(), *SGLANG_PATCHES)

    def weight_sync_patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.cpu.patches import WEIGHTS_PATCH

        return (WEIGHTS_PATCH,)

    def activate(self) -> None:
        os.environ.update(self.process_env())
        if str(STUBS) not in sys.path:
            sys.path.insert(0, str(STUBS))
        self.check_machine()
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            # The user has hidden all devices, as check_machine suggests. Ray counts the variable's
            # entries and would have no logical GPU. It also counts -1, which hides devices.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(["-1"] * self.device_count())
        check_entry_points("verl.plugins", SGLANG_PLUGINS)
        from retool_mcore.platforms.cpu import patches

        apply_all(patches.PROCESS_PATCHES)

    def device_count(self) -> int:
        return os.cpu_count() or 1

    def set_device(self, local_rank: int) -> None:
        """Do nothing: all processes share the CPU."""

    def synchronize(self) -> None:
        """Do nothing: the CPU works synchronously."""

    def check_room(self, config: RunConfig) -> None:
        cores, processes = os.cpu_count() or 1, config.cluster.gpus_per_node
        if processes > cores:
            raise ConfigError(
                f"{config.source}: cluster.gpus_per_node = {processes} processes would share {cores} cores and wait "
                f"for each other at every step. Use at most {cores}."
            )

    def extend_verl(self) -> None:
        self.activate()
        import retool_mcore.platforms.cpu.verl_platform  # noqa: F401

    def server_devices(self, config: EvaluationConfig) -> list[list[int]]:
        """One server without devices; more would share the same cores and only cost memory."""
        return [[]]

    def check_settings(self, config: RunConfig) -> None:
        super().check_settings(config)
        memory = config.memory
        engine_settings = []
        if isinstance(config, RlConfig):
            engine_settings = [(f"rollout.{name}", getattr(config.rollout, name), "model") for name in IN_FP8]
        for name, value, plain in (
            *engine_settings,
            ("model.fp8", config.model.fp8, "off"),
            ("memory.fused_cross_entropy", memory.fused_cross_entropy, False),
            ("memory.adam_states", memory.adam_states, "float32"),
            ("memory.optimizer_on_cpu", memory.optimizer_on_cpu, 0.0),
            ("memory.offload_idle", memory.offload_idle, False),
        ):
            if value != plain:
                raise ConfigError(
                    f'{config.source}: {name} = {value!r} needs GPU kernels, which run.platform = "cpu" does not have. '
                    f"Set it to {plain!r}."
                )

    def peak_memory_gib(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB

    def rollout_engine_kwargs(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",  # xgrammar needs CUDA, and no request uses a grammar
            "enable_memory_saver": False,  # needs CUDA
            "disable_overlap_schedule": True,  # scheduler and model share the CPU
            "sleep_on_idle": True,  # else an idle server uses a whole core
            "max_total_tokens": MAX_TOTAL_TOKENS,
            "max_mamba_cache_size": MAX_STATES,
        }


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]

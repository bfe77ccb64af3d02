"""Class Ascend: Huawei NPUs. Megatron-core with MindSpeed trains, vLLM with vllm-ascend samples.

verl 0.9.1 supports the device (platform `huawei`) and registers a MindSpeed engine for (megatron,
npu), so the device needs no patch. This class adds the import order that MindSpeed needs, the
environment, and a clear error for anything that a machine or a configuration lacks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend import limits
from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.model.files import is_hub_name, read_config
from retool_mcore.model.rope import rope_of_config
from retool_mcore.model.shape import HYBRID
from retool_mcore.platforms.base import (
    NO_FUSED_KERNELS,
    PLATFORM_ENV,
    DeviceFacts,
    EnvVar,
    Platform,
    RolloutFacts,
    TrainingFacts,
)
from retool_mcore.platforms.patches import Patch, requirement
from retool_mcore.platforms.rollout_engines import VLLM

# Default folders of CANN 8 and 9, used if ASCEND_HOME_PATH is not set.
CANN_HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
# The versions of verl 0.9.1's image for NPUs; ascend/README.md has the source of each.
CANN = ("9.1", "9.0")
VERSIONS = (
    "torch>=2.10.0,<2.11",
    "torch-npu>=2.10.0.post2,<2.11",
    requirement("megatron-core"),
    requirement("megatron-bridge"),
    "mindspeed",  # its version is 0.12.1 on several branches; importing it also imports MegatronAdaptor
    "transformer-engine",  # the package name of TransformerEngineNPU
    "vllm>=0.23.0,<0.24",
    "vllm-ascend>=0.23.0,<0.24",
    "triton-ascend>=3.2.1,<3.3",
)


class Ascend(Platform):
    """Atlas A2 (Ascend 910B). Nothing in this class has run on an NPU: see README.md."""

    name = "ascend"
    install = "make install-ascend"
    verl_platform = "huawei"
    device = DeviceFacts(
        name="npu",
        comm_backend="cpu:gloo,npu:hccl",
        ray_resource="NPU",
        peak_flops=354e12,  # Ascend 910B, dense bfloat16, as in verl's flops counter
    )
    training = TrainingFacts(
        dtypes=("bfloat16",),
        engine_config_class="verl.workers.config.McoreEngineConfig",
        external_lib="ascend.engine",
        # verl itself sets use_flash_attn for MindSpeed. We pass no option that Megatron-core lacks,
        # because Megatron-Bridge refuses them unless MindSpeed-Bridge is active.
        transformer_options={"attention_backend": "flash", **NO_FUSED_KERNELS},  # verl's default
    )
    # On NPUs verl registers its HCCL engine as "nccl".
    rollout = RolloutFacts(engine=VLLM, free_cache_engine=True, enforce_eager=False, weight_transport=("nccl", None))

    def check_machine(self) -> None:
        home = _cann_home()
        if importlib.util.find_spec("torch_npu") is None:
            cann = f"CANN is at {home}" if home.is_dir() else f"CANN is not at {home} either"
            raise PlatformError(
                f'run.platform = "ascend" needs torch_npu, which is not installed ({cann}). Use an image with the '
                "versions in ascend/README.md on a machine with NPUs. Without NPUs, only --dry-run, `retool plan` and "
                "`retool preflight` work."
            )
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:  # OSError: a shared library of CANN is missing
            raise PlatformError(
                f"torch_npu is installed but cannot be imported: {error}. Source CANN's set_env.sh "
                f"({home.parent / 'set_env.sh'}) in the shell that starts the run, and check `npu-smi info`."
            ) from error
        import torch

        npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
        if not npu.is_available():
            raise PlatformError(
                'run.platform = "ascend" needs an NPU, but torch_npu finds none. Check `npu-smi info`, '
                "ASCEND_RT_VISIBLE_DEVICES, and /dev/davinci* in the container."
            )

    def device_count(self) -> int:
        return _npu().device_count()

    def facts(self) -> Mapping[str, str]:
        try:
            from verl.utils.device import check_ipc_version_support, get_npu_versions

            _, driver, cann = get_npu_versions()
            sends_weights = check_ipc_version_support(driver, cann)
        except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stdout", None) or getattr(error, "stderr", None) or ""
            raise PlatformError(
                f"verl cannot read the versions of CANN and its driver: {error} {output.strip()[-300:]}. It reads them "
                "again before the engines start. Check ASCEND_HOME_PATH and `npu-smi info -t board -i 1`. If the "
                "container has no card 1, export ASCEND_VISIBLE_DEVICES with the numbers of its cards."
            ) from error
        if not cann.startswith(CANN):
            raise PlatformError(
                f"CANN {cann} is installed in {_cann_home()}, but {' or '.join(CANN)} is needed. See ascend/README.md."
            )
        if not sends_weights:
            raise PlatformError(
                f"verl cannot send weights to the engines with version {driver} of the driver. Install the driver for "
                "the CANN version in ascend/README.md."
            )
        return {"CANN": cann, "driver": driver}

    def environment(self) -> Sequence[EnvVar]:
        return (
            EnvVar(PLATFORM_ENV, self.name, "names the run's platform for our plugins"),
            EnvVar("VERL_PLATFORM", self.verl_platform, 'verl\'s name of the platform; "npu" is not registered'),
            EnvVar(
                "VLLM_ASCEND_ENABLE_NZ",
                "0",
                "from verl's guide: without it, vllm-ascend cannot wake up after an in-place weight sync",
            ),
            EnvVar(
                "TASK_QUEUE_ENABLE",
                "1",
                "from verl's guide: a second thread launches operators; the value 2 does not work with ACL graphs",
            ),
            EnvVar(
                "HCCL_OP_EXPANSION_MODE",
                "AIV",
                "from verl's guide: vector cores run collectives, so vllm-ascend can capture more graphs",
                forced=False,
            ),
            EnvVar(
                "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
                "1",
                "from verl's NPU pages and scripts: a worker sees all devices of its node and selects its own by "
                "number",
                forced=False,
            ),
            EnvVar(
                "HCCL_CONNECT_TIMEOUT",
                "1800",
                "s; the default of 120 s is too short if a rank loads its weights late",
                forced=False,
            ),
            EnvVar("TOKENIZERS_PARALLELISM", "false", "a fork loses the tokenizer's threads and prints a warning"),
        )

    def patches(self) -> Sequence[Patch]:
        from retool_mcore.platforms.patches_bridge import MODEL_PATCH
        from retool_mcore.platforms.patches_megatron import WRITER_PATCH  # applied when a checkpoint is saved
        from retool_mcore.platforms.patches_torch import STORE_PATCH
        from retool_mcore.platforms.patches_verl import MASTER_PORT_PATCH, MICRO_BATCH_PATCH

        # MICRO_BATCH_PATCH applies only with memory.recompute = "auto".
        return (MODEL_PATCH, MICRO_BATCH_PATCH, MASTER_PORT_PATCH, WRITER_PATCH, STORE_PATCH)

    def mapping(self) -> str:
        return limits.markdown()

    def has_transformer_option(self, name: str) -> bool:
        return True  # MindSpeed adds options, which are unknown on a machine without it

    def tested_versions(self) -> Sequence[str]:
        return VERSIONS

    def check_settings(self, config: RunConfig) -> None:
        super().check_settings(config)
        limits.check(config)
        _check_positions(config)
        if not isinstance(config, RlConfig):
            return
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1" and not self.rollout.enforce_eager:
            raise PlatformError(
                "ASCEND_LAUNCH_BLOCKING = 1 is set, and vllm-ascend refuses it with ACL graphs. Unset it."
            )
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            raise PlatformError(
                "TORCHDYNAMO_DISABLE = 1 is set, as verl's guide for NPUs suggests. vLLM's piecewise graphs need "
                "torch.compile, so the engines would silently decode without graphs. Unset it."
            )
        if "expandable_segments:True" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""):
            raise PlatformError(
                "PYTORCH_NPU_ALLOC_CONF has expandable_segments:True, which vllm-ascend's memory pool refuses. "
                "Unset it. verl enables the option while the actor trains."
            )

    def remarks(self, config: RunConfig) -> Sequence[str]:
        return limits.remarks(config)

    def activate(self) -> None:
        os.environ.update(self.process_env())
        if "mindspeed.megatron_adaptor" in sys.modules:
            return
        if "megatron.core" in sys.modules:
            raise PlatformError(
                "megatron.core was imported before the platform was activated, so MindSpeed cannot patch it. "
                "Call activate() first."
            )
        self.check_machine()
        try:
            importlib.import_module("mindspeed.megatron_adaptor")
        except ImportError as error:
            # verl would continue without it, and Megatron-core would fail at its first CUDA call.
            raise PlatformError(
                f"MindSpeed cannot be imported: {error}. Install it, MegatronAdaptor and TransformerEngineNPU "
                "in the environment of Megatron-core, in the versions of ascend/README.md."
            ) from error

    def set_device(self, local_rank: int) -> None:
        _npu().set_device(local_rank)

    def synchronize(self) -> None:
        _npu().synchronize()

    def peak_memory_gib(self) -> float:
        return _npu().max_memory_allocated() / 2**30

    def rollout_engine_kwargs(self) -> dict[str, Any]:
        return {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}

    def sglang_command(self, *args: Any, **kwargs: Any) -> list[str]:
        raise PlatformError(
            '`retool eval` starts an SGLang server, which run.platform = "ascend" does not support. Validate in '
            "training ([validation]), or evaluate the export on a CUDA or CPU machine."
        )


def _cann_home() -> Path:
    """The folder of CANN: ASCEND_HOME_PATH, or the first existing default folder."""
    if home := os.environ.get("ASCEND_HOME_PATH"):
        return Path(home)
    return next((Path(home) for home in CANN_HOMES if Path(home).is_dir()), Path(CANN_HOMES[0]))


def _npu() -> Any:
    import torch

    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it


def _check_positions(config: RunConfig) -> None:
    """Raise ConfigError for RoPE scaling and DeltaNet layers, which are untested on NPUs."""
    path = config.model.path
    values = read_config(path) if Path(path).exists() or is_hub_name(path) else {}
    if values.get("model_type") in HYBRID:
        raise ConfigError(
            f"{config.source}: {path} has Gated DeltaNet layers (model_type {values['model_type']}), which are not "
            "tested on NPUs. Use a model with attention in every layer."
        )
    kind = rope_of_config(values).kind
    if kind != "default":
        raise ConfigError(
            f"{config.source}: {path} has RoPE scaling of type {kind}, which is not tested on NPUs. Use a model "
            "without RoPE scaling."
        )

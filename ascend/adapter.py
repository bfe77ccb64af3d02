"""Class Ascend: Huawei NPUs, with MindSpeed under Megatron-core, and vLLM with vllm-ascend.

MindSpeed serves training, vLLM rollouts. verl 0.9.1 already knows the device (platform `huawei`)
and registers a MindSpeed engine for (megatron, npu), so no patch is needed for the device. This
class adds the order of imports that MindSpeed needs, the environment, and a clear error for
whatever a machine or a configuration lacks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend import limits
from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.model.files import is_hub_name, read_config
from retool_mcore.model.rope import rope_of_config
from retool_mcore.platforms.base import PLATFORM_ENV, EnvVar, Platform
from retool_mcore.platforms.engine_patches import MICRO_BATCH_PATCH
from retool_mcore.platforms.facts import DeviceFacts, RolloutFacts, TrainingFacts
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.rollout_engines import VLLM
from retool_mcore.platforms.stores import STORE_PATCH
from retool_mcore.platforms.versions import requirement

CANN_HOME = "/usr/local/Ascend/ascend-toolkit/latest"  # where CANN's installer puts it; ASCEND_HOME_PATH says otherwise
# verl's image for CANN 9.0 (Dockerfile.ascend_9.0.0_a2_v0.8.0) and its ReTool page for Ascend of
# 2026-07 name these versions. vllm-ascend 0.18.0's own page names CANN 8.5.1 with the same torch.
# verl's newest scripts use torch 2.10 with vllm-ascend 0.23, which this platform does not.
CANN = ("9.0",)
VERSIONS = (
    "torch>=2.9.0,<2.10",
    "torch-npu>=2.9.0,<2.10",
    requirement("megatron-core"),
    "mindspeed>=0.16,<0.17",
    "vllm>=0.18.0,<0.19",
    "vllm-ascend>=0.18.0,<0.19",
)


class Ascend(Platform):
    """Atlas A2 (Ascend 910B). Nothing in this class has been run on an NPU: see README.md."""

    name = "ascend"
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
        # verl's own default backend; MindSpeed's attention replaces it when use_flash_attn is set.
        transformer_options={"attention_backend": "flash", "use_flash_attn": True},
    )
    # On NPUs verl registers its HCCL engine as "nccl".
    rollout = RolloutFacts(engine=VLLM, free_cache_engine=True, enforce_eager=False, weight_transport=("nccl", None))

    def check_machine(self) -> None:
        home = Path(os.environ.get("ASCEND_HOME_PATH", CANN_HOME))
        if importlib.util.find_spec("torch_npu") is None:
            cann = f"CANN is at {home}" if home.is_dir() else f"CANN is not at {home} either"
            raise PlatformError(
                'run.platform = "ascend" needs torch_npu, which is not installed here '
                f"({cann}). Use an image of the versions in ascend/README.md on a machine with NPUs; on a machine "
                "without, only --dry-run, `retool plan` and `retool preflight` work."
            )
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:  # OSError: a shared library of CANN is missing
            raise PlatformError(
                f"torch_npu is installed and cannot be imported: {error}. Source CANN's set_env.sh "
                f"({home.parent / 'set_env.sh'}) in the shell that starts the run, and check `npu-smi info`."
            ) from error
        import torch

        npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
        if not npu.is_available():
            raise PlatformError(
                'run.platform = "ascend", and torch_npu sees no device. Check `npu-smi info`, that /dev/davinci* are '
                "in the container, and ASCEND_RT_VISIBLE_DEVICES."
            )

    def cann_version(self) -> str | None:
        """The version of the toolkit that the environment points to; None where there is none."""
        home = Path(os.environ.get("ASCEND_HOME_PATH", CANN_HOME))
        for info in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
            for line in info.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition("=")
                if name == "version":
                    return value.strip()
        return None

    def device_count(self) -> int:
        return _npu().device_count()

    def facts(self) -> Mapping[str, str]:
        version = self.cann_version()
        if version is None or not version.startswith(CANN):
            raise PlatformError(
                f"CANN {version or '(no version found)'} is installed under "
                f"{os.environ.get('ASCEND_HOME_PATH', CANN_HOME)}, not {' or '.join(CANN)}. See ascend/README.md."
            )
        smi = shutil.which("npu-smi")
        return {"CANN": version, "driver": smi or "npu-smi is not on the path: the driver cannot be told"}

    def environment(self) -> Sequence[EnvVar]:
        return (
            EnvVar(PLATFORM_ENV, self.name, "our plugins know the run's platform"),
            EnvVar("VERL_PLATFORM", self.verl_platform, 'verl\'s name for it; "npu" is not registered'),
            EnvVar(
                "VLLM_ASCEND_ENABLE_NZ",
                "0",
                "guide; weights are replaced in place at every sync, and vllm-ascend refuses to wake up otherwise",
            ),
            EnvVar(
                "TASK_QUEUE_ENABLE",
                "1",
                "guide; operators are launched from a second thread; level 2 and ACL graphs exclude each other",
            ),
            EnvVar(
                "HCCL_OP_EXPANSION_MODE",
                "AIV",
                "guide; collectives are driven by vector cores, which also lets vllm-ascend capture more graphs",
                forced=False,
            ),
            EnvVar(
                "TORCHDYNAMO_DISABLE",
                "1",
                "guide, also in its edition for vllm-ascend 0.18; Megatron's small compiled functions stay eager",
                forced=False,
            ),
            EnvVar(
                "HCCL_CONNECT_TIMEOUT",
                "1800",
                "s; a rank that loads its weights late must not end the others, whose default patience is 120 s",
                forced=False,
            ),
            EnvVar("TOKENIZERS_PARALLELISM", "false", "its threads die in forked workers, with a warning each"),
        )

    def patches(self) -> Sequence[Patch]:
        return (STORE_PATCH, MICRO_BATCH_PATCH)  # the second where memory.recompute = "auto" asks for it

    def mapping(self) -> str:
        return limits.markdown()

    def tested_versions(self) -> Sequence[str]:
        return VERSIONS

    def check_settings(self, config: RunConfig) -> None:
        super().check_settings(config)
        limits.check(config)
        _check_positions(config)
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1" and not self.rollout.enforce_eager:
            raise ConfigError(
                "ASCEND_LAUNCH_BLOCKING = 1 is exported, and vllm-ascend refuses it with ACL graphs. Unset it."
            )
        if isinstance(config, RlConfig) and "expandable_segments:True" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""):
            raise ConfigError(
                "PYTORCH_NPU_ALLOC_CONF has expandable_segments:True, which vllm-ascend's memory pool refuses. "
                "Unset it: verl switches it by itself while the actor trains."
            )

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
            # verl goes on without it, and Megatron-core then fails on its first CUDA call.
            raise PlatformError(
                f"MindSpeed cannot be imported: {error}. Install the version in ascend/README.md beside Megatron-core."
            ) from error

    def set_device(self, local_rank: int) -> None:
        _npu().set_device(local_rank)

    def synchronize(self) -> None:
        _npu().synchronize()

    def peak_memory_gib(self) -> float:
        return _npu().max_memory_allocated() / 2**30

    def rollout_engine_kwargs(self) -> dict[str, Any]:
        return {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}

    def sglang_command(self, *args: Any, **kwargs: Any) -> list[str]:
        raise PlatformError(
            '`retool eval` starts a SGLang server, and run.platform = "ascend" has none. Validate in training '
            "([validation]), or evaluate the export on a CUDA or CPU machine."
        )


def _npu() -> Any:
    import torch

    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it


def _check_positions(config: RunConfig) -> None:
    """Raise ConfigError for scaled positions, which a patch that is not used here applies."""
    path = config.model.path
    values = read_config(path) if Path(path).exists() or is_hub_name(path) else {}
    kind = rope_of_config(values).kind
    if kind != "default":
        raise ConfigError(
            f"{config.source}: {path} has positions of type {kind}, and nothing has shown that training on an NPU "
            "scales them. Take a model without."
        )

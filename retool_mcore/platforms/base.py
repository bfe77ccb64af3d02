"""The interface of a platform (CPU, CUDA, Ascend): one class each, with records of its facts."""

import importlib
import importlib.util
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar

from retool_mcore.config import EvaluationConfig, JobConfig, RunConfig, ToolLoop
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.patches import Patch, Seam, requirement
from retool_mcore.platforms.rollout_engines import RolloutEngine

PLATFORMS = {  # name -> module:class, imported on demand; detect_platform() takes the last match
    "cpu": "retool_mcore.platforms.cpu.platform:Cpu",
    "cuda": "retool_mcore.platforms.cuda.platform:Cuda",
    "ascend": "ascend.adapter:Ascend",
}
WITHOUT_DEVICES = "cpu"
SGLANG_PLUGINS = "sglang.srt.plugins"  # SGLang's entry point group; ours is sglang_plugin.load
PREFILLS_ENV = "RETOOL_BATCH_PREFILLS"  # "0": rollout.batch_prefills is off
# Options of Megatron's TransformerConfig without CUDA. Megatron-Bridge enables these kernels, some
# of them only for some families.
NO_FUSED_KERNELS = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
}
PLATFORM_ENV = "RETOOL_PLATFORM"  # the run's platform, for all its processes including Ray's


@dataclass(frozen=True)
class EnvVar:
    """An environment variable that every process of a run needs."""

    name: str
    value: str
    reason: str
    forced: bool = True  # False: a value that the user exported takes precedence


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device's names in torch, verl and Ray, and its peak speed."""

    name: str  # in torch and verl
    comm_backend: str  # backend of torch.distributed.init_process_group
    ray_resource: str  # Ray resource of one training process's device
    peak_flops: float | None  # dense bfloat16 FLOP/s of one device, for MFU; None: unknown


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How Megatron is configured on this platform; read by verl/keys."""

    dtypes: tuple[str, ...]  # valid values of model.dtype, the usual one first
    engine_config_class: str  # Hydra _target_ of verl's Megatron engine configuration
    external_lib: str | None = None  # module that registers engines with verl (model.external_lib)
    transformer_options: Mapping[str, Any]  # for Megatron's TransformerConfig: the available kernels
    ddp_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for DistributedDataParallelConfig


@dataclass(frozen=True, kw_only=True)
class RolloutFacts:
    """How the rollout engine starts and receives weights; read by verl/keys and `retool eval`."""

    engine: RolloutEngine
    free_cache_engine: bool  # whether the engine frees its memory while the actor trains
    enforce_eager: bool  # whether the engine runs without CUDA graphs
    # How weights reach engines on other devices: name of verl's checkpoint engine, and the module
    # that registers it, None if verl does.
    weight_transport: tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a run needs from the host.

    Preflight reads it; verl/keys and `retool eval` read has_devices.
    """

    shm_gib: float = 16.0  # /dev/shm, for Ray's object store and the data of a weight sync
    open_files: int = 65_536  # as Ray recommends for clusters
    has_devices: bool = True  # False: processes share the cores, and Ray counts logical devices
    min_address_space_gib: int = 32  # virtual memory of a process; not measured on devices


class Platform(ABC):
    """A kind of machine: its facts, and the code that depends on it."""

    name: ClassVar[str]
    install: ClassVar[str]  # command that installs its packages
    verl_platform: ClassVar[str]  # the value of VERL_PLATFORM
    device: ClassVar[DeviceFacts]
    training: ClassVar[TrainingFacts]
    rollout: ClassVar[RolloutFacts]
    host: ClassVar[HostFacts] = HostFacts()

    @abstractmethod
    def check_machine(self) -> None:
        """Raise PlatformError if this machine cannot run the platform."""

    @abstractmethod
    def environment(self) -> Sequence[EnvVar]:
        """The environment variables of every process of a run."""

    @abstractmethod
    def patches(self) -> Sequence[Patch]:
        """All patches of the platform in any process, for `retool preflight` and tests.

        Sorted by library as in ``sorted_by_library``; within a library, the most important first.
        """

    def seams(self) -> Sequence[Seam]:
        """Private names that the platform's code depends on, for `retool preflight`."""
        return ()

    def sglang_patches(self) -> Sequence[Patch]:
        """The subset of ``patches()`` that SGLang's processes apply (sglang_plugin)."""
        return ()

    def weight_sync_patches(self) -> Sequence[Patch]:
        """The subset of ``patches()`` for workers that share their devices with an engine."""
        return ()

    def device_count(self) -> int:
        """Number of this machine's devices that are visible to this process."""
        import torch

        return torch.accelerator.device_count()

    def facts(self) -> Mapping[str, str]:
        """Versions of driver, NCCL and the like, for `retool preflight`.

        Raises PlatformError if one of them is unsuitable.
        """
        return {}

    def mapping(self) -> str:
        """How a CUDA run's settings map to this platform: a Markdown table for `retool plan`.

        Empty if the platform maps no setting.
        """
        return ""

    def has_transformer_option(self, name: str) -> bool:
        """Whether Megatron's TransformerConfig has this option on the platform."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        return name in TransformerConfig.__dataclass_fields__

    def tested_versions(self) -> Sequence[str]:
        """Requirements that pip does not install with the platform's extra, in pip's form.

        `retool preflight` checks them.
        """
        return (requirement("megatron-bridge"),)

    @abstractmethod
    def activate(self) -> None:
        """Check the machine, set the environment and apply the patches that every process needs.

        Call it before this process uses torch.distributed, megatron or verl. Further calls do
        nothing. Raises PlatformError.
        """

    @abstractmethod
    def rollout_engine_kwargs(self) -> dict[str, Any]:
        """Server arguments for verl's rollout engine, in addition to verl's own."""

    def sglang_command(
        self,
        model_path: str,
        port: int,
        *,
        dtype: str,
        max_running_requests: int,
        tp: int = 1,
        engine_args: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The command that starts a standalone SGLang server on 127.0.0.1, for evaluation.

        Run it with the environment ``process_env()``. ``engine_args``: fields of SGLang's
        ServerArgs; they override ``rollout_engine_kwargs()``.
        """
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", model_path, "--dtype", dtype, "--tp-size", str(tp)]
        command += ["--max-running-requests", str(max_running_requests)]
        if self.rollout.enforce_eager:
            command.append("--disable-cuda-graph")
        return command + sglang_options({**self.rollout_engine_kwargs(), **(engine_args or {})})

    def only_devices(self, indices: Sequence[int]) -> dict[str, str]:
        """The environment that limits a process to the ``indices`` of our visible devices."""
        raise PlatformError(f'run.platform = "{self.name}" has no devices to assign to servers.')

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Make device ``local_rank`` of this node the process's current device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished this process's work, for timing."""

    def check_settings(self, config: RunConfig) -> None:
        """Raise ConfigError for a setting that this platform does not support.

        Raises PlatformError if a package that the setting needs is not installed.
        """
        self.check_dtype(config)

    def remarks(self, config: RunConfig) -> Sequence[str]:
        """Warnings about settings that work but do not help on this machine, each with a remedy."""
        return ()

    def check_dtype(self, config: JobConfig) -> None:
        """Raise ConfigError if the platform cannot train in model.dtype."""
        if config.model.dtype not in self.training.dtypes:
            known = " or ".join(f'"{dtype}"' for dtype in self.training.dtypes)
            raise ConfigError(
                f'{config.source}: model.dtype = "{config.model.dtype}" is not supported on platform "{self.name}". '
                f"Use {known}."
            )

    def check_room(self, config: RunConfig) -> None:  # noqa: B027  optional
        """Raise ConfigError if this machine is too small for the run's processes.

        For machines without devices; elsewhere the number of devices is the limit.
        """

    def extend_verl(self) -> None:  # noqa: B027  verl knows the others
        """Register the platform with verl, if verl lacks it; runs in each process with verl."""

    def server_devices(self, config: EvaluationConfig) -> list[list[int]]:
        """Device indices of each rollout server of an evaluation, rollout.engine_tp per server.

        Uses this machine's devices, at most cluster.gpus_per_node. Raises ConfigError if they are
        too few for one server.
        """
        tp, present = config.rollout.engine_tp, self.device_count()
        count = min(present, config.cluster.gpus_per_node) // tp
        if not count:
            raise ConfigError(
                f"{config.source}: rollout.engine_tp = {tp} is more than the {present} devices that an evaluation can "
                f"use on this machine (cluster.gpus_per_node = {config.cluster.gpus_per_node}). Lower it, or use a "
                "machine with more devices."
            )
        return [list(range(first, first + tp)) for first in range(0, count * tp, tp)]

    @abstractmethod
    def peak_memory_gib(self) -> float:
        """Peak device memory that this process allocated, in GiB.

        On `cpu`, the peak resident set size.
        """

    def gpu_percent(self) -> float | None:
        """Percentage of the last second in which the device was busy; None if unknown."""
        return None

    def process_env(self) -> dict[str, str]:
        """``environment()`` as name -> value, after applying values that the user exported."""
        return {
            var.name: var.value if var.forced else os.environ.get(var.name, var.value) for var in self.environment()
        }


def engine_environment(loop: ToolLoop) -> dict[str, str]:
    """Environment variables of an engine's processes, in addition to ``Platform.process_env``."""
    return {} if loop.batch_prefills else {PREFILLS_ENV: "0"}


def training_patches() -> tuple[Patch, ...]:
    """The patches of every process that trains with Megatron, on CPU and CUDA."""
    from retool_mcore.platforms import patches_bridge, patches_megatron, patches_verl

    return (*patches_verl.TRAINING_PATCHES, patches_bridge.MODEL_PATCH, patches_megatron.WRITER_PATCH)


def sorted_by_library(patches: Iterable[Patch]) -> list[Patch]:
    """Sort the patches by library, keeping their order within each library."""
    order = ("verl", "megatron", "sglang", "torch", "transformer_engine")
    return sorted(patches, key=lambda patch: order.index(patch.changes[0].target.partition(".")[0]))


def sglang_options(args: Mapping[str, Any]) -> list[str]:
    """Convert fields of SGLang's ServerArgs into command-line options.

    True becomes a flag, False is omitted, a table becomes JSON.
    """
    options: list[str] = []
    for name, value in args.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options += [option] if value else []
        elif isinstance(value, list):
            options += [option, *map(str, value)]
        else:
            options += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return options


def check_entry_points(*groups: str) -> None:
    """Raise PlatformError if verl or SGLang would not find our plugin.

    Both would silently run without it.
    """
    for group in groups:
        ours = entry_points(group=group).select(name="retool_mcore")
        if not any(importlib.util.find_spec(entry.module) for entry in ours):
            raise PlatformError(
                f"the installed metadata of retool_mcore has no plugin of group {group}. Either retool_mcore is not "
                "installed, or the metadata is outdated. Delete any retool_mcore.egg-info in this folder, and run "
                "`make install`."
            )


def get_platform(name: str) -> Platform:
    """The platform for ``name``, a value of run.platform.

    Does not import torch or an engine. Raises PlatformError if the name is unknown or its package
    is missing.
    """
    if name not in PLATFORMS:
        raise PlatformError(f'Unknown run.platform = "{name}". Choose one of: {", ".join(PLATFORMS)}.')
    module_name, _, class_name = PLATFORMS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlatformError(
            f'run.platform = "{name}" needs the module {module_name}, but {error.name} is not installed. '
            "Run `make install`."
        ) from error
    platform: Platform = getattr(module, class_name)()
    return platform


def detect_platform() -> Platform:
    """The platform of this machine's devices; `cpu` if it has none."""
    for name in reversed(PLATFORMS):
        try:
            platform = get_platform(name)
            platform.check_machine()
        except PlatformError:
            continue
        return platform
    return get_platform(WITHOUT_DEVICES)

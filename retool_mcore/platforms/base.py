"""What differs between CPU, CUDA and Ascend machines: one class for each, with records of facts."""

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
from retool_mcore.platforms.patches import Patch, Seam
from retool_mcore.platforms.rollout_engines import RolloutEngine

PLATFORMS = {  # name -> module:class, imported on demand; detect_platform() takes the last that fits
    "cpu": "retool_mcore.platforms.cpu.platform:Cpu",
    "cuda": "retool_mcore.platforms.cuda.platform:Cuda",
    "ascend": "ascend.adapter:Ascend",
}
WITHOUT_DEVICES = "cpu"
SGLANG_PLUGINS = "sglang.srt.plugins"  # SGLang's group of entry points; ours is sglang_plugin.load
PREFILLS_ENV = "RETOOL_BATCH_PREFILLS"  # "0": rollout.batch_prefills is off
PLATFORM_ENV = "RETOOL_PLATFORM"  # tells every process of a run, Ray's too, which platform it belongs to


@dataclass(frozen=True)
class EnvVar:
    """An environment variable every process of a run must have."""

    name: str
    value: str
    reason: str
    forced: bool = True  # False: a value the user exported wins


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What torch, verl and Ray call the device, and how fast it is."""

    name: str  # torch's and verl's
    comm_backend: str  # of torch.distributed.init_process_group
    ray_resource: str  # the Ray resource that stands for one training process's device
    peak_flops: float | None  # dense bfloat16 flop/s of one device, for MFU; None: not known


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How Megatron is built here; read by verl/keys."""

    dtypes: tuple[str, ...]  # what model.dtype may be, the usual one first
    engine_config_class: str  # Hydra _target_ of verl's Megatron engine configuration
    external_lib: str | None = None  # module that registers engines with verl (model.external_lib)
    transformer_options: Mapping[str, Any]  # of Megatron's TransformerConfig: kernels that this machine has
    ddp_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of its DistributedDataParallelConfig


@dataclass(frozen=True, kw_only=True)
class RolloutFacts:
    """How the rollout engine starts and gets its weights; read by verl/keys and the evaluation."""

    engine: RolloutEngine
    free_cache_engine: bool  # it gives its memory back while the actor trains
    enforce_eager: bool  # it runs without captured graphs
    # How weights reach engines on other devices: verl's checkpoint engine, and the module that
    # registers it if verl does not.
    weight_transport: tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a run needs of the machine around its devices; read by preflight."""

    shm_gib: float = 16.0  # Ray's object store and the data of a weight update
    open_files: int = 65_536  # Ray's own advice for clusters
    has_devices: bool = True  # False: processes share the cores, and Ray counts made-up devices
    least_addresses_gib: int = 32  # that a process maps, used or not; not measured on devices


class Platform(ABC):
    """A kind of machine: its facts, one record for each reader, and what differs on it."""

    name: ClassVar[str]
    install: ClassVar[str]  # the command that installs what it needs
    verl_platform: ClassVar[str]  # the value of VERL_PLATFORM
    device: ClassVar[DeviceFacts]
    training: ClassVar[TrainingFacts]
    rollout: ClassVar[RolloutFacts]
    host: ClassVar[HostFacts] = HostFacts()

    @abstractmethod
    def check_machine(self) -> None:
        """Raise PlatformError when this machine cannot run the platform."""

    @abstractmethod
    def environment(self) -> Sequence[EnvVar]:
        """The environment of every process of a run, each with its reason."""

    @abstractmethod
    def patches(self) -> Sequence[Patch]:
        """Every patch of the platform, in any kind of process; for `retool preflight` and tests.

        By library in the order verl, Megatron, mbridge, SGLang, torch, the most important first.
        """

    def seams(self) -> Sequence[Seam]:
        """Private names that the platform's code depends on; listed by `retool preflight`."""
        return ()

    def sglang_patches(self) -> Sequence[Patch]:
        """The patches, a subset of patches(), that SGLang's processes apply (sglang_plugin)."""
        return ()

    def weight_sync_patches(self) -> Sequence[Patch]:
        """The patches, a subset of patches(), of workers with an engine on their devices."""
        return ()

    def device_count(self) -> int:
        """Devices of this machine that this process may use."""
        import torch

        return torch.accelerator.device_count()

    def facts(self) -> Mapping[str, str]:
        """Driver, collectives and the like, for `retool preflight`.

        Raises PlatformError when one of them will not do.
        """
        return {}

    def mapping(self) -> str:
        """How a CUDA run's settings map to this platform, as a Markdown table for `retool plan`.

        Empty where nothing is mapped.
        """
        return ""

    def has_transformer_option(self, name: str) -> bool:
        """Whether Megatron's TransformerConfig has this option on the platform."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        return name in TransformerConfig.__dataclass_fields__

    def tested_versions(self) -> Sequence[str]:
        """Requirements of what pip does not install with the platform's extra.

        `retool preflight` checks them.
        """
        return ()

    @abstractmethod
    def activate(self) -> None:
        """Make this process one of the platform's.

        Call it first, before torch.distributed, megatron and verl are used.

        Checks the machine, sets the environment and applies the patches that every process needs.
        Calling it again does nothing. Raises PlatformError.
        """

    @abstractmethod
    def rollout_engine_kwargs(self) -> dict[str, Any]:
        """Server settings for verl's rollout engine, beyond what verl itself sets."""

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

        Run it in process_env(). ``engine_args`` are fields of SGLang's ServerArgs by name; they win
        over ``rollout_engine_kwargs()``.
        """
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", model_path, "--dtype", dtype, "--tp-size", str(tp)]
        command += ["--max-running-requests", str(max_running_requests)]
        if self.rollout.enforce_eager:
            command.append("--disable-cuda-graph")
        return command + sglang_options({**self.rollout_engine_kwargs(), **(engine_args or {})})

    def only_devices(self, indices: Sequence[int]) -> dict[str, str]:
        """The environment that shows a process only these of the devices that this one sees."""
        raise PlatformError(f'run.platform = "{self.name}" has no devices to share out among servers.')

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Bind this process to its device of the node."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished this process's work; for clocks."""

    def check_settings(self, config: RunConfig) -> None:
        """Raise ConfigError for a setting without a counterpart on this platform.

        Raises PlatformError when the counterpart is not installed.
        """
        self.check_dtype(config)

    def remarks(self, config: RunConfig) -> Sequence[str]:
        """Settings that work here and bring less than they are for, each with what to do."""
        del config
        return ()

    def check_dtype(self, config: JobConfig) -> None:
        """Raise ConfigError when model.dtype is not one that this kind of machine trains in."""
        if config.model.dtype not in self.training.dtypes:
            known = " or ".join(f'"{dtype}"' for dtype in self.training.dtypes)
            raise ConfigError(
                f'{config.source}: model.dtype = "{config.model.dtype}" does not train on platform "{self.name}". '
                f"Use {known}."
            )

    def check_room(self, config: RunConfig) -> None:  # noqa: B027  where devices are counted there is no more to ask
        """Raise ConfigError when this machine has no room for that many processes.

        Other code counts devices; this is for machines without them.
        """

    def extend_verl(self) -> None:  # noqa: B027  verl knows the others
        """Register the platform with verl if verl lacks it, in every process that imports verl."""

    def server_devices(self, config: EvaluationConfig) -> list[list[int]]:
        """The devices of each rollout server of an evaluation, rollout.engine_tp for each.

        It uses this machine's devices, at most those of a node of [cluster]. Raises ConfigError
        when they are too few for one server.
        """
        tp, present = config.rollout.engine_tp, self.device_count()
        count = min(present, config.cluster.gpus_per_node) // tp
        if not count:
            raise ConfigError(
                f"{config.source}: rollout.engine_tp = {tp} is more than the {present} devices that this machine "
                f"shows, of cluster.gpus_per_node = {config.cluster.gpus_per_node}. Lower it, or evaluate where there "
                "are more."
            )
        return [list(range(first, first + tp)) for first in range(0, count * tp, tp)]

    @abstractmethod
    def peak_memory_gib(self) -> float:
        """The most memory this process has held: the allocator's peak.

        On `cpu` it is the peak of the resident set.
        """

    def gpu_percent(self) -> float | None:
        """Percentage of the last second in which the device was busy; None if nothing counts it."""
        return None

    def process_env(self) -> dict[str, str]:
        """``environment()`` as name -> value, with the user's own values where those win."""
        return {
            var.name: var.value if var.forced else os.environ.get(var.name, var.value) for var in self.environment()
        }


def engine_environment(loop: ToolLoop) -> dict[str, str]:
    """What an engine's processes need in their environment, beyond ``Platform.process_env``."""
    return {} if loop.batch_prefills else {PREFILLS_ENV: "0"}


def training_patches() -> tuple[Patch, ...]:
    """The patches that every process applies that trains with Megatron, on CPU and CUDA."""
    from retool_mcore.platforms import patches_mbridge, patches_megatron, patches_verl

    return (
        *patches_verl.TRAINING_PATCHES,
        *patches_megatron.MEGATRON_PATCHES,
        *patches_mbridge.MBRIDGE_PATCHES,
    )


def listed(patches: Iterable[Patch]) -> list[Patch]:
    """The patches by library; those of one library stay in their order."""
    order = ("verl", "megatron", "mbridge", "sglang", "torch", "transformer_engine")
    return sorted(patches, key=lambda patch: order.index(patch.changes[0].target.partition(".")[0]))


def sglang_options(args: Mapping[str, Any]) -> list[str]:
    """Turn fields of SGLang's ServerArgs into options of its command.

    True becomes a flag, False nothing, a table JSON.
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

    Both would silently go on without it.
    """
    for group in groups:
        ours = entry_points(group=group).select(name="retool_mcore")
        if not any(importlib.util.find_spec(entry.module) for entry in ours):
            raise PlatformError(
                f"the installed metadata of retool_mcore names no plugin of group {group}: it is not installed, was "
                "installed from an older source, or a stale retool_mcore.egg-info lies here. Delete that and run "
                "`make install`."
            )


def get_platform(name: str) -> Platform:
    """The platform object for a name in a run's configuration.

    Importing it loads no torch and no engine. Raises PlatformError for an unknown name or one whose
    package is missing.
    """
    if name not in PLATFORMS:
        raise PlatformError(f'run.platform = "{name}" is not a platform. Known: {", ".join(PLATFORMS)}.')
    module_name, _, class_name = PLATFORMS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlatformError(
            f'run.platform = "{name}" needs the module {module_name}, and {error.name} is not installed. '
            "Run `make install`."
        ) from error
    platform: Platform = getattr(module, class_name)()
    return platform


def detect_platform() -> Platform:
    """The platform of this machine's devices; `cpu` where it has none."""
    for name in reversed(PLATFORMS):
        try:
            found = get_platform(name)
            found.check_machine()
        except PlatformError:
            continue
        return found
    return get_platform(WITHOUT_DEVICES)


def without_devices() -> Platform:
    """The platform with which verl imports on a machine without devices, such as a login node."""
    return get_platform(WITHOUT_DEVICES)

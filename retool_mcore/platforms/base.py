"""What differs between CPU, CUDA and Ascend machines, as one small class per platform."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

from retool_mcore.config import RlConfig, RunConfig
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.records import Device, Host, Rollout, Training

PLATFORMS = {  # name -> module:class, imported only when asked for; detect_platform() takes the last that fits
    "cpu": "retool_mcore.platforms.cpu.platform:Cpu",
    "cuda": "retool_mcore.platforms.cuda.platform:Cuda",
    "ascend": "ascend.adapter:Ascend",
}
WITHOUT_DEVICES = "cpu"
SGLANG_PLUGINS = "sglang.srt.plugins"  # SGLang's group of entry points; ours is sglang_plugin.load
PLATFORM_ENV = "RETOOL_PLATFORM"  # tells every process of a run, Ray's too, which platform it belongs to


@dataclass(frozen=True)
class EnvVar:
    """An environment variable every process of a run must have."""

    name: str
    value: str
    reason: str
    forced: bool = True  # False: a value the user exported wins


class Platform(ABC):
    """A kind of machine: its facts, one record for each reader, and what is done differently on it."""

    name: ClassVar[str]
    verl_platform: ClassVar[str]  # the value of VERL_PLATFORM
    device: ClassVar[Device]
    training: ClassVar[Training]
    rollout: ClassVar[Rollout]
    host: ClassVar[Host] = Host()

    @abstractmethod
    def check_machine(self) -> None:
        """Raise PlatformError when this machine cannot run the platform."""

    @abstractmethod
    def environment(self) -> Sequence[EnvVar]:
        """The environment of every process of a run, each with its reason."""

    @abstractmethod
    def patches(self) -> Sequence[Patch]:
        """Every patch the platform makes, in any kind of process; for `retool preflight` and the
        tests.
        """

    def sglang_patches(self) -> Sequence[Patch]:
        """Those of patches() that SGLang's processes apply, through sglang_plugin."""
        return ()

    def device_count(self) -> int:
        """Devices of this machine that this process may use."""
        import torch

        return torch.accelerator.device_count()

    def facts(self) -> Mapping[str, str]:
        """Driver, collectives and their like, for `retool preflight`. Raises PlatformError when one
        will not do.
        """
        return {}

    def mapping(self) -> str:
        """How a CUDA run's settings are mapped, as a Markdown table for `retool plan`; "" where
        nothing is.
        """
        return ""

    def tested_versions(self) -> Sequence[str]:
        """Requirements of what pip does not install with the extra of the platform's name; for
        `retool preflight`.
        """
        return ()

    @abstractmethod
    def activate(self) -> None:
        """Make this process one of the platform's. Call it first, before torch.distributed,
        megatron and verl are used.

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
        """The command that starts a standalone SGLang server on 127.0.0.1, for evaluation. Run it
        in process_env().

        ``engine_args``: of SGLang's ServerArgs, by their names; ``rollout_engine_kwargs()`` come
        first.
        """
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", model_path, "--dtype", dtype, "--tp-size", str(tp)]
        command += ["--max-running-requests", str(max_running_requests)]
        if self.rollout.enforce_eager:
            command.append("--disable-cuda-graph")
        return command + sglang_options({**self.rollout_engine_kwargs(), **(engine_args or {})})

    def only_devices(self, indices: Sequence[int]) -> dict[str, str]:
        """The environment in which a process sees these of the devices that this one sees."""
        raise PlatformError(f'run.platform = "{self.name}" has no devices to share out among servers.')

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Bind this process to its device of the node."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done what this process has asked of it; for clocks."""

    def check_settings(self, config: RunConfig) -> None:
        """Raise ConfigError for a setting without a counterpart here, PlatformError when it is not
        installed.
        """
        self.check_dtype(config)

    def check_dtype(self, config: RunConfig) -> None:
        """Raise ConfigError when model.dtype is not one of this kind of machine's, whatever this
        machine is.
        """
        if config.model.dtype not in self.training.dtypes:
            known = " or ".join(f'"{dtype}"' for dtype in self.training.dtypes)
            raise ConfigError(
                f'{config.source}: model.dtype = "{config.model.dtype}" does not train on platform "{self.name}". '
                f"Use {known}."
            )

    def check_room(self, config: RunConfig) -> None:  # noqa: B027  where devices are counted there is no more to ask
        """Raise ConfigError when this machine is too small for so many processes; devices are
        counted elsewhere.
        """

    def extend_verl(self) -> None:  # noqa: B027  verl knows the others
        """Register the platform with verl, in every process of a run that imports verl. For those
        verl lacks.
        """

    def server_devices(self, config: RlConfig) -> list[list[int]]:
        """The devices of each rollout server of an evaluation: rollout.engine_tp of [cluster]'s
        node that are here.

        Raises ConfigError when this machine has too few for one.
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
        """The most memory of the device this process has held: allocator's peak, on `cpu` the
        resident set's.
        """

    def gpu_percent(self) -> float | None:
        """Share of the last second in which this process's device was busy; None where nothing
        counts it.
        """
        return None

    def process_env(self) -> dict[str, str]:
        """``environment()`` as name -> value, with the user's own values where those win."""
        return {
            var.name: var.value if var.forced else os.environ.get(var.name, var.value) for var in self.environment()
        }


def sglang_options(args: Mapping[str, Any]) -> list[str]:
    """Fields of SGLang's ServerArgs as options of its command: a flag for True, nothing for False,
    JSON for a table.
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
    """Raise PlatformError where verl or SGLang would not find our plugin: both then go on silently
    without it.
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
    """The platform object of a name in a run's configuration. Importing it loads no torch and no
    engine.

    Raises PlatformError for an unknown name or one whose package is missing.
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
    """The platform of the devices that this machine has; the laptop's where it has none."""
    for name in reversed(PLATFORMS):
        try:
            found = get_platform(name)
            found.check_machine()
        except PlatformError:
            continue
        return found
    return get_platform(WITHOUT_DEVICES)


def without_devices() -> Platform:
    """The platform whose verl imports on a machine without devices, a login node for one."""
    return get_platform(WITHOUT_DEVICES)

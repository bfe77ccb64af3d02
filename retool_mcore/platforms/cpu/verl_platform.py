"""verl's platform `cpu`, which VERL_PLATFORM selects."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from retool_mcore.platforms.cpu import device


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU as a verl platform. Ray's "GPU" resource counts training processes.

    The run starts Ray with that many logical GPUs.
    """

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> torch.device:  # type: ignore[override]  # verl passes it on to Tensor.to()
        return device.current_device()

    def device_count(self) -> int:
        return device.device_count()

    def set_device(self, device_index: int) -> None:
        device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        device.synchronize()

    def manual_seed(self, seed: int) -> None:
        device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        device.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: torch's CPU allocator has no such settings."""

    def empty_cache(self) -> None:
        device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: the CPU has no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: the CPU has no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def rollout_env_vars(self) -> dict[str, str]:
        from retool_mcore.platforms.base import get_platform

        return get_platform("cpu").process_env()

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

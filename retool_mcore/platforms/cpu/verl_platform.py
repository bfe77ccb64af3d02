"""verl's platform `cpu`, which VERL_PLATFORM selects, and its device module."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from retool_mcore.platforms.patches import ModuleView

CPU = torch.device("cpu")


def _do_nothing(*_: object, **__: object) -> None:
    """Replaces functions that a CPU does not need, such as for streams, caches and profilers."""


def _resident_bytes(device: object = None) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(device: object = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free_and_total_bytes(device: object = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed CUDA


# torch.cpu with the names of torch.cuda that verl uses
DEVICE = ModuleView(
    torch.cpu,
    current_device=lambda: CPU,
    set_device=_do_nothing,
    empty_cache=_do_nothing,
    ipc_collect=_do_nothing,
    reset_peak_memory_stats=_do_nothing,  # nothing resets the operating system's peak
    memory_stats=lambda device=None: dict[str, Any](),
    memory_allocated=_resident_bytes,
    memory_reserved=_resident_bytes,
    max_memory_allocated=_peak_resident_bytes,
    max_memory_reserved=_peak_resident_bytes,
    mem_get_info=_free_and_total_bytes,
    get_device_name=lambda device=None: "cpu",
    is_bf16_supported=lambda: True,
    manual_seed=_manual_seed,
    manual_seed_all=_manual_seed,
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU as a verl platform. Ray's "GPU" resource counts training processes.

    The run starts Ray with that many logical GPUs.
    """

    device_module: ModuleType = DEVICE
    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> torch.device:  # type: ignore[override]  # verl passes it on to Tensor.to()
        return CPU

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        _manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        _manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def rollout_env_vars(self) -> dict[str, str]:
        from retool_mcore.platforms.base import get_platform

        return get_platform("cpu").process_env()

    def is_ipc_supported(self) -> bool:
        return False

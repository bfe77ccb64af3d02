"""verl's platform `cpu`, which VERL_PLATFORM selects, and its device module."""

import resource
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from retool_mcore.platforms.patches import ModuleView

CPU = torch.device("cpu")


def _do_nothing(*_: object, **__: object) -> None:
    """Replaces functions that a CPU does not need, such as for streams, caches and profilers."""


def _always(value: Any) -> Any:
    """A method or a function that returns ``value``."""
    return lambda *_, **__: value


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
    current_device=_always(CPU),
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
    get_device_name=_always("cpu"),
    is_bf16_supported=_always(True),
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

    device_name = vendor_name = "cpu"  # type: ignore[assignment]  # properties in verl's class
    device_module: ModuleType = DEVICE
    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing
    nvtx_range = _always(nullcontext())
    manual_seed = manual_seed_all = staticmethod(_manual_seed)  # type: ignore[assignment]
    is_available = _always(True)
    current_device = _always(CPU)  # verl passes it to Tensor.to()
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")
    is_ipc_supported = _always(False)

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def ray_noset_envvars(self) -> list[str]:
        return []

    def rollout_env_vars(self) -> dict[str, str]:
        from retool_mcore.platforms.base import get_platform

        return get_platform("cpu").process_env()

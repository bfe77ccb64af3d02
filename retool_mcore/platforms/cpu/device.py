"""The device module of verl's platform on a CPU machine, instead of ``torch.cuda``."""

import contextlib
import resource
from typing import Any

import psutil
import torch


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> torch.device:
    return torch.device("cpu")


def set_device(device: object) -> None:
    """Do nothing: there is one device."""


def synchronize(device: object = None) -> None:
    """Do nothing: the CPU works synchronously."""


def empty_cache() -> None:
    """Do nothing: torch's CPU allocator has no cache."""


def ipc_collect() -> None:
    """Do nothing: processes share no device memory."""


def reset_peak_memory_stats(device: object = None) -> None:
    """Do nothing: the operating system's peak cannot be reset."""


def memory_allocated(device: object = None) -> int:
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: object = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total memory of the machine, in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_stats(device: object = None) -> dict[str, Any]:
    return {}


def get_device_name(device: object = None) -> str:
    return "cpu"


def is_bf16_supported() -> bool:
    return True


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def stream(stream: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()

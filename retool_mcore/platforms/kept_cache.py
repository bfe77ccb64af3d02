"""What training has cached stays cached through a weight sync where the engine has room beside it.

verl has each actor give its cached memory back before its engine wakes. Unmapping the 30 GB that a
0.5B model's update leaves takes 0.13 s, and the next update maps them again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.platforms.patches import ModuleView, Patch
from retool_mcore.platforms.versions import requirement

SPARE = 1 / 6  # of a device, for what an engine computes in: 13 GiB of 80, as SGLang's own default leaves
LAST = ("kv_cache",)  # an engine wakes in parts, and this is the last


class Waking:
    """What the engine on this device was seen to take, in bytes, each time that it woke."""

    def __init__(self) -> None:
        self._takes: dict[tuple[str, ...], int] = {}
        self._awake: set[tuple[str, ...]] = set()

    def woke(self, part: tuple[str, ...], took: int) -> None:
        self._takes[part] = max(took, self._takes.get(part, 0))
        self._awake.add(part)
        if part == LAST:  # asleep again by the next sync
            self._awake.clear()

    def has_room(self, free: int, total: int) -> bool:
        """Whether ``free`` of a device's ``total`` bytes do for what still sleeps, and to spare.

        False before it has woken once.
        """
        asleep = sum(took for part, took in self._takes.items() if part not in self._awake)
        return LAST in self._takes and free >= asleep + total * SPARE


_engine = Waking()


def _kept_where_there_is_room(original: Callable[[], ModuleType]) -> Callable[[], Any]:
    @wraps(original)
    def get_torch_device() -> Any:
        device: Any = original()

        def empty_cache() -> None:
            if not _engine.has_room(*device.mem_get_info()):
                device.empty_cache()

        return ModuleView(device, empty_cache=empty_cache)

    return get_torch_device


def _seen_to_wake(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Look at how much less is free when the engine has woken.

    The rank that wakes an engine on several devices tells the others, which do not wait for it.
    """

    @wraps(original)
    async def resume(self: Any, tags: Sequence[str]) -> None:
        before = _not_ours()
        await original(self, tags)
        took, mesh = torch.tensor(before - _not_ours()), self.device_mesh["infer_tp"]
        if mesh.size() > 1:
            dist.all_reduce(took, dist.ReduceOp.MAX, group=mesh.get_group())
        _engine.woke(tuple(tags), int(took))

    return resume


def _not_ours() -> int:
    """The bytes of the device that are free, or this process's torch has."""
    from verl.utils.device import get_torch_device

    device: Any = get_torch_device()
    return device.mem_get_info()[0] + device.memory_reserved()


KEPT_CACHE_PATCHES = (
    *(
        Patch(
            target=f"verl.{user}.get_torch_device",
            replace=_kept_where_there_is_room,
            reason="each weight sync frees all that the update has cached, whatever room the engine has without it",
            applies_to=requirement("verl"),
            remove_when="verl frees no more than what the engine lacks",
        )
        for user in ("workers.engine_workers", "utils.megatron_utils")
    ),
    Patch(
        target="verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter.resume",
        replace=_seen_to_wake,
        reason="what an engine takes when it wakes decides whether the actor's cache can stay",
        applies_to=requirement("verl"),
        remove_when="verl frees no more than what the engine lacks",
    ),
)

"""Weights on their way to an SGLang engine on the same device: each bucket is one tensor.

verl hands SGLang a CUDA handle for each matrix, and SGLang opens each. Here a bucket's matrices lie
in one allocation and share its handle. SGLang knows that form as "flattened_bucket". While it loads
one, the next is filled.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement

Named = list[tuple[str, torch.Tensor]]
ALIGNED = 64  # bytes: a matrix starts where any type may
FIRST_BYTES = 1 << 28  # of a sync's first bucket; each later one has twice as many, up to verl's limit
FORMAT = "flattened_bucket"
SENT_S = 0.002  # in which a bucket's request is on its way; filling holds up what would send it


class Bucket:
    """Matrices in one allocation of ``size`` bytes, in the order in which they came."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0
        self.named: Named = []

    def takes(self, tensor: torch.Tensor) -> bool:
        return self._bytes.device == tensor.device and self._used + tensor.nbytes <= self._bytes.numel()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        part = self._bytes[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.named.append((name, part.copy_(tensor)))
        self._used += room(tensor)


def room(tensor: torch.Tensor) -> int:
    """The bytes that a bucket needs for it."""
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _in_one_tensor_each(original: Callable[..., AsyncIterator[Named]]) -> Callable[..., AsyncIterator[Named]]:
    """Copy each weight to its place in a bucket. The original gives each memory of its own."""

    @wraps(original)
    async def get_named_tensor_buckets(
        iterable: Any, bucket_bytes: int, fusion_groups: Sequence[Any] = ()
    ) -> AsyncIterator[Named]:
        from verl.workers.rollout.utils import ensure_async_iterator

        if fusion_groups:  # of DeepSeek-V4, whose parts must not be in two buckets
            async for named in original(iterable, bucket_bytes, fusion_groups):
                yield named
            return
        filled = _filled(ensure_async_iterator(iterable), bucket_bytes)
        named = await anext(filled, None)
        while named is not None:
            following = asyncio.create_task(_fill(filled))
            try:
                yield named
                named = await following
            finally:
                following.cancel()  # where an engine has died

    return get_named_tensor_buckets


async def _filled(iterator: AsyncIterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> AsyncGenerator[Named]:
    size, bucket = min(FIRST_BYTES, bucket_bytes), None
    async for name, tensor in iterator:
        if bucket is not None and not bucket.takes(tensor):
            yield bucket.named
            bucket, size = None, min(2 * size, bucket_bytes)
        if bucket is None:
            bucket = Bucket(max(size, tensor.nbytes), tensor.device)
        bucket.add(name, tensor.detach())
    if bucket is not None:
        yield bucket.named


async def _fill(filled: AsyncGenerator[Named]) -> Named | None:
    """The next bucket, while another task waits for the engine; None at the end.

    Ranks do the same in the same order, as filling gathers experts from others and a bucket's
    handles are gathered before it waits.
    """
    await asyncio.sleep(SENT_S)
    return await anext(filled, None)


def _by_one_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send a bucket of one allocation as it is; any other as the original does.

    verl flushes the engine's cache when all are loaded.
    """

    @wraps(original)
    async def update_weights(
        engine: Any, params_batch: Named, device_mesh_key: str, device_mesh: Any, load_format: str | None = None
    ) -> Any:
        if load_format is not None or not _in_one_allocation(params_batch):
            return await original(engine, params_batch, device_mesh_key, device_mesh, load_format)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        mine: Any = MultiprocessingSerializer.serialize(flattened(params_batch))
        mesh = device_mesh[device_mesh_key]
        first = mesh.get_local_rank() == 0
        of_ranks: list[Any] | None = [None] * mesh.size() if first else None
        dist.gather_object(mine, of_ranks, dst=mesh.mesh.flatten().tolist()[0], group=mesh.get_group())
        if of_ranks is None:
            return None
        return await engine.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=of_ranks, load_format=FORMAT, flush_cache=False)
        )

    return update_weights


def _in_one_allocation(named: Named) -> bool:
    places = {tensor.untyped_storage().data_ptr() for _, tensor in named}
    return len(places) == 1 and all(tensor.is_contiguous() for _, tensor in named)


def flattened(named: Named) -> dict[str, Any]:
    """The bytes of the allocation that the tensors share, and where each lies in them."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    last = named[-1][1]
    used = last.storage_offset() * last.element_size() + last.nbytes
    empty: Any = torch.empty(0, dtype=torch.uint8, device=last.device)
    whole = empty.set_(last.untyped_storage(), 0, (used,))
    metadata = []
    for name, tensor in named:
        start = tensor.storage_offset() * tensor.element_size()
        end, shape = start + tensor.nbytes, tuple(tensor.shape)  # torch.Size is read back several times as slowly
        metadata.append(FlattenedTensorMetadata(name, shape, tensor.dtype, start, end, tensor.nbytes))  # pyright: ignore[reportArgumentType]
    return {"flattened_tensor": whole, "metadata": metadata}


_ADAPTER = "verl.workers.rollout.sglang_rollout.sglang_rollout"
FLAT_BUCKET_PATCHES = (
    Patch(
        target=f"{_ADAPTER}.get_named_tensor_buckets",
        replace=_in_one_tensor_each,
        reason="matrices of a bucket in allocations of their own need a CUDA handle each",
        applies_to=requirement("verl"),
        remove_when="verl sends SGLang flattened buckets",
    ),
    Patch(
        target=f"{_ADAPTER}.sgl_update_weights",
        replace=_by_one_handle,
        reason="each matrix is packed, opened and unpacked by itself, thousands of them in a model with experts",
        applies_to=requirement("verl"),
        remove_when="verl sends SGLang flattened buckets",
    ),
)

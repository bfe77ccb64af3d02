"""Sends each bucket of weights to an SGLang engine on the same device as one tensor.

verl sends SGLang one CUDA handle for each matrix, and SGLang opens every one of them. Here the
matrices of a bucket are copied into one allocation, which needs one handle. SGLang calls this form
"flattened_bucket".
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.versions import requirement

Named = list[tuple[str, torch.Tensor]]
ALIGNED = 64  # bytes: a matrix of any dtype may start at a multiple of it
FORMAT = "flattened_bucket"


def flattened(named: Named) -> dict[str, Any]:
    """Copy the tensors into one allocation, and say where SGLang finds each of them."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    starts, size = [], 0
    for _, tensor in named:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    bucket_B = torch.empty(size, dtype=torch.uint8, device=named[0][1].device)
    metadata = []
    for (name, tensor), start in zip(named, starts, strict=True):
        end, shape = start + tensor.nbytes, tuple(tensor.shape)  # SGLang unpickles torch.Size several times slower
        bucket_B[start:end].view(tensor.dtype).view(shape).copy_(tensor.detach())
        metadata.append(FlattenedTensorMetadata(name, shape, tensor.dtype, start, end, tensor.nbytes))  # pyright: ignore[reportArgumentType]
    return {"flattened_tensor": bucket_B, "metadata": metadata}


def _by_one_handle(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send a bucket as one tensor; the original still sends buckets of another load format.

    The engine keeps its prefix cache until verl flushes it, after the last bucket.
    """

    @wraps(original)
    async def update_weights(
        engine: Any, params_batch: Named, device_mesh_key: str, device_mesh: Any, load_format: str | None = None
    ) -> Any:
        if load_format is not None:
            return await original(engine, params_batch, device_mesh_key, device_mesh, load_format)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        bucket = flattened(params_batch)  # lives until the engine has answered
        mine: Any = MultiprocessingSerializer.serialize(bucket)
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


FLAT_BUCKET_PATCH = Patch(
    target="verl.workers.rollout.sglang_rollout.sglang_rollout.sgl_update_weights",
    replace=_by_one_handle,
    reason="each matrix is packed, opened and unpacked by itself, thousands of them in a model with experts",
    applies_to=requirement("verl"),
    remove_when="verl sends SGLang flattened buckets",
)

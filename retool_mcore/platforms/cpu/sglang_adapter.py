"""Sends weights from the Megatron actor to SGLang on CPU.

verl's adapter sends CUDA IPC handles, for which SGLang's helper fails on CPU tensors. The rest of
verl's adapter (finding the server, flushing its cache, counting steps) is unchanged.
"""

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter as VerlServerAdapter
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.patches_verl import FORMAT, flattened


def pack_weights(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Pickle the weights as one tensor in SGLang's format "flattened_bucket", with plain pickle.

    torch's default, sharing by file descriptor, makes the server exit when the sender closes.
    """
    return pickle.dumps(flattened(named_tensors))


class ServerAdapter(VerlServerAdapter):
    """Sends each bucket of weights over HTTP."""

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send all weights, then flush the server's prefix cache, which the old weights computed.

        Every rank consumes the iterator, because the export is collective; each server's TP leader
        sends. Raises PlatformError for LoRA and delta updates, and if the server rejects a weight.
        """
        if wire_format != "named_tensors" or kwargs.get("peft_config"):
            raise PlatformError(f"platform cpu can send only full weights, not {wire_format} or LoRA updates.")
        await self._init_server_adapter()
        engine = self._engine if self._engine is not None and self._is_server_tp_leader() else None
        bucket_bytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async for bucket in get_named_tensor_buckets(weights, bucket_bytes):
            if engine is not None:
                await self._send(engine, bucket)
        if engine is not None:
            await engine.flush_cache()
            if global_steps is not None:
                await self.server_actor.set_global_steps.remote(global_steps)

    async def _send(self, engine: Any, bucket: list[tuple[str, torch.Tensor]]) -> None:
        payload = pack_weights(bucket)
        ranks = self.device_mesh["infer_tp"].size()
        reply = await engine.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * ranks, load_format=FORMAT, flush_cache=False
            )
        )
        if not reply.get("success", False):
            raise PlatformError(f"SGLang rejected the bucket of weights that starts with {bucket[0][0]}: {reply}")

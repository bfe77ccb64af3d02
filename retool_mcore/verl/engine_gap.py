"""What is measured of a step's weights before they change, on the tokens that engines sampled.

The actor's entropy, and how far the engine's probabilities are from the actor's. The update changes
the weights, so only its first part compares engines with what they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.utils.padding import response_from_nested

ENTROPY = "actor/entropy"
_CORRECTION = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")


def store_actor_log_probs(workers: Any, batch: KVBatchMeta) -> None:
    """Store the log-probabilities of the updates' forward passes as "old_log_probs".

    They replace the engine's. Whatever compares engine and actor after the update then reads
    "old_log_probs", as it does where they are computed before the update.
    """
    meta = KVBatchMeta(
        partition_id=batch.partition_id, keys=batch.keys, tags=batch.tags, fields=["response_mask"], extra_info={}
    )
    workers.log_probs_of_update(meta)
    data = _columns(batch, "update_log_probs", "response_mask")
    data["old_log_probs"] = response_from_nested(data.pop("update_log_probs"), data["response_mask"])
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("old_log_probs"))


def first_update(batch: KVBatchMeta, updates: int, ranks: int) -> KVBatchMeta:
    """The rows that the first of ``updates`` learns from, in the order of ``order_for_ranks``."""
    of_rank, of_update = len(batch.keys) // ranks, len(batch.keys) // ranks // updates
    rows = [rank * of_rank + row for rank in range(ranks) for row in range(of_update)]
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[row] for row in rows],
        tags=[batch.tags[row] for row in rows],
    )


def gap_metrics(batch: KVBatchMeta, correction: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics of engine and actor, and the entropy, of rows with both log-probabilities.

    The entropy is estimated from the sampled tokens, by the mean of -log p.
    """
    data = _columns(batch, "old_log_probs", "rollout_log_probs", "response_mask", "responses").to_padded_tensor()
    learnt = data["response_mask"].bool()
    if not learnt.any():
        return {}
    entropy = float(-data["old_log_probs"][learnt].mean(dtype=torch.float64))
    return {ENTROPY: entropy, **calculate_debug_metrics(DataProto(batch=data)), **_corrected(data, correction)}


def entropy_metrics(batch: KVBatchMeta, correction: Mapping[str, Any]) -> dict[str, float]:
    """The entropy by a pass of its own: the mean over all tokens in the loss.

    verl's is weighted by algorithm.loss_agg. Where responses have no token in the loss, also
    rollout_corr/* of the others: verl's means over responses would count these as if engine and
    actor agreed on them.
    """
    data = _columns(batch, "entropy", "response_mask")
    masks = [mask.bool() for mask in data["response_mask"].unbind()]
    if not any(mask.any() for mask in masks):
        return {}
    sampled_N = torch.cat([row[mask] for row, mask in zip(data["entropy"].unbind(), masks, strict=True)])
    told = {ENTROPY: float(sampled_N.mean(dtype=torch.float64))}
    if all(mask.any() for mask in masks):
        return told
    both = _columns(batch, "old_log_probs", "rollout_log_probs", "response_mask").to_padded_tensor()
    return told | _corrected(both, correction)


def _corrected(data: Any, correction: Mapping[str, Any]) -> dict[str, float]:
    """verl's rollout_corr/* over the responses with a token in the loss."""
    some = data["response_mask"].bool().any(1)
    return compute_rollout_correction_and_rejection_mask(
        old_log_prob=data["old_log_probs"][some],
        rollout_log_prob=data["rollout_log_probs"][some],
        response_mask=data["response_mask"][some],
        **{name: correction[name] for name in _CORRECTION},
    )[2]


def _columns(batch: KVBatchMeta, *names: str) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))

"""What is measured of a step's weights before they change, on the tokens that engines sampled.

The actor's entropy, and how far the engine's probabilities are from the actor's. The update changes
the weights, so only its first part compares engines with what they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from retool_mcore.verl.blocks import blocks
from retool_mcore.verl.gap_sums import GapSums, Mismatch

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
    for block in blocks(batch, "response_mask", "update_log_probs"):
        block.put(old_log_probs=block.responses("update_log_probs"))


def first_update(batch: KVBatchMeta, updates: int, ranks: int) -> KVBatchMeta:
    """The rows that the first of ``updates`` learns from, in the order of ``order_for_ranks``."""
    of_rank, of_update = len(batch.keys) // ranks, len(batch.keys) // ranks // updates
    rows = [rank * of_rank + row for rank in range(ranks) for row in range(of_update)]
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[row] for row in rows],
        tags=[batch.tags[row] for row in rows],
    )


def gap_metrics(batch: KVBatchMeta, correction: Mapping[str, Any], mismatch: Mismatch) -> dict[str, float]:
    """verl's metrics of engine and actor, and the entropy, of rows with both log-probabilities.

    The entropy is estimated from the sampled tokens, by the mean of -log p.
    """
    sums = GapSums(mismatch)
    for block in blocks(batch, "response_mask", "old_log_probs", "rollout_log_probs"):
        columns = ("old_log_probs", "rollout_log_probs", "response_mask")
        sums.add(*(block.tokens(name) for name in columns), block.starts)
    told = sums.metrics()
    if told and (correction["rollout_is"] is not None or correction["rollout_rs"] is not None):
        told |= _corrected(_columns(batch, "old_log_probs", "rollout_log_probs", "response_mask"), correction)
    return told


def metrics_without_empty_rows(batch: KVBatchMeta, correction: Mapping[str, Any]) -> dict[str, float]:
    """rollout_corr/* of weights and rejection, where some responses have no token in the loss.

    Empty where all have some. verl's means over responses would count the others as if engine and
    actor agreed on them.
    """
    if all(bool(mask.any()) for mask in _columns(batch, "response_mask")["response_mask"].unbind()):
        return {}
    return _corrected(_columns(batch, "old_log_probs", "rollout_log_probs", "response_mask"), correction)


def _corrected(data: Any, correction: Mapping[str, Any]) -> dict[str, float]:
    """verl's rollout_corr/* over the responses with a token in the loss, if any has."""
    data = data.to_padded_tensor()
    some = data["response_mask"].bool().any(1)
    if not some.any():
        return {}
    return compute_rollout_correction_and_rejection_mask(
        old_log_prob=data["old_log_probs"][some],
        rollout_log_prob=data["rollout_log_probs"][some],
        response_mask=data["response_mask"][some],
        **{name: correction[name] for name in _CORRECTION},
    )[2]


def _columns(batch: KVBatchMeta, *names: str) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))

"""What is measured of a step's weights before they change, on the tokens that engines sampled.

The actor's entropy, and how far the engine's probabilities are from the actor's. The update changes
the weights, so only its first part compares engines with what they had.
"""

from typing import Any

from transfer_queue import KVBatchMeta

from retool_mcore.config import Algorithm
from retool_mcore.verl.blocks import blocks
from retool_mcore.verl.correction import Correction
from retool_mcore.verl.gap_sums import GapSums, Mismatch


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


def gap_metrics(batch: KVBatchMeta, algorithm: Algorithm, mismatch: Mismatch) -> dict[str, float]:
    """verl's metrics of engine and actor, and the entropy, of rows with both log-probabilities.

    The entropy is estimated from the sampled tokens, by the mean of -log p.
    """
    sums, correction = GapSums(mismatch), Correction(algorithm)
    for block in blocks(batch, "response_mask", "old_log_probs", "rollout_log_probs"):
        actor_N, engine_N, mask_N = (
            block.tokens(name) for name in ("old_log_probs", "rollout_log_probs", "response_mask")
        )
        sums.add(actor_N, engine_N, mask_N, block.starts)
        correction.of_rows(actor_N - engine_N, mask_N, block.starts)
    return sums.metrics() | correction.metrics()

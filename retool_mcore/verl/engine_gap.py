"""What is measured of a step's weights before they change, on the tokens that engines sampled.

The actor's entropy, and how far the engine's probabilities are from the actor's. The update changes
the weights, so only its first part compares engines with what they had.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transfer_queue import KVBatchMeta

from retool_mcore.config import Algorithm
from retool_mcore.verl.blocks import Block, blocks
from retool_mcore.verl.correction import Correction
from retool_mcore.verl.gap_sums import Gaps, GapSums, Mismatch
from retool_mcore.verl.update_columns import MASK

NUMBERS = "gap_numbers"  # a column of rows: GapSums.numbers()
STEP = "retool_step"  # in a batch's non-tensor data: gaps of another step are forgotten
COMPARED = ("response_mask", "rollout_log_probs")


def old_log_probs_of(columns: Mapping[str, Any], gaps: Gaps) -> dict[str, torch.Tensor]:
    """On a worker: the columns "old_log_probs" and NUMBERS of its rows.

    ``columns``: COMPARED, and "log_probs" and "entropy" of prompts and responses.
    """
    rows = Block("", [], columns, COMPARED[0])
    mask_N, engine_N = (rows.tokens(name) for name in COMPARED)
    actor_N, sums = rows.responses("log_probs"), GapSums(gaps)
    sums.add(actor_N, engine_N, mask_N, rows.starts, rows.responses("entropy"))
    old_log_probs = torch.nested.nested_tensor_from_jagged(actor_N, rows.offsets)
    return {"old_log_probs": old_log_probs, NUMBERS: torch.from_numpy(sums.numbers())}


def response_log_probs(mask: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """Of ``said`` of prompts and responses the part of the responses, which ``mask`` is of."""
    rows = Block("", [], {MASK: mask, "said": said}, MASK)
    return torch.nested.nested_tensor_from_jagged(rows.responses("said"), rows.offsets)


def store_actor_log_probs(workers: Any, batch: KVBatchMeta) -> None:
    """Store the log-probabilities of the updates' forward passes as "old_log_probs".

    Whatever compares engine and actor after the update then reads that column, as it does where it
    is computed before the update. The workers store it, each for its rows.
    """
    meta = KVBatchMeta(partition_id=batch.partition_id, keys=batch.keys, tags=batch.tags, fields=[MASK], extra_info={})
    workers.log_probs_of_update(meta)


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

"""How far the engine's log-probabilities are from the actor's, on the same sampled tokens."""

import math
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics

COMPARED = ["response_mask", "old_log_probs", "rollout_log_probs"]


def mismatch_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """``mismatch/*`` of "old_log_probs" (actor) and "rollout_log_probs" (engine)."""
    data: Any = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=COMPARED)
    return mismatch(*_in_loss(data))


def mismatch_after_update(batch: KVBatchMeta, correction: Any) -> dict[str, float]:
    """``mismatch/*``, verl's ``training/rollout_*`` and ``rollout_corr/*``, the actor's entropy.

    Of an update's forward pass, as verl measures these only where it computes log-probabilities
    before the update. The entropy is estimated by the mean of -log p over the sampled tokens.
    ``correction`` is verl's algorithm.rollout_correction.
    """
    data: Any = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses", *COMPARED]
    )
    actor_N, engine_N = _in_loss(data)
    if not len(actor_N):
        return {}
    padded = DataProto(batch=data.to_padded_tensor())
    verls = calculate_debug_metrics(padded)
    _, corrected = compute_rollout_correction_and_add_to_batch(padded, correction)
    return {"actor/entropy": -float(actor_N.double().mean()), **verls, **corrected, **mismatch(actor_N, engine_N)}


def _in_loss(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The actor's and the engine's log-probabilities [N] of the N tokens in the loss."""
    mask_N, actor_N, engine_N = (data[name].values() for name in COMPARED)
    return actor_N[mask_N.bool()], engine_N[mask_N.bool()]


def mismatch(actor_N: torch.Tensor, engine_N: torch.Tensor) -> dict[str, float]:
    """Metrics of the log-probabilities [N] of N sampled tokens; empty for none.

    mismatch/kl                 mean of engine - actor, which estimates KL(engine || actor)
    mismatch/max, mismatch/p99  of abs(engine - actor), in nats; 99 % of tokens do not exceed p99
    """
    if not len(actor_N):
        return {}
    gap_N = (engine_N - actor_N).double()
    size_N = gap_N.abs()
    p99 = size_N.kthvalue(math.ceil(0.99 * len(size_N))).values
    return {"mismatch/kl": float(gap_N.mean()), "mismatch/max": float(size_N.max()), "mismatch/p99": float(p99)}

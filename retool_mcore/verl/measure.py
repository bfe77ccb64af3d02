"""Metrics of a batch in TransferQueue, its log-prob mismatch, and records of its trajectories."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.debug.metrics import calculate_debug_metrics

from retool_mcore.reward.score import mean_parts
from retool_mcore.rollout.metrics import Behavior, distributions, group_shares, summarize
from retool_mcore.rollout.records import RecordWriter, group_rank
from retool_mcore.verl.assign import uid_of

# Columns of every trajectory:
SAMPLED_COLUMNS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
INTERVAL_Z = 1.96
COMPARED_COLUMNS = ["response_mask", "old_log_probs", "rollout_log_probs"]
STEP_COLUMNS = ("old_log_probs", "advantages")  # columns that a training step adds


def read_extras(keys: Sequence[str], partition_id: str) -> list[dict[str, Any]]:
    """The ``extra_fields`` of each trajectory, from our agent loop and the reward."""
    columns: Any = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["extra_fields"])
    return [getattr(value, "data", value) for value in columns["extra_fields"]]


def answers_of_groups(keys: Sequence[str], extras: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[bool]]]:
    """For each group, its row in the training file and whether each answer was right.

    Sorted by uid, so that the order does not depend on which group finished first.
    """
    rows: dict[str, int] = {}
    right: dict[str, list[bool]] = {}
    for key, extra in zip(keys, extras, strict=True):
        uid, result = uid_of(key), cast("Mapping[str, Any]", extra.get("reward_extra_info") or {})
        rows[uid] = int(extra["row"])
        right.setdefault(uid, []).append(bool(result.get("acc", 0.0)))
    return [(rows[uid], right[uid]) for uid in sorted(rows)]


def batch_metrics(
    keys: Sequence[str],
    extras: Sequence[dict[str, Any]],
    filtered: Mapping[float, int] | None = None,
    discarded: int = 0,
) -> dict[str, float]:
    """Accuracy, means of the reward's parts, and the metrics of rollout.metrics.

    ``filtered`` and ``discarded``: arguments of ``group_shares``.
    """
    results: list[dict[str, Any]] = [extra.get("reward_extra_info") or {} for extra in extras]
    correct = [bool(result.get("acc", 0.0)) for result in results]
    rewards = [float(result.get("score", result.get("acc", 0.0))) for result in results]
    behaviors = [Behavior(**extra["behavior"]) for extra in extras]
    return {
        "accuracy": sum(correct) / len(correct),
        **mean_parts(results),
        **summarize(behaviors, correct),
        **distributions(behaviors),
        **group_shares([uid_of(key) for key in keys], correct, rewards, filtered, discarded),
    }


def accuracy_interval(keys: Sequence[str], extras: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The 95 % confidence interval accuracy/low to accuracy/high; {} for fewer than two problems.

    The interval reflects the sampling of problems. It is computed from the variance of the
    per-problem means, because answers to one problem are not independent. If all means are 0 or all
    are 1, the variance is 0, and Wilson's interval is returned.
    """
    right: dict[str, list[float]] = {}
    for key, extra in zip(keys, extras, strict=True):
        right.setdefault(uid_of(key), []).append(float((extra.get("reward_extra_info") or {}).get("acc", 0.0) > 0))
    means = np.array([np.mean(answers) for answers in right.values()])
    if len(means) < 2:
        return {}
    mean, half = float(means.mean()), INTERVAL_Z * float(means.std(ddof=1)) / math.sqrt(len(means))
    if mean in (0.0, 1.0):
        half = INTERVAL_Z**2 / (len(means) + INTERVAL_Z**2)
    return {"accuracy/low": max(0.0, mean - half), "accuracy/high": min(1.0, mean + half)}


def write_groups(
    writer: RecordWriter,
    keys: Sequence[str],
    extras: Sequence[dict[str, Any]],
    *,
    partition_id: str,
    step: int,
    groups: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Write all trajectories of the ``groups`` groups with the lowest ranks.

    Returns the records written. verl assigns new uids in each validation, so validation groups are
    ranked by their row number.
    """
    extra_of = {key: extra for key, extra in zip(keys, extras, strict=True) if extra.get("record")}
    names_of = {uid_of(key): f"row {extra['row']}" if partition_id == "val" else "" for key, extra in extra_of.items()}
    ranked = sorted(names_of, key=lambda uid: group_rank(names_of[uid] or uid, seed))
    chosen = set(ranked[:groups])
    chosen_keys = sorted(key for key in extra_of if uid_of(key) in chosen)
    if not chosen_keys:
        return []
    names = [*SAMPLED_COLUMNS, *STEP_COLUMNS] if partition_id == "train" else [*SAMPLED_COLUMNS]
    data: Any = tq.kv_batch_get(keys=chosen_keys, partition_id=partition_id, select_fields=names)
    columns = {name: list(data[name].unbind()) for name in names if name in data.keys()}  # noqa: SIM118
    written: list[dict[str, Any]] = []
    for index, key in enumerate(chosen_keys):
        row = {name: column[index] for name, column in columns.items()}
        extra = extra_of[key]
        named = {"key": key, "step": step, "partition": partition_id}
        parts = {"reward_info": extra.get("reward_extra_info"), "behavior": extra["behavior"], **extra["record"]}
        written.append({**named, **parts, **_token_columns(row)})
        writer.write(written[-1])
    return written


def _token_columns(row: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The record's per-token lists: [P] for the prompt and [T] for the response.

    actor_logprobs and advantage are None if no step has trained on the trajectory.
    """
    actor_T, advantage_T = row.get("old_log_probs"), row.get("advantages")
    return {
        "reward": float(row["rm_scores"].sum()),
        "prompt_ids": row["prompts"].tolist(),
        "response_ids": row["responses"].tolist(),
        "loss_mask": row["response_mask"].tolist(),
        "logprobs": _rounded(row["rollout_log_probs"]),
        "actor_logprobs": None if actor_T is None else _rounded(actor_T),
        "advantage": None
        if advantage_T is None
        else _one_or_all(advantage_T * row["response_mask"], row["response_mask"].bool()),
    }


def _one_or_all(values_T: torch.Tensor, learnt_T: torch.Tensor) -> float | list[float]:
    learnt = values_T[learnt_T]
    if len(learnt) and bool((learnt == learnt[0]).all()):
        return round(float(learnt[0]), 6)
    return _rounded(values_T)


def _rounded(values_T: torch.Tensor) -> list[float]:
    """Round to six decimals; 30 times as fast as round() of each number."""
    return np.round(values_T.double().numpy(), 6).tolist()


def mismatch_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """``mismatch/*``: columns "old_log_probs" (actor) against "rollout_log_probs" (engine)."""
    data: Any = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=COMPARED_COLUMNS)
    return mismatch(*_in_loss(data))


def mismatch_after_update(batch: KVBatchMeta, correction: Any) -> dict[str, float]:
    """Mismatch metrics and the actor's entropy, from the log-probs of an update's forward pass.

    Returns ``mismatch/*``, verl's ``training/rollout_*`` and ``rollout_corr/*``, and
    ``actor/entropy``; {} without tokens in the loss. verl itself computes these only if it computes
    log-probs before the update. The entropy is estimated in nats as the mean of -log p over the
    sampled tokens. ``correction``: verl's algorithm.rollout_correction.
    """
    data: Any = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses", *COMPARED_COLUMNS]
    )
    actor_N, engine_N = _in_loss(data)
    if not len(actor_N):
        return {}
    padded = DataProto(batch=data.to_padded_tensor())
    debug_metrics = calculate_debug_metrics(padded)
    _, corrected = compute_rollout_correction_and_add_to_batch(padded, correction)
    return {
        "actor/entropy": -float(actor_N.double().mean()),
        **debug_metrics,
        **corrected,
        **mismatch(actor_N, engine_N),
    }


def _in_loss(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] of the actor and of the engine, for the N tokens in the loss."""
    mask_N, actor_N, engine_N = (data[name].values() for name in COMPARED_COLUMNS)
    return actor_N[mask_N.bool()], engine_N[mask_N.bool()]


def mismatch(actor_N: torch.Tensor, engine_N: torch.Tensor) -> dict[str, float]:
    """The maximum and 99th percentile of abs(engine - actor), in nats; {} for no tokens.

    ``actor_N``, ``engine_N`` [N]: float log-probs of N sampled tokens.
    """
    if not len(actor_N):
        return {}
    size_N = (engine_N - actor_N).double().abs()
    p99 = size_N.kthvalue(math.ceil(0.99 * len(size_N))).values
    return {"mismatch/max": float(size_N.max()), "mismatch/p99": float(p99)}

"""Metrics of a batch in verl's queue, its mismatch, and its rows for the trajectory file."""

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

SAMPLED = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")  # columns of every trajectory
INTERVAL_Z = 1.96
COMPARED = ["response_mask", "old_log_probs", "rollout_log_probs"]
LEARNT = ("old_log_probs", "advantages")  # columns of trajectories that a step has learnt from


def read_extras(keys: Sequence[str], partition_id: str) -> list[dict[str, Any]]:
    """What our agent loop and the reward have stored beside the tokens of each trajectory."""
    columns: Any = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["extra_fields"])
    return [getattr(value, "data", value) for value in columns["extra_fields"]]


def answers_of_groups(keys: Sequence[str], extras: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[bool]]]:
    """For each group its row of the training file, and which of its answers were right.

    In the order of the groups' ids, so that it does not hang on which of them ended first.
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
    """accuracy, the reward's parts, and the metrics of rollout.metrics.

    ``filtered`` and ``discarded`` are passed on to ``group_shares``.
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
    """accuracy/low and accuracy/high: 95 % for other problems of the kind; {} for fewer than two.

    From the spread of the problems' means, because answers to one problem are not independent.
    Where all means are 0 or all are 1 there is no spread, and the interval is Wilson's.
    """
    right: dict[str, list[float]] = {}
    for key, extra in zip(keys, extras, strict=True):
        right.setdefault(uid_of(key), []).append(float((extra.get("reward_extra_info") or {}).get("acc", 0.0) > 0))
    means = np.array([np.mean(each) for each in right.values()])
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
    """Write the ``groups`` whole groups with the lowest ranks; returns the rows of records.py.

    verl names a problem anew in each validation, so there its row ranks it.
    """
    extra_of = {key: extra for key, extra in zip(keys, extras, strict=True) if extra.get("record")}
    names_of = {uid_of(key): f"row {extra['row']}" if partition_id == "val" else "" for key, extra in extra_of.items()}
    ranked = sorted(names_of, key=lambda uid: group_rank(names_of[uid] or uid, seed))
    chosen = set(ranked[:groups])
    wanted = sorted(key for key in extra_of if uid_of(key) in chosen)
    if not wanted:
        return []
    names = [*SAMPLED, *LEARNT] if partition_id == "train" else [*SAMPLED]
    data: Any = tq.kv_batch_get(keys=wanted, partition_id=partition_id, select_fields=names)
    columns = {name: list(data[name].unbind()) for name in names if name in data.keys()}  # noqa: SIM118
    written: list[dict[str, Any]] = []
    for index, key in enumerate(wanted):
        row = {name: column[index] for name, column in columns.items()}
        named = {"key": key, "step": step, "partition": partition_id}
        written.append({**named, **_record_columns(extra_of[key]), **_token_columns(row)})
        writer.write(written[-1])
    return written


def _record_columns(extra: dict[str, Any]) -> dict[str, Any]:
    return {"reward_info": extra.get("reward_extra_info"), "behavior": extra["behavior"], **extra["record"]}


def _token_columns(row: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Columns [P] and [T] of one trajectory.

    actor_logprobs and advantage are None before a step has learnt from it.
    """
    actor_T, advantage_T = row.get("old_log_probs"), row.get("advantages")
    return {
        "reward": float(row["rm_scores"].sum()),
        "prompt_ids": _listed(row["prompts"]),
        "response_ids": _listed(row["responses"]),
        "loss_mask": _listed(row["response_mask"]),
        "logprobs": _rounded(row["rollout_log_probs"]),
        "actor_logprobs": None if actor_T is None else _rounded(actor_T),
        "advantage": None
        if advantage_T is None
        else _one_or_all(advantage_T * row["response_mask"], row["response_mask"].bool()),
    }


def _one_or_all(values_T: torch.Tensor, learnt_T: torch.Tensor) -> float | list[float]:
    of_learnt = values_T[learnt_T]
    if len(of_learnt) and bool((of_learnt == of_learnt[0]).all()):
        return round(float(of_learnt[0]), 6)
    return _rounded(values_T)


def _rounded(values_T: torch.Tensor) -> list[float]:
    """To six decimals; round() of each number takes thirty times as long."""
    return np.round(values_T.double().numpy(), 6).tolist()


def _listed(values_T: torch.Tensor) -> list[Any]:
    return cast("Any", values_T).tolist()  # torch says no more than "list"


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
    """mismatch/max and mismatch/p99 of the log-probabilities [N] of N sampled tokens.

    Both are of abs(engine - actor), in nats; 99 % of the tokens do not exceed p99. Empty for none.
    """
    if not len(actor_N):
        return {}
    size_N = (engine_N - actor_N).double().abs()
    p99 = size_N.kthvalue(math.ceil(0.99 * len(size_N))).values
    return {"mismatch/max": float(size_N.max()), "mismatch/p99": float(p99)}

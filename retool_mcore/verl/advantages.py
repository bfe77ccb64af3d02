"""Fixes two errors in verl's advantages: OPO for masked groups, and rewards on masked tokens.

All other estimators are verl's (verl/trainer/ppo/core_algos.py). Shapes: B responses, T tokens, G
groups.
"""

from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import register_adv_est

from retool_mcore.verl.keys.algorithm import OPO


@register_adv_est(OPO)
def opo_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """OPO (arXiv 2505.23585, Eq. 9): the baseline is the group's length-weighted mean reward.

    verl's ``opo`` divides 0 by 0 for a group without a token in the loss, and the NaN reaches every
    weight. Here such a group gets advantage 0. A response alone in its group gets baseline 0.

    Args:
        token_level_rewards: [B, T] float.
        response_mask: [B, T]; 1 for tokens in the loss.
        index: [B] the prompt's uid of each response.

    Returns:
        Advantages and returns, the same [B, T] tensor.
    """
    group_B = torch.from_numpy(np.unique(index, return_inverse=True)[1])
    reward_B, tokens_B = token_level_rewards.sum(-1), response_mask.sum(-1).to(token_level_rewards.dtype)
    zeros_G = torch.zeros(int(group_B.max()) + 1, dtype=reward_B.dtype)
    tokens_G = zeros_G.index_add(0, group_B, tokens_B)
    baseline_G = zeros_G.index_add(0, group_B, tokens_B * reward_B) / tokens_G.clamp(min=1)
    alone_G = torch.bincount(group_B) == 1
    baseline_G = baseline_G.masked_fill(alone_G, 0.0)
    advantages_BT = (reward_B - baseline_G[group_B])[:, None] * response_mask
    return advantages_BT, advantages_BT


def move_rewards_into_loss(batch: KVBatchMeta) -> None:
    """Store each response's score on its last token in the loss.

    verl puts the score on the last token of the response. If the response was truncated inside a
    tool's output, that token is not in the loss, and the estimators that use per-token rewards (ppo
    and reinforce_plus_plus) would lose the reward.
    """
    data: Any = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "rm_scores"]
    )
    moved = [
        on_last_token_in_loss(score_T, mask_T)
        for score_T, mask_T in zip(data["rm_scores"].unbind(), data["response_mask"].unbind(), strict=True)
    ]
    data["rm_scores"] = torch.nested.as_nested_tensor(moved, layout=torch.jagged)
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("rm_scores"))


def on_last_token_in_loss(score_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Move the sum of ``score_T`` [T] to the last token with mask 1; unchanged if there is none."""
    assert len(score_T), "a response has at least one token"
    in_loss = mask_T.nonzero()
    if not len(in_loss):
        return score_T
    moved_T = torch.zeros_like(score_T)
    moved_T[in_loss[-1, 0]] = score_T.sum()
    return moved_T

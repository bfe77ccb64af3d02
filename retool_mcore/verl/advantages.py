"""Advantages of ours in verl's registry, under names of their own; an import registers them."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_opo_outcome_advantage, register_adv_est

from retool_mcore.verl.keys.algorithm import OPO


@register_adv_est(OPO)
def opo_of_learnt_tokens(response_mask: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's OPO, with advantage 0 where there is nothing to learn from.

    The baseline weighs a response by its tokens in the loss. A group without any, of masked or
    rejected responses or of rows that only pad a batch, has no baseline (0 / 0), and verl
    multiplies that by a mask of zeros: the update's gradient would be NaN.
    """
    advantages_BT, _ = compute_opo_outcome_advantage(response_mask=response_mask, **rest)
    advantages_BT = advantages_BT.masked_fill(response_mask == 0, 0.0)
    return advantages_BT, advantages_BT

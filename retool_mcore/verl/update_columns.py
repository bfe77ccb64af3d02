"""Columns of tokens that an update reads and that are made where it reads them.

A response of GRPO has one advantage, so one number of it goes through verl's queue, not one for
each token. With algorithm.old_log_prob = "rollout" the engine's log-probabilities are the old ones;
they are in the queue already and are not stored there a second time.
"""

import torch
from tensordict import TensorDict

MASK, ADVANTAGES, OLD, ENGINES = "response_mask", "advantages", "old_log_probs", "rollout_log_probs"


def of_tokens(value_R: torch.Tensor, mask_N: torch.Tensor, lengths_R: torch.Tensor) -> torch.Tensor:
    """[N]: the value of each token's response, and 0 outside of the loss."""
    return torch.repeat_interleave(value_R, lengths_R) * mask_N


def complete(data: TensorDict) -> None:
    """Give ``data`` of an update the columns of tokens that the loss reads."""
    keys = set(data.keys())
    if ADVANTAGES in keys and not data[ADVANTAGES].is_nested:
        mask, lengths_R = data[MASK], data[MASK].offsets().diff()
        value_N = of_tokens(data[ADVANTAGES], mask.values(), lengths_R)
        # Without the longest torch pads to all tokens.
        longest, least = (int(each) for each in (lengths_R.max(), lengths_R.min()))
        data[ADVANTAGES] = torch.nested.nested_tensor_from_jagged(
            value_N, mask.offsets(), min_seqlen=least, max_seqlen=longest
        )
    if OLD not in keys and ENGINES in keys:
        data[OLD] = data.pop(ENGINES)

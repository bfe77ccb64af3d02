"""Workers fetch the columns that they read, and no others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.verl.loss_scenario import (
    ENGINE_BT,
    MASK_BT,
    MOVED_BT,
    OLD_BT,
    TEXT_BT,
    actor_config,
    micro_batch,
    model_values,
)

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
ROWS = range(4)
TOLD = ("dp_size", "batch_num_tokens", "global_batch_size")  # of a batch as a whole


def stored() -> Any:
    """What the queue has of four responses when they are learnt from, texts and all."""
    from verl.utils import tensordict_utils as tu

    columns = {"response_mask": MASK_BT, "loss_mask": MASK_BT, "rollout_log_probs": ENGINE_BT}
    columns |= {"old_log_probs": OLD_BT, "advantages": MOVED_BT, "ref_log_prob": OLD_BT + 0.3 * TEXT_BT}
    columns |= {"rollout_is_weights": 1.5 * TEXT_BT, "values": OLD_BT, "returns": MOVED_BT}
    data = micro_batch(ROWS, **columns)
    tu.assign_non_tensor_stack(data, "extra_fields", [{"row": row} for row in ROWS])
    return data


@pytest.mark.parametrize("name", ["CRITIC_COLUMNS", "ACTOR_COLUMNS"])
def test_a_loss_of_the_columns_that_a_worker_fetches_is_that_of_all(name: str):
    from verl.workers.utils.losses import ppo_loss, value_loss

    from retool_mcore.verl import step

    wanted, output = getattr(step, name), model_values(OLD_BT + MOVED_BT, ROWS)
    everything = stored()
    few = everything.select(*TOLD, *(each for each in wanted if each in everything.keys()))  # noqa: SIM118
    assert "extra_fields" not in few.keys()  # noqa: SIM118
    if name == "ACTOR_COLUMNS":
        config = actor_config("algorithm.kl_coef=0.1", 'algorithm.kl_in="loss"', 'algorithm.kl_type="k3"')
        losses = [ppo_loss(config, {"log_probs": output}, data) for data in (everything, few)]
    else:
        config = SimpleNamespace(cliprange_value=0.2, loss_agg_mode="token-mean", loss_scale_factor=None)
        losses = [value_loss(config, {"values": output}, data) for data in (everything, few)]
    assert torch.equal(losses[0][0], losses[1][0])

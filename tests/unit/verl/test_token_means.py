"""A step's metrics of its loss are means over tokens, however the responses are packed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.verl.loss_scenario import ENGINE_BT, MASK_BT, MOVED_BT, OLD_BT, actor_config, micro_batch, model_values

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

ADVANTAGES_BT = torch.tensor([[0.8], [-1.5], [-0.6], [1.1]]).expand(4, 6)
COLUMNS = {"old_log_probs": OLD_BT, "advantages": ADVANTAGES_BT, "response_mask": MASK_BT}
CLIPS = ("algorithm.clip=[0.3, 0.4, 3]",)


def reported(ranks: Sequence[Sequence[Sequence[int]]], *settings: str, **columns_BT: torch.Tensor) -> dict[str, float]:
    """The metrics of one update; ``ranks``: the micro-batches of each data-parallel rank.

    Its numbers are put together as verl's engine and worker do.
    """
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.utils.losses import ppo_loss

    from retool_mcore.verl.update_worker import divide_by_tokens, sum_over_tokens

    loss = partial(ppo_loss, actor_config(*settings))
    of_ranks: list[dict[str, Any]] = []
    for micro_batches in ranks:
        found: dict[str, Any] = {}
        for rows in micro_batches:
            data = micro_batch(rows, len(ranks), **COLUMNS | columns_BT)
            append_to_dict(
                found, sum_over_tokens(loss, data=data, model_output={"log_probs": model_values(NEW_BT, rows)})[1]
            )
        of_ranks.append(found)
    update = {
        name: [Metric.aggregate_dp([found[name] for found in of_ranks])]
        for name, value in of_ranks[0].items()
        if isinstance(value, Metric)
    }
    divide_by_tokens(update)
    return {name: value for name, (value,) in update.items()}


NEW_BT = OLD_BT + MOVED_BT
PACKED = ([[[1], [0, 2, 3]]], [[[0, 1, 2, 3]]], [[[2], [0], [1], [3]]], [[[1], [2]], [[0], [3]]])


@pytest.mark.parametrize("ranks", PACKED)
def test_clipping_and_divergence_are_means_over_tokens_in_any_packing(ranks: Any):
    mask_BT, ratio_BT = MASK_BT.bool(), MOVED_BT.exp()
    too_far_BT = ((ratio_BT > 1.4) & (ADVANTAGES_BT > 0)) | ((ratio_BT < 0.7) & (ADVANTAGES_BT < 0))
    too_bad_BT = (ratio_BT > 3) & (ADVANTAGES_BT < 0)
    found = reported(ranks, *CLIPS)
    assert found["loss_tokens"] == 12
    assert found["actor/pg_clipfrac"] == pytest.approx(float(too_far_BT[mask_BT].float().mean()))
    assert found["actor/pg_clipfrac_lower"] == pytest.approx(float(too_bad_BT[mask_BT].float().mean()))
    assert found["actor/ppo_kl"] == pytest.approx(float(-MOVED_BT[mask_BT].mean()), abs=1e-6)
    assert 0 < found["actor/pg_clipfrac"] < 1


@pytest.mark.parametrize("ranks", PACKED)
def test_where_the_loss_rejects_what_it_keeps_is_what_it_counts(ranks: Any):
    """Rejected by the engine's log-probabilities, within each micro-batch."""
    settings = ("algorithm.old_log_prob=rollout", "algorithm.rejection=token_k2", "algorithm.rejection_bounds=[0, 0.1]")
    found = reported(ranks, *CLIPS, *settings, old_log_probs=ENGINE_BT)
    gap_BT = ENGINE_BT - NEW_BT
    kept_BT = (gap_BT**2 / 2 <= 0.1) & MASK_BT.bool()
    assert 0 < int(kept_BT.sum()) < 12
    assert found["loss_tokens"] == int(kept_BT.sum())
    assert found["actor/ppo_kl"] == pytest.approx(float(gap_BT[kept_BT].mean()), abs=1e-6)
    assert not [name for name in found if "rollout_corr" in name], "of all rows at once: verl/measure.py"


def test_the_divergence_in_the_loss_keeps_its_weight():
    settings = ("algorithm.kl_coef=0.25",)
    from verl.workers.utils.losses import ppo_loss

    from retool_mcore.verl.update_worker import sum_over_tokens

    data = micro_batch([0, 1], **COLUMNS, ref_log_prob=OLD_BT)
    loss = partial(ppo_loss, actor_config(*settings))
    _, told = sum_over_tokens(loss, data=data, model_output={"log_probs": model_values(NEW_BT, [0, 1])})
    assert told["kl_coef"] == 0.25


def test_over_a_steps_updates_each_token_counts_once():
    from retool_mcore.verl.update_worker import divide_by_tokens

    step = {"loss_tokens": [30.0, 10.0], "sum_over_tokens/actor/ppo_kl": [3.0, 5.0], "actor/pg_loss": [0.5, 0.25]}
    divide_by_tokens(step)
    assert step == {"loss_tokens": [40.0], "actor/ppo_kl": [0.2], "actor/pg_loss": [0.5, 0.25]}


def test_an_update_without_a_token_in_the_loss_has_means_of_0():
    from retool_mcore.verl.update_worker import divide_by_tokens

    step = {"loss_tokens": [0.0], "sum_over_tokens/actor/ppo_kl": [0.0]}
    divide_by_tokens(step)
    assert step == {"loss_tokens": [0.0], "actor/ppo_kl": [0.0]}


def test_a_workers_step_reports_one_mean_of_its_updates_and_the_last_rate(monkeypatch: pytest.MonkeyPatch):
    """Of 10 and of 30 tokens: 0.1 and 0.3 clipped are 0.25 of all."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    from retool_mcore.verl.update_worker import UpdateWorker

    told = {"lr": [1e-6, 2e-6], "loss_tokens": [10.0, 30.0], "sum_over_tokens/actor/pg_clipfrac": [1.0, 9.0]}
    output = TensorDict({}, batch_size=[])
    tu.assign_non_tensor(output, metrics=told)
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda self, data: output)
    found = tu.get(UpdateWorker.train_mini_batch(object.__new__(UpdateWorker), output), "metrics")
    assert found == {"lr": [2e-6], "loss_tokens": [40.0], "actor/pg_clipfrac": [0.25]}

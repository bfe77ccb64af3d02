"""An update's loss and metrics do not depend on how its responses are packed, nor on columns that
workers do not fetch.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.verl.loss_scenario import (
    ADVANTAGE_B1,
    ENGINE_BT,
    MASK_BT,
    MOVED_BT,
    OLD_BT,
    TEXT_BT,
    Ranks,
    actor_config,
    micro_batch,
    model_values,
    update,
)

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
CLIPS = ("algorithm.clip=[0.3, 0.4, 3]",)
WEIGHTED = ("algorithm.old_log_prob=rollout", "algorithm.importance_sampling=sequence")
REJECTED = ("algorithm.old_log_prob=rollout", "algorithm.rejection=token_k2", "algorithm.rejection_bounds=[0, 0.1]")
SPLIT: Ranks = [[[1], [0, 2, 3]]]
TWO_RANKS: Ranks = [[[1], [2]], [[0], [3]]]


@pytest.mark.parametrize("ranks", [SPLIT, [[[0, 1, 2, 3]]], TWO_RANKS])
def test_clipping_and_divergence_are_means_over_tokens(ranks: Ranks):
    mask_BT, ratio_BT = MASK_BT.bool(), MOVED_BT.exp()
    clipped_BT = ((ratio_BT > 1.4) & (ADVANTAGE_B1 > 0)) | ((ratio_BT < 0.7) & (ADVANTAGE_B1 < 0))
    lower_BT = (ratio_BT > 3) & (ADVANTAGE_B1 < 0)
    *_, metrics = update(ranks, *CLIPS)
    assert metrics["loss_tokens"] == 12
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped_BT[mask_BT].float().mean()))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(float(lower_BT[mask_BT].float().mean()))
    assert metrics["actor/ppo_kl"] == pytest.approx(float(-MOVED_BT[mask_BT].mean()), abs=1e-6)


@pytest.mark.parametrize("ranks", [SPLIT, TWO_RANKS])
def test_metrics_count_the_tokens_that_the_loss_keeps(ranks: Ranks):
    """The loss rejects by the engine's log-probabilities, within each micro-batch."""
    *_, metrics = update(ranks, *CLIPS, *REJECTED, old_log_probs=ENGINE_BT)
    gap_BT = ENGINE_BT - OLD_BT - MOVED_BT
    kept_BT = (gap_BT**2 / 2 <= 0.1) & MASK_BT.bool()
    assert metrics["loss_tokens"] == int(kept_BT.sum()) and 0 < int(kept_BT.sum()) < 12
    assert metrics["actor/ppo_kl"] == pytest.approx(float(gap_BT[kept_BT].mean()), abs=1e-6)
    assert not [name for name in metrics if "rollout_corr" in name], "verl/measure.py computes them over all rows"


@pytest.mark.parametrize(
    "settings",
    [WEIGHTED, REJECTED, (*WEIGHTED, "algorithm.kl_coef=0.25"), ("algorithm.loss_agg=seq-mean-token-mean",)],
    ids=["weighted", "rejected", "kl", "by response"],
)
@pytest.mark.parametrize("ranks", [SPLIT, [[[1, 2]], [[0, 3]]]], ids=["one rank", "an empty rank"])
def test_a_micro_batch_without_a_token_in_the_loss_adds_nothing(settings: tuple[str, ...], ranks: Ranks):
    """Row 1, and row 2 if a rank has only these, are masked responses or padding rows."""
    empty = [1] if len(ranks) == 1 else [1, 2]
    mask_BT = MASK_BT.clone()
    mask_BT[empty] = 0
    columns = {"response_mask": mask_BT, "old_log_probs": ENGINE_BT, "ref_log_prob": OLD_BT}
    whole = update([[[0, 1, 2, 3]]], *settings, tokens=int(mask_BT.sum()), **columns)
    packed = update(ranks, *settings, tokens=int(mask_BT.sum()), **columns)
    assert packed[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(packed[1], whole[1], atol=1e-6, rtol=1e-5)
    assert packed[2] == pytest.approx(whole[2], abs=1e-6) and packed[2]["loss_tokens"] > 0
    assert float(whole[1].abs().max()) > 1e-2 and float(packed[1][empty].abs().max()) == 0.0


def test_a_step_divides_each_update_by_its_own_trajectories_and_reports_one_mean(monkeypatch: pytest.MonkeyPatch):
    """1 of 10 and 9 of 30 tokens are clipped: 0.25 of all. An empty update has means of 0."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    from retool_mcore.verl.update_worker import REAL_ROWS, UpdateWorker, divide_by_tokens

    seen: list[int] = []

    def one(worker: Any, data: Any) -> None:
        seen.append(tu.get(data, "global_batch_size"))

    def both(worker: Any, data: Any) -> Any:
        for part in data.split(2):
            tu.assign_non_tensor(part, global_batch_size=4)  # verl's: the rows, padding included
            UpdateWorker.train_batch.__wrapped__(worker, part)
        output = TensorDict({}, batch_size=[])
        updates = {"lr": [1e-6, 2e-6], "loss_tokens": [10.0, 30.0], "sum_over_tokens/actor/pg_clipfrac": [1.0, 9.0]}
        tu.assign_non_tensor(output, metrics=updates)
        return output

    monkeypatch.setattr(TrainingWorker, "train_batch", one)
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", both)
    worker: Any = object.__new__(UpdateWorker)
    worker.engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]))
    data = TensorDict({"row": torch.zeros(4)}, batch_size=4)
    tu.assign_non_tensor(data, **{REAL_ROWS: (4, 3)})
    metrics = tu.get(UpdateWorker.train_mini_batch.__wrapped__(worker, data), "metrics")
    assert seen == [4, 3]
    assert metrics == {"lr": [2e-6], "loss_tokens": [40.0], "actor/pg_clipfrac": [0.25]}
    empty = {"loss_tokens": [0.0], "sum_over_tokens/actor/ppo_kl": [0.0]}
    divide_by_tokens(empty)
    assert empty == {"loss_tokens": [0.0], "actor/ppo_kl": [0.0]}


def test_losses_of_actor_and_critic_read_no_other_columns_than_workers_fetch():
    from verl.workers.utils.losses import ppo_loss, value_loss

    from retool_mcore.verl.step import ACTOR_COLUMNS, CRITIC_COLUMNS

    columns = {"loss_mask": MASK_BT, "rollout_log_probs": ENGINE_BT, "old_log_probs": OLD_BT, "advantages": MOVED_BT}
    columns |= {"response_mask": MASK_BT, "ref_log_prob": OLD_BT + 0.3 * TEXT_BT, "rollout_is_weights": 1.5 * TEXT_BT}
    everything = micro_batch(range(4), **columns, values=OLD_BT, returns=MOVED_BT)
    output = model_values(OLD_BT + MOVED_BT, range(4))
    actor = actor_config("algorithm.kl_coef=0.1", 'algorithm.kl_in="loss"', 'algorithm.kl_type="k3"')
    critic = SimpleNamespace(cliprange_value=0.2, loss_agg_mode="token-mean", loss_scale_factor=None)
    for loss, config, name, fetched in (
        (ppo_loss, actor, "log_probs", ACTOR_COLUMNS),
        (value_loss, critic, "values", CRITIC_COLUMNS),
    ):
        names = [each for each in fetched if each in everything.keys()]  # noqa: SIM118
        few = everything.select("dp_size", "batch_num_tokens", "global_batch_size", *names)
        of_all, of_few = (loss(config, {name: output}, data)[0] for data in (everything, few))
        assert torch.equal(of_all, of_few)

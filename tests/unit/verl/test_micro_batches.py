"""An update's loss and metrics do not depend on how its responses are packed into micro-batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.verl.loss_scenario import ENGINE_BT, MASK_BT, MOVED_BT, OLD_BT, actor_config, micro_batch, model_values

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
ADVANTAGES_BT = torch.tensor([[0.8], [-1.5], [-0.6], [1.1]]).expand(4, 6)
CLIPS = ("algorithm.clip=[0.3, 0.4, 3]",)
Ranks = Sequence[Sequence[Sequence[int]]]  # the rows of each micro-batch of each data-parallel rank


def updated(
    ranks: Ranks, *settings: str, mask_BT: torch.Tensor = MASK_BT, old_BT: torch.Tensor = ENGINE_BT
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by the log-probabilities and metrics of one update with the workers' loss.

    Adds up micro-batches and ranks as verl's engine and worker do.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.utils.losses import ppo_loss

    from retool_mcore.verl.update_worker import divide_by_tokens, loss_of_micro_batch

    new_BT, total, reports = (OLD_BT + MOVED_BT).requires_grad_(), torch.zeros(()), []
    loss_function = loss_of_micro_batch(partial(ppo_loss, actor_config(*settings)))
    columns = {
        "old_log_probs": old_BT,
        "advantages": ADVANTAGES_BT,
        "response_mask": mask_BT,
        "ref_log_prob": OLD_BT,
    }
    for micro_batches in ranks:
        report: dict[str, Any] = {}
        for rows in micro_batches:
            data = micro_batch(rows, len(ranks), **columns)
            tu.assign_non_tensor(data, batch_num_tokens=int(mask_BT.sum()))
            loss, metrics = loss_function(data=data, model_output={"log_probs": model_values(new_BT, rows)})
            total = total + loss / len(ranks)  # gradients are averaged over ranks
            append_to_dict(report, metrics)
        reports.append(report)
    names = [name for name, value in reports[0].items() if isinstance(value, Metric)]
    update = {name: [Metric.aggregate_dp([report[name] for report in reports])] for name in names}
    divide_by_tokens(update)
    return (
        float(total.detach()),
        torch.autograd.grad(total, new_BT)[0],
        {name: value for name, (value,) in update.items()},
    )


@pytest.mark.parametrize("ranks", [[[[1], [0, 2, 3]]], [[[0, 1, 2, 3]]], [[[1], [2]], [[0], [3]]]])
def test_clipping_and_divergence_are_means_over_tokens(ranks: Ranks):
    mask_BT, ratio_BT = MASK_BT.bool(), MOVED_BT.exp()
    clipped_BT = ((ratio_BT > 1.4) & (ADVANTAGES_BT > 0)) | ((ratio_BT < 0.7) & (ADVANTAGES_BT < 0))
    lower_BT = (ratio_BT > 3) & (ADVANTAGES_BT < 0)
    *_, metrics = updated(ranks, *CLIPS, old_BT=OLD_BT)
    assert metrics["loss_tokens"] == 12
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float(clipped_BT[mask_BT].float().mean()))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(float(lower_BT[mask_BT].float().mean()))
    assert metrics["actor/ppo_kl"] == pytest.approx(float(-MOVED_BT[mask_BT].mean()), abs=1e-6)


@pytest.mark.parametrize("ranks", [[[[1], [0, 2, 3]]], [[[1], [2]], [[0], [3]]]])
def test_metrics_count_the_tokens_that_the_loss_keeps(ranks: Ranks):
    """The loss rejects by the engine's log-probabilities, within each micro-batch."""
    settings = ("algorithm.old_log_prob=rollout", "algorithm.rejection=token_k2", "algorithm.rejection_bounds=[0, 0.1]")
    *_, metrics = updated(ranks, *CLIPS, *settings)
    gap_BT = ENGINE_BT - OLD_BT - MOVED_BT
    kept_BT = (gap_BT**2 / 2 <= 0.1) & MASK_BT.bool()
    assert metrics["loss_tokens"] == int(kept_BT.sum()) and 0 < int(kept_BT.sum()) < 12
    assert metrics["actor/ppo_kl"] == pytest.approx(float(gap_BT[kept_BT].mean()), abs=1e-6)
    assert not [name for name in metrics if "rollout_corr" in name], "verl/measure.py computes them over all rows"


WEIGHTED = ("algorithm.old_log_prob=rollout", "algorithm.importance_sampling=sequence")
REJECTED = ("algorithm.old_log_prob=rollout", "algorithm.rejection=token_k2", "algorithm.rejection_bounds=[0, 0.1]")


@pytest.mark.parametrize(
    "settings",
    [WEIGHTED, REJECTED, (*WEIGHTED, "algorithm.kl_coef=0.25"), ("algorithm.loss_agg=seq-mean-token-mean",)],
    ids=["weighted", "rejected", "kl", "by response"],
)
@pytest.mark.parametrize("ranks", [[[[1], [0, 2, 3]]], [[[1, 2]], [[0, 3]]]], ids=["one rank", "an empty rank"])
def test_a_micro_batch_without_a_token_in_the_loss_adds_nothing(settings: tuple[str, ...], ranks: Ranks):
    """Row 1, and row 2 if a rank has only these, are masked responses or padding rows."""
    empty = [1] if len(ranks) == 1 else [1, 2]
    mask_BT = MASK_BT.clone()
    mask_BT[empty] = 0
    whole = updated([[[0, 1, 2, 3]]], *settings, mask_BT=mask_BT)
    packed = updated(ranks, *settings, mask_BT=mask_BT)
    assert packed[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(packed[1], whole[1], atol=1e-6, rtol=1e-5)
    assert packed[2] == pytest.approx(whole[2], abs=1e-6) and packed[2]["loss_tokens"] > 0
    assert float(whole[1].abs().max()) > 1e-2 and float(packed[1][empty].abs().max()) == 0.0


def test_a_step_reports_one_mean_of_its_updates_and_the_last_learning_rate(monkeypatch: pytest.MonkeyPatch):
    """1 of 10 and 9 of 30 tokens are clipped: 0.25 of all. An empty update has means of 0."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    from retool_mcore.verl.update_worker import UpdateWorker, divide_by_tokens

    updates = {"lr": [1e-6, 2e-6], "loss_tokens": [10.0, 30.0], "sum_over_tokens/actor/pg_clipfrac": [1.0, 9.0]}
    output = TensorDict({}, batch_size=[])
    tu.assign_non_tensor(output, metrics=updates)
    monkeypatch.setattr(TrainingWorker, "train_mini_batch", lambda self, data: output)
    metrics = tu.get(UpdateWorker.train_mini_batch(object.__new__(UpdateWorker), output), "metrics")
    assert metrics == {"lr": [2e-6], "loss_tokens": [40.0], "actor/pg_clipfrac": [0.25]}
    empty = {"loss_tokens": [0.0], "sum_over_tokens/actor/ppo_kl": [0.0]}
    divide_by_tokens(empty)
    assert empty == {"loss_tokens": [0.0], "actor/ppo_kl": [0.0]}

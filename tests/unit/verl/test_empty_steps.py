"""Steps that train less than all: of masked or rejected responses, and of the critic alone."""

from functools import partial
from typing import Any

import pytest
import torch

from retool_mcore.errors import RolloutError
from tests.unit.verl.loss_scenario import (
    ENGINE_BT,
    MASK_BT,
    MOVED_BT,
    OLD_BT,
    Queue,
    actor_config,
    batch,
    learning_trainer,
    micro_batch,
    model_values,
    trained_on,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def masked(monkeypatch: pytest.MonkeyPatch, mask_BT: torch.Tensor) -> Any:
    """A batch of four responses whose masks are in the queue."""
    Queue(monkeypatch, response_mask=mask_BT)
    return batch()


def test_a_step_of_which_nothing_is_left_to_learn_from_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.replay import require_learnable

    some_BT = MASK_BT * torch.tensor([[1], [0], [0], [0]])
    assert require_learnable(masked(monkeypatch, some_BT), 3, "x") == 0.75
    with pytest.raises(RolloutError, match="No response of step 3 has a token to learn from: x excluded"):
        require_learnable(masked(monkeypatch, torch.zeros_like(MASK_BT)), 3, "x")


def test_a_step_looks_where_masks_may_leave_nothing(monkeypatch: pytest.MonkeyPatch):
    trainer = learning_trainer('algorithm.mask=["truncated"]')
    trainer.assign = lambda rows, metrics: rows
    with pytest.raises(RolloutError, match=r'algorithm\.mask = \["truncated"\] excluded all'):
        trainer.learn(masked(monkeypatch, torch.zeros_like(MASK_BT)), {})


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_rejection_of_everything_ends_the_run_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch):
    settings = (f"algorithm.name={name}", "algorithm.rejection=seq_max_k2", "algorithm.rejection_bounds=[0, 1e-9]")
    with pytest.raises(RolloutError, match=r'step 3 has a token.* algorithm.rejection = "seq_max_k2" excluded all'):
        trained_on(monkeypatch, *settings)


WEIGHTED = ("algorithm.old_log_prob=rollout", "algorithm.importance_sampling=sequence")
REJECTED = ("algorithm.old_log_prob=rollout", "algorithm.rejection=token_k2", "algorithm.rejection_bounds=[0, 0.1]")


@pytest.mark.parametrize(
    "settings",
    [WEIGHTED, REJECTED, (*WEIGHTED, "algorithm.kl_coef=0.25"), ("algorithm.loss_agg=seq-mean-token-mean",)],
    ids=["weighted", "rejected", "with a divergence", "by response"],
)
@pytest.mark.parametrize("ranks", [[[[1], [0, 2, 3]]], [[[1, 2]], [[0, 3]]]], ids=["one rank", "a rank of nothing"])
def test_a_micro_batch_of_nothing_but_padding_adds_nothing(settings: tuple[str, ...], ranks: list[list[list[int]]]):
    """As verl packs an update, beside the update in one micro-batch, by the loss that workers use.

    Row 1 (and 2, alone on a rank) stand for responses of which masks leave nothing, or for padding.
    """
    empty = [row for row in (1, 2) if row == 1 or len(ranks) > 1]
    mask_BT = MASK_BT.clone()
    mask_BT[empty] = 0
    whole = updated([[[0, 1, 2, 3]]], mask_BT, *settings)
    packed = updated(ranks, mask_BT, *settings)
    assert packed[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(packed[1], whole[1], atol=1e-6, rtol=1e-5)
    assert packed[2] == pytest.approx(whole[2], abs=1e-6) and packed[2]["loss_tokens"] > 0
    assert float(whole[1].abs().max()) > 1e-2 and float(packed[1][empty].abs().max()) == 0.0


def updated(
    ranks: list[list[list[int]]], mask_BT: torch.Tensor, *settings: str
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by the log-probabilities and metrics of an update, by the worker's loss."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.utils.losses import ppo_loss

    from retool_mcore.verl.update_worker import divide_by_tokens, loss_of_micro_batch

    new_BT, total, of_ranks = (OLD_BT + MOVED_BT).requires_grad_(), torch.zeros(()), []
    loss_function = loss_of_micro_batch(partial(ppo_loss, actor_config(*settings)))
    columns = {"old_log_probs": ENGINE_BT, "advantages": torch.tensor([[0.8], [-1.5], [-0.6], [1.1]]).expand(4, 6),
               "response_mask": mask_BT, "ref_log_prob": OLD_BT}  # fmt: skip
    for micro_batches in ranks:
        found: dict[str, Any] = {}
        for rows in micro_batches:
            data = micro_batch(rows, len(ranks), **columns)
            tu.assign_non_tensor(data, batch_num_tokens=int(mask_BT.sum()))
            loss, told = loss_function(data=data, model_output={"log_probs": model_values(new_BT, rows)})
            assert not data["response_mask"].values().any() or told["loss_tokens"].aggregate() > 0
            total = total + loss / len(ranks)  # as gradients are averaged over ranks
            append_to_dict(found, told)
        of_ranks.append(found)
    names = [name for name, value in of_ranks[0].items() if isinstance(value, Metric)]
    metrics = {name: [Metric.aggregate_dp([found[name] for found in of_ranks])] for name in names}
    divide_by_tokens(metrics)
    return (
        float(total.detach()),
        torch.autograd.grad(total, new_BT)[0],
        {name: value for name, (value,) in metrics.items()},
    )

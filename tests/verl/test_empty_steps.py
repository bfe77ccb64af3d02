"""Steps that train less than all: of masked or rejected responses, and of the critic alone."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RolloutError
from tests.verl.loss_scenario import (
    ENGINE_BT,
    MASK_BT,
    MOVED_BT,
    OLD_BT,
    RL,
    actor_config,
    micro_batch,
    said,
    trained_on,
    tree,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def in_memory(monkeypatch: pytest.MonkeyPatch, mask_BT: torch.Tensor) -> SimpleNamespace:
    """A batch of four responses whose masks are in the queue that replay.py reads."""
    from verl.utils import tensordict_utils as tu

    from retool_mcore.verl import blocks

    masks = torch.nested.as_nested_tensor(list(mask_BT), layout=torch.jagged)
    values = torch.nested.as_nested_tensor(list(-1.0 * mask_BT), layout=torch.jagged)
    columns = tu.get_tensordict({"response_mask": masks, "old_log_probs": values, "rollout_log_probs": values}, {})
    monkeypatch.setattr(blocks, "tq", SimpleNamespace(kv_batch_get=lambda **_: columns))
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    return SimpleNamespace(keys=keys, tags=[{}] * 4, partition_id="train")


def test_a_step_of_which_nothing_is_left_to_learn_from_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.replay import require_learnable

    some_BT = MASK_BT * torch.tensor([[1], [0], [0], [0]])
    assert require_learnable(in_memory(monkeypatch, some_BT), 3, "x") == 0.75
    with pytest.raises(RolloutError, match="no response of step 3 has a token to learn from: x left out"):
        require_learnable(in_memory(monkeypatch, torch.zeros_like(MASK_BT)), 3, "x")


def test_the_trainer_looks_where_masks_may_leave_nothing(monkeypatch: pytest.MonkeyPatch):
    masked_BT = MASK_BT * torch.tensor([[1], [0], [0], [0]])
    for mask_BT, share in ((masked_BT, 0.75), (torch.zeros_like(MASK_BT), None)):
        from retool_mcore.verl.unpadded import UnpaddedTrainer

        trainer, metrics = masking_trainer(), dict[str, Any]()
        empty = in_memory(monkeypatch, mask_BT)
        if share is None:
            with pytest.raises(RolloutError, match=r'algorithm\.mask = \["truncated"\] left out all'):
                trainer._compute_advantage(empty, metrics)
        else:
            with pytest.MonkeyPatch.context() as patching:
                patching.setattr(UnpaddedTrainer, "_compute_advantage", lambda self, batch, metrics: batch)
                assert trainer._compute_advantage(empty, metrics) is empty
            assert metrics == {"loss/masked_fraction": share}


def masking_trainer() -> Any:
    from retool_mcore.verl.trainer import ReToolTrainer

    trainer = object.__new__(ReToolTrainer)  # verl's set-up starts workers
    trainer._run = load_config(RlConfig, RL, ['algorithm.mask=["truncated"]'])
    trainer.global_steps, trainer.config = 3, tree()
    trainer._forget_step()
    return trainer


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_rejection_of_everything_ends_the_run_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch):
    settings = (f"algorithm.name={name}", "algorithm.rejection=seq_max_k2", "algorithm.rejection_bounds=[0, 1e-9]")
    with pytest.raises(RolloutError, match=r'step 3 has a token.* algorithm.rejection = "seq_max_k2" left out all'):
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

    from retool_mcore.verl.token_means import divide_by_tokens
    from retool_mcore.verl.update_worker import loss_of_micro_batch

    new_BT, total, of_ranks = (OLD_BT + MOVED_BT).requires_grad_(), torch.zeros(()), []
    loss_function = loss_of_micro_batch(partial(ppo_loss, actor_config(*settings)))
    columns = {"old_log_probs": ENGINE_BT, "advantages": torch.tensor([[0.8], [-1.5], [-0.6], [1.1]]).expand(4, 6),
               "response_mask": mask_BT, "ref_log_prob": OLD_BT}  # fmt: skip
    for micro_batches in ranks:
        found: dict[str, Any] = {}
        for rows in micro_batches:
            data = micro_batch(rows, len(ranks), **columns)
            tu.assign_non_tensor(data, batch_num_tokens=int(mask_BT.sum()))
            loss, told = loss_function(data=data, model_output={"log_probs": said(new_BT, rows)})
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


def test_the_critic_alone_is_trained_in_its_first_steps(monkeypatch: pytest.MonkeyPatch):
    """In verl's own step; the actor's schedule spans the steps in which the actor is trained."""

    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    settings = ("algorithm.name=ppo", "critic.warmup_steps=2", "train.steps=6")
    config, trained = tree(*settings), []
    trainer = MagicMock(config=config, use_critic=True, use_reference_policy=False)
    for step in range(1, 5):
        trainer.reset_mock()
        trainer.global_steps = step
        trainer.replay_buffer.sample.return_value = (MagicMock(extra_info={}), {})
        PPOTrainer._step_once(trainer, {}, {}, 4)
        trained.append((trainer._update_critic.called, trainer._update_actor.called))
    assert trained == [(True, False), (True, False), (True, True), (True, True)]
    updates = load_config(RlConfig, RL, settings).train.updates_per_step
    assert config.actor_rollout_ref.actor.optim.lr_decay_steps == 4 * updates
    assert config.critic.optim.lr_decay_steps == 6 * updates

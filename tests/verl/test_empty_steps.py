"""Steps that train less than all: of masked or rejected responses, and of the critic alone."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RolloutError
from retool_mcore.platforms import get_platform
from retool_mcore.verl.plugin import assert_loaded
from tests.verl.loss_scenario import MASK_BT, RL, trained_on, tree

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")


@pytest.fixture(autouse=True, scope="module")
def verl_imports_here() -> None:
    get_platform("cpu").activate()
    assert_loaded()


def in_memory(monkeypatch: pytest.MonkeyPatch, mask_BT: torch.Tensor) -> SimpleNamespace:
    """A batch of four responses whose masks are in the queue that replay.py reads."""
    from retool_mcore.verl import engine_gap, replay

    masks = torch.nested.as_nested_tensor(list(mask_BT), layout=torch.jagged)
    columns = {"response_mask": masks, "entropy": masks.float()}
    for module in (engine_gap, replay):
        monkeypatch.setattr(module, "tq", SimpleNamespace(kv_batch_get=lambda **_: columns))
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    return SimpleNamespace(keys=keys, tags=[{}] * 4, partition_id="train")


def test_a_step_of_which_nothing_is_left_to_learn_from_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.replay import require_learnable

    some_BT = MASK_BT * torch.tensor([[1], [0], [0], [0]])
    assert require_learnable(in_memory(monkeypatch, some_BT), 3, "x") == 0.75
    with pytest.raises(RolloutError, match="no response of step 3 has a token to learn from: x left out"):
        require_learnable(in_memory(monkeypatch, torch.zeros_like(MASK_BT)), 3, "x")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("mask_truncated=true",), "algorithm.mask_truncated or mask_void_turns left out all"),
        (("rejection=token_k2", "rejection_high=0.1"), 'algorithm.rejection = "token_k2" left out all'),
        ((), None),
    ],
)
def test_the_trainer_looks_where_settings_may_leave_nothing(
    settings: tuple[str, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl.trainer import ReToolTrainer

    monkeypatch.setattr(PPOTrainer, "_compute_advantage", lambda self, batch, metrics: batch)
    trainer = object.__new__(ReToolTrainer)
    trainer._run = load_config(RlConfig, RL, [f"algorithm.{setting}" for setting in settings])
    trainer.global_steps, trainer.config = 3, tree()
    empty, metrics = in_memory(monkeypatch, torch.zeros_like(MASK_BT)), {}
    if said is None:
        assert trainer._compute_advantage(empty, metrics) is empty
        return
    with pytest.raises(RolloutError) as caught:
        trainer._compute_advantage(empty, metrics)
    assert said in str(caught.value)
    full = in_memory(monkeypatch, MASK_BT)
    assert trainer._compute_advantage(full, metrics) is full
    assert metrics == {"actor/entropy": 1.0} | (
        {"loss/masked_fraction": 0.0} if "mask_truncated=true" in settings else {}
    )


def test_normalizing_over_nothing_is_told_as_what_left_nothing(monkeypatch: pytest.MonkeyPatch):
    """In verl's own advantages, which fail before there is a mask to look at."""
    from retool_mcore.verl.trainer import ReToolTrainer

    settings = ("algorithm.name=reinforce_plus_plus", "algorithm.rejection=seq_max_k2")

    trainer = object.__new__(ReToolTrainer)  # verl's set-up starts workers
    trainer._run = load_config(RlConfig, RL, [*settings, "algorithm.rejection_high=1e-9"])
    trainer.config, trainer.global_steps = tree(*settings, "algorithm.rejection_high=1e-9"), 3
    in_memory(monkeypatch, MASK_BT)
    with pytest.raises(RolloutError, match=r'step 3 has a token.* algorithm.rejection = "seq_max_k2" left out all'):
        trained_on(monkeypatch, *settings, "algorithm.rejection_high=1e-9", trainer=trainer)


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

"""What is told of engine and actor is of the weights at the step's start, whatever the loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.config import RlConfig, load_config
from tests.verl.loss_scenario import ENGINE_BT, KEYS, LENGTHS_B, MASK_BT, OLD_BT, RL, Queue, batch, tree

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


@pytest.mark.parametrize(("updates", "ranks"), [(1, 1), (3, 1), (1, 2), (3, 2), (2, 4)])
def test_the_first_updates_rows_are_those_that_it_was_dealt(updates: int, ranks: int):
    from transfer_queue import KVBatchMeta

    from retool_mcore.verl.dealing import deal, order_for_ranks
    from retool_mcore.verl.engine_gap import first_update

    groups = [name for name in "abcdefghijkl" for _ in range(4)]
    dealt = deal(groups, updates, (0, 1, 0))
    order = order_for_ranks(dealt, [7 + row % 5 for row in range(48)], ranks)
    meta = KVBatchMeta(partition_id="train", keys=[str(row) for row in order], tags=[{"row": row} for row in order])
    found = first_update(meta, updates, ranks)
    assert {int(key) for key in found.keys} == set(dealt[0]) and len(found.keys) == len(dealt[0])
    assert [tag["row"] for tag in found.tags] == [int(key) for key in found.keys]


DRIFT_BT = torch.tensor([[0.0], [0.0], [2.0], [-3.0]])  # of the weights, in the step's second update


def update(monkeypatch: pytest.MonkeyPatch, *settings: str, call: int = 0) -> tuple[Any, Queue, dict[str, Any]]:
    """Our trainer's update of two mini-batches of two responses with the engine's as old log-probs.

    Its workers are a stand-in that answers with the log-probabilities of each update's own pass.
    """
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl.trainer import ReToolTrainer
    from retool_mcore.verl.update_worker import KEEP_LOG_PROBS

    queue = Queue(
        monkeypatch,
        response_mask=MASK_BT,
        loss_mask=MASK_BT,
        responses=MASK_BT,
        old_log_probs=ENGINE_BT,
        rollout_log_probs=ENGINE_BT,
    )

    asked: list[Any] = []

    def log_probs_of_update(meta: Any) -> None:
        assert asked == [True], "a worker keeps those of a batch that asks for it"
        for row, key in enumerate(KEYS):
            queue.rows[key]["old_log_probs"] = OLD_BT[row, : LENGTHS_B[row]] + DRIFT_BT[row]

    def updates(trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        asked.append(batch.extra_info[KEEP_LOG_PROBS])
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", updates)
    trainer = object.__new__(ReToolTrainer)  # verl's set-up starts workers
    settings = ("algorithm.old_log_prob=rollout", "rollout.group_size=2", "train.mini_batch_prompts=6", *settings)
    trainer._run = load_config(RlConfig, RL, settings)
    trainer.config, trainer.updates_of_a_batch = tree(*settings), trainer._run.train.updates_per_step
    trainer.local_trigger_step, trainer.use_critic = call, False
    trainer._forget_step()
    trainer.actor_rollout_wg = SimpleNamespace(log_probs_of_update=log_probs_of_update)
    metrics: dict[str, Any] = {}
    trainer._update_actor(batch(), metrics)
    return trainer, queue, metrics


def test_mismatch_is_of_the_engines_and_not_of_what_the_step_has_learnt(monkeypatch: pytest.MonkeyPatch):
    settings = ("algorithm.importance_sampling=token", "algorithm.importance_bounds=[0, 2.0]")
    trainer, queue, metrics = update(monkeypatch, *settings)
    assert trainer.updates_of_a_batch == 2
    gap_N = (ENGINE_BT - OLD_BT)[:2][MASK_BT[:2].bool()]
    assert trainer._mismatch.metrics()["mismatch/kl"] == pytest.approx(float(gap_N.mean()), abs=1e-6)
    learnt = MASK_BT.bool()
    drifted_N = (ENGINE_BT - OLD_BT - DRIFT_BT)[learnt]
    assert float(drifted_N.mean()) != pytest.approx(float(gap_N.mean()), abs=0.1), "drift would show"
    assert metrics["rollout_corr/kl"] == pytest.approx(float(gap_N.mean()), abs=1e-6)
    weights_N = (-gap_N).exp().clamp(max=2.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(weights_N.mean()), rel=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(float(-OLD_BT[:2][MASK_BT[:2].bool()].mean()), rel=1e-6)
    # Of every row the trajectory file has what its own update made of it.
    torch.testing.assert_close(queue.rows["b_1_0"]["old_log_probs"], OLD_BT[3, :4] - 3.0)


def test_a_later_call_of_the_worker_in_a_step_compares_nothing(monkeypatch: pytest.MonkeyPatch):
    """In mode "async" each update is a call of its own."""
    trainer, queue, metrics = update(monkeypatch, call=1)
    assert trainer._mismatch.metrics() == metrics == {}
    torch.testing.assert_close(queue.rows["b_1_0"]["old_log_probs"], OLD_BT[3, :4] - 3.0)


def test_the_driver_weighs_nothing_where_the_loss_does(monkeypatch: pytest.MonkeyPatch):
    """Of the engine's log-probabilities as the old ones every ratio would be 1."""
    from retool_mcore.verl.learning_signal import LearningSignal

    columns = {"old_log_probs": ENGINE_BT, "rollout_log_probs": ENGINE_BT, "rm_scores": torch.zeros_like(ENGINE_BT)}
    queue = Queue(monkeypatch, response_mask=MASK_BT, **columns)
    settings = ["algorithm.old_log_prob=rollout", "algorithm.importance_sampling=token"]
    algorithm = load_config(RlConfig, RL, settings).algorithm
    assert LearningSignal(algorithm).prepare(batch()) == {}
    assert not any("rollout_is_weights" in row for row in queue.rows.values())

"""What our trainers hand on between validations, updates and rows of a step, at values at which a
dropped call or another's value would show.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from tests.verl.loss_scenario import RL
from tests.verl.test_trainer_wiring import trainer_of, writing_trainer

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
OWN = ("train.mode=async", "cluster.gpus_per_node=4", "rollout.gpus=3")


def test_polls_of_a_validation_are_in_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those before it in its step are, and those of a server that noted none are nothing."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from retool_mcore.verl import rl_metrics

    for hook in ("on_validate_begin", "on_validate_end"):
        monkeypatch.setattr(PPOTrainerSync, hook, lambda self: None)
    monkeypatch.setattr(rl_metrics.ray, "get", lambda value: value)
    polls = [[(4, 1)], [(90, 90)], [(8, 3)], []]
    server = SimpleNamespace(take_polls=SimpleNamespace(remote=lambda: polls.pop(0)))
    trainer = trainer_of(tmp_path)
    trainer._rollout_server_managers = lambda: [SimpleNamespace(server_handles=[server, object()])]
    trainer._load, trainer._writer = rl_metrics.EngineLoad(trainer), object()
    trainer.on_validate_begin()
    trainer.on_validate_end()
    row = {"engine/running/mean": 6.0, "engine/running/max": 8.0, "engine/queued/mean": 2.0, "engine/queued/max": 3.0}
    assert trainer._load.metrics() == row
    assert trainer._load.metrics() == {}, "each poll is in one row"


def test_polls_are_asked_for_when_sampling_ends_and_not_when_engines_have_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from retool_mcore.verl import rl_metrics

    order: list[str] = []
    monkeypatch.setattr(PPOTrainerSync, "on_sample_end", lambda self: order.append("asleep"))
    monkeypatch.setattr(rl_metrics.ray, "get", lambda value: order.append("fetched") or value)
    server = SimpleNamespace(take_polls=SimpleNamespace(remote=lambda: order.append("asked") or [(len(order), 0)]))
    trainer = trainer_of(tmp_path)
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    trainer._rollout_server_managers = lambda: [SimpleNamespace(server_handles=[server])]
    trainer._load, trainer.timing_raw = rl_metrics.EngineLoad(trainer), {}
    trainer.on_sample_end()
    trainer.on_sample_end()  # mode "async": a step of two batches
    found = trainer._load.metrics()
    assert order == ["asked", "asleep"] * 2 + ["fetched"] * 2
    assert found["engine/running/mean"] == 2.0, "of both"


def test_validations_rows_are_held_out_and_those_of_training_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def loaders(trainer: Any) -> None:
        trainer.train_dataset, trainer.val_dataset = SimpleNamespace(held_out=False), SimpleNamespace(held_out=False)
        trainer.train_dataloader = None

    monkeypatch.setattr(PPOTrainer, "_init_dataloader", loaders)
    trainer = trainer_of(tmp_path)
    trainer._init_dataloader()
    assert (trainer.train_dataset.held_out, trainer.val_dataset.held_out) == (False, True)


def test_a_resume_forgets_the_values_after_its_step(tmp_path: Path):
    trainer = trainer_of(tmp_path, "best.metric=val/accuracy", "validation.every=2", "checkpoint.every_steps=2")
    folder = trainer._run.run.dir
    folder.mkdir(parents=True)
    values = [{"step": step, "value": value} for step, value in ((2, 0.5), (4, 0.6), (6, 0.9))]
    rule = {"metric": "val/accuracy", "mode": "max", "patience": 0, "min_delta": 0.0}
    (folder / "best.json").write_text(json.dumps({**rule, "values": values}), encoding="utf-8")
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.resume_best(4)
    assert trainer.goal_metrics(True) == {"best/step": 4.0, "best/value": 0.6, "best/waited": 0.0}


def test_a_curriculum_that_goes_on_has_its_state_before_the_first_batch(tmp_path: Path):
    """torchdata loads it when the iterator is made; metrics and a save may come before that."""
    trainer = trainer_of(tmp_path)
    trainer._run.run.dir.mkdir(parents=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.train_dataloader_it, trainer.train_dataloader = "made before the state was loaded", ["state"]
    trainer.resume_best(4)
    assert trainer.train_dataloader_it == "made before the state was loaded", "verl's own order needs nothing"
    trainer._order = SimpleNamespace()
    trainer.resume_best(4)
    assert list(trainer.train_dataloader_it) == ["state"]


def test_the_updates_of_a_step_are_dealt_anew_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In mode "async" each is a batch of its own, of which an update learns all."""
    from transfer_queue import KVBatchMeta

    from retool_mcore.verl import trainer as module
    from retool_mcore.verl.dealing import deal, order_for_ranks

    filled: list[int] = []

    def fill(batch: Any, multiple: int, eos: int) -> Any:
        filled.append(multiple)
        return batch

    monkeypatch.setattr(module, "upsample_batch_to_divisible_size", fill)
    trainer = trainer_of(tmp_path, "rollout.group_size=2", "train.prompts_per_step=8", "train.mini_batch_prompts=4")
    trainer.updates_of_a_batch, trainer.local_trigger_step = 1, 1
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    keys = [f"{name}_{row}_0" for name in "abcd" for row in range(2)]
    tags = [{"seq_len": 5} for _ in keys]
    orders = [order_for_ranks(deal([key[0] for key in keys], 1, (0, 4, update)), [5] * 8, 1) for update in (0, 1)]
    assert orders[0] != orders[1]
    found = trainer._balance_batch(KVBatchMeta(partition_id="train", keys=list(keys), tags=tags), {})
    assert found.keys == [keys[row] for row in orders[1]] and filled == [4 * 2]


def async_trainer(tmp_path: Path, *settings: str) -> Any:
    from retool_mcore.verl.trainer import ReToolAsyncTrainer

    trainer = object.__new__(ReToolAsyncTrainer)
    trainer._run = load_config(RlConfig, RL, [f"run.root={tmp_path}", *OWN, *settings])
    return trainer


def test_a_step_of_several_batches_counts_all_of_them_and_weighs_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """verl sums over samples or averages; it also goes on to change what a batch told."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    told = [
        {"rollout/dropped": 2, "rollout/refilled_prompts": 1, "actor/loss_tokens": 30.0, "actor/ppo_kl": 0.1},
        {"rollout/dropped": 5, "rollout/refilled_prompts": 0, "actor/loss_tokens": 10.0, "actor/ppo_kl": 0.5},
    ]

    def once(trainer: Any, metrics: dict[str, Any], timing_raw: Any, sample_batch_size: int) -> str:
        metrics |= told.pop(0)
        return f"batch of {sample_batch_size}"

    def step(trainer: Any, metrics: dict[str, Any], timing_raw: Any) -> str:
        for _ in range(2):
            of_batch: dict[str, Any] = {}
            batch = trainer._step_once(of_batch, timing_raw, 3)
            of_batch.clear()
        metrics |= {"rollout/dropped": 3.5, "rollout/dropped_total": 13.0, "actor/ppo_kl": 0.3}
        return batch

    monkeypatch.setattr(PPOTrainer, "_step_once", once)
    monkeypatch.setattr(PPOTrainer, "step", step)
    trainer, metrics = async_trainer(tmp_path), dict[str, Any]()
    trainer.replay_buffer = SimpleNamespace(dropped_total=7)
    assert trainer.step(metrics, {}) == "batch of 3"
    assert metrics["rollout/dropped"] == 7 and metrics["rollout/refilled_prompts"] == 1
    assert metrics["rollout/dropped_total"] == 7 and metrics["actor/loss_tokens"] == 40
    assert metrics["actor/ppo_kl"] == pytest.approx((30 * 0.1 + 10 * 0.5) / 40)


@pytest.mark.parametrize(("updates", "by"), [(1, "no copy"), (2, "verl")])
def test_weights_are_copied_for_a_comparison_only_where_a_step_changes_them(
    updates: int, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    from retool_mcore.verl.unpadded import UnpaddedTrainer

    monkeypatch.setattr(UnpaddedTrainer, "_compute_old_log_prob", lambda self, batch, metrics: "no copy")
    monkeypatch.setattr(PPOTrainerSeparateAsync, "_compute_old_log_prob", lambda self, batch, metrics: "verl")
    words = ("train.prompts_per_step=8", f"train.mini_batch_prompts={8 // updates}")
    assert async_trainer(tmp_path, *words)._compute_old_log_prob(None, {}) == by


def test_tokens_a_second_are_of_all_devices_and_mfu_of_those_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, written = writing_trainer(tmp_path, monkeypatch, *OWN)
    rows = SimpleNamespace(keys=["a_0_0"], tags=[{"seq_len": 80}], partition_id="train")
    trainer._compute_metrics(rows, {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0}, {"step": 2.0})
    row = written[0][0]
    assert (row["tokens_per_s"], row["tokens_per_s_per_gpu"]) == (40.0, 10.0)


def test_an_async_steps_batches_are_one_update_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl.trainer import ReToolAsyncTrainer, TrainerMixin

    monkeypatch.setattr(TrainerMixin, "__init__", lambda self, config: setattr(self, "updates_of_a_batch", 4))
    trainer: Any = ReToolAsyncTrainer
    assert trainer(OmegaConf.create({})).updates_of_a_batch == 1


@pytest.mark.parametrize("same_layout", [True, False])
def test_another_layout_begins_random_states_of_the_step_that_it_goes_on_from(
    same_layout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from retool_mcore.verl import in_flight
    from retool_mcore.verl import trainer as module
    from retool_mcore.verl.async_save import seed_at

    told: list[int] = []
    saved = SimpleNamespace(step=6, has_random_states_of=lambda run: same_layout)
    monkeypatch.setattr(module.checkpoint, "find_resume", lambda run: saved)
    monkeypatch.setattr(in_flight.tq, "kv_list", lambda *_: {})
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: told.append(-1))
    trainer = trainer_of(tmp_path, "run.seed=5")
    trainer._run.run.dir.mkdir(parents=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.use_critic, trainer.actor_rollout_wg = False, SimpleNamespace(load_random_states_afresh=told.append)
    trainer._load_checkpoint()
    assert told == ([-1] if same_layout else [seed_at(5, 6), -1]) and seed_at(5, 6) != seed_at(5, 0)


def test_a_resume_keeps_the_rows_up_to_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a kill after step 8 was written and 6 saved, rows 7 and 8 come again."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer = trainer_of(tmp_path, "run.trackers=[]")
    trainer._run.run.dir.mkdir(parents=True)
    file = trainer._run.run.dir / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 9)), encoding="utf-8")
    trainer._best, trainer.total_training_steps = SimpleNamespace(given_up=False), 24
    trainer.global_steps, trainer.validated = 7, {}
    trainer._clock = SimpleNamespace(row_written=dict)
    trainer.replay_buffer = SimpleNamespace(val_metrics={}, writer=SimpleNamespace(keep_up_to=lambda step: None))
    trainer.on_train_begin()
    trainer._writer.close()
    assert [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("given_up", "steps"), [(True, 6), (False, 24)])
def test_a_run_that_resumes_with_its_patience_spent_makes_no_step_more(
    given_up: bool, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer = trainer_of(tmp_path, "run.trackers=[]")
    trainer._run.run.dir.mkdir(parents=True)
    trainer._best, trainer.total_training_steps = SimpleNamespace(given_up=given_up), 24
    trainer.global_steps, trainer.validated = 7, {}  # the first that would come
    trainer._clock = SimpleNamespace(row_written=dict)
    trainer.replay_buffer = SimpleNamespace(val_metrics={}, writer=SimpleNamespace(keep_up_to=lambda step: None))
    trainer.on_train_begin()
    trainer._writer.close()
    assert trainer.total_training_steps == steps


def test_log_probabilities_of_updates_are_those_since_they_were_taken():
    from tensordict import TensorDict

    from retool_mcore.verl.workers import SavingActorWorker

    def update(*rows: list[float]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    worker: Any = object.__new__(SavingActorWorker)
    worker.actor = SimpleNamespace(log_probs=[update([9.0, -1.0, 99.0], [-2.0, -3.0, 99.0]), update([-4.0, 99.0])])
    masks = ([[1.0], [0.0, 1.0], [1.0]], [[1.0]])  # of responses, after prompts of two tokens and of one
    asked = [TensorDict({"response_mask": update(*rows)}, batch_size=len(rows)) for rows in masks]
    first = worker.log_probs_of_update(asked[0])["old_log_probs"]
    assert [row.tolist() for row in first.unbind()] == [[-1.0], [-2.0, -3.0], [-4.0]]
    worker.actor.log_probs.append(update([-5.0, 99.0]))
    second = worker.log_probs_of_update(asked[1])["old_log_probs"]
    assert [row.tolist() for row in second.unbind()] == [[-5.0]], "the step before has had its own"
    assert worker.log_probs_of_update(asked[1]) is None, "a rank without the output"


def test_a_checkpoint_is_read_when_the_optimizers_room_is_free(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import workers

    done: list[Any] = []
    read = "engine", "a folder"
    monkeypatch.setattr(workers, "load_checkpoint", lambda *given, new_seed: done.append((*given, new_seed)))
    worker: Any = object.__new__(workers.SavingCriticWorker)
    saved = SimpleNamespace(engine="engine", free_room=lambda: done.append("room"))
    monkeypatch.setattr(workers.SavingCriticWorker, "_saved_worker", lambda self: saved)
    worker.load_random_states_afresh(9)
    worker.load_checkpoint("a folder")
    assert done == ["room", (*read, 9)]


def test_the_rate_of_a_row_is_the_one_that_the_update_took_and_each_update_moves_it(monkeypatch: pytest.MonkeyPatch):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    from retool_mcore.verl.update_worker import UpdateWorker

    group = {"lr": 0.25}

    def update(worker: Any, data: TensorDict) -> TensorDict:
        assert tu.get(data, "update_lr_scheduler"), "whatever verl's trainer asked for"
        group["lr"] /= 2  # the schedule, at the end of an update
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"loss": 1.0}})

    monkeypatch.setattr(TrainingWorker, "train_batch", update)
    worker: Any = object.__new__(UpdateWorker)
    worker.engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group]))
    data = TensorDict({"row": torch.zeros(1)}, batch_size=1)
    rates = [tu.get(UpdateWorker.train_batch.__wrapped__(worker, data), "metrics")["lr"] for _ in range(2)]
    assert rates == [0.25, 0.125]


def test_scores_that_are_read_while_sampling_are_those_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In each step anew: a row is of one step."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from tests.verl.unpadded_scenario import Rows

    monkeypatch.setattr(PPOTrainerSync, "on_step_begin", lambda self: None)
    rows, trainer, buffer = Rows(monkeypatch), trainer_of(tmp_path), SimpleNamespace()
    trainer.replay_buffer = buffer
    trainer._clock = SimpleNamespace(step_begins=lambda: None)
    trainer._saver = SimpleNamespace(poll=lambda: None)
    trainer._starting = False
    for keys in (["g0_0_0", "g0_1_0"], ["g4_3_0"]):
        trainer.on_step_begin()
        buffer.read_scores(keys, "train")
        known = trainer._signal._ahead.known()
        assert list(known) == keys
        mask = [int(rows.rows[key]["response_mask"].sum()) for key in keys]
        assert [known[key].learnt for key in keys] == mask

"""What our trainer does around a step: start, resume, validation, and the rows that it writes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RunError
from retool_mcore.model.shape import ModelShape
from retool_mcore.run import heartbeat
from retool_mcore.run.metrics import NonFiniteLoss
from tests.unit.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
OWN = ("train.mode=async", "cluster.gpus_per_node=4", "rollout.gpus=3")


def trainer_of(tmp_path: Path, *settings: str) -> Any:
    """Ours without verl's set-up, which starts workers."""
    from retool_mcore.verl.step import ReToolTrainer

    trainer = object.__new__(ReToolTrainer)
    trainer._run = load_config(RlConfig, RL, [f"run.root={tmp_path}", *settings])
    trainer.global_steps = 4
    return trainer


def writing_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> tuple[Any, list[Any]]:
    """One that makes a step's row of verl's metrics, and the rows that it writes."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_, **__: None)
    trainer, written = trainer_of(tmp_path, *settings), []
    trainer._row_written_s, trainer._step_began_s = 1.0, 1.5
    trainer.replay_buffer = SimpleNamespace(step_metrics=lambda batch, metrics: {}, val_metrics={}, traces=["one"])
    trainer._best, trainer._order = SimpleNamespace(stopped_early=False, metrics=dict), None
    trainer.engine_metrics = dict
    trainer._shape, trainer._starting = None, False
    trainer.actor_rollout_wg = SimpleNamespace(peak_memory_gib=lambda: [1.0])
    trainer._writer = SimpleNamespace(write=lambda step, row, traces: written.append((row, traces)))
    return trainer, written


@pytest.mark.parametrize("bad", ["actor/pg_loss", "actor/grad_norm", "critic/vf_loss"])
def test_a_loss_that_is_no_number_ends_the_run_before_a_row_is_written(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, written = writing_trainer(tmp_path, monkeypatch)
    rows = SimpleNamespace(keys=["a_0_0"], tags=[{"seq_len": 7}], partition_id="train")
    good = {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0, "critic/vf_loss": 0.1}
    with pytest.raises(NonFiniteLoss, match="nan at step 4"):
        trainer._compute_metrics(rows, good | {bad: float("nan")}, {"step": 2.0})
    assert written == []
    trainer._compute_metrics(rows, dict(good), {"step": 2.0})
    (row, traces), buffer = written[0], trainer.replay_buffer
    assert row["actor/pg_loss"] == 0.5 and row["actor/grad_norm"] == 1.0
    assert (traces, buffer.traces) == (["one"], []), "a row's trajectories go with it, and with no other"


def test_mfu_counts_what_a_step_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the update's seconds, not of the step's; a frozen weight counts 4 and not 6."""
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    rows = SimpleNamespace(keys=["a_0_0", "a_1_0"], tags=[{"seq_len": 1}, {"seq_len": 3}], partition_id="train")
    for settings, flops in (((), 7728), (("lora.rank=1", 'lora.targets=["q_proj","down_proj"]'), 6304)):
        trainer, written = writing_trainer(tmp_path, monkeypatch, *settings)
        trainer._shape, trainer._peak_flops = shape, 1000.0
        trainer._compute_metrics(
            rows, {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0}, {"step": 9.0, "update_actor": 4.0}
        )
        row = written[0][0]
        assert row["flops"] == flops and row["mfu"] == flops / 4000


class Groups:
    """Stands for verl's buffer: which groups its filter has set aside."""

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        return {"a"}, Counter()


def test_the_curriculum_gets_the_answers_of_a_filtered_group():
    from retool_mcore.verl.replay import ReplayMixin

    class Buffer(ReplayMixin, Groups):
        def __init__(self) -> None:
            self.finished_keys, self.trainer_mode = {"train": {"a", "b"}}, "sync"
            self.partitions = {"train": {"a_0_0": {}, "a_1_0": {}, "b_0_0": {}}}
            self.told: list[list[str]] = []

        def _observe_answers(self, keys: list[str], partition_id: str) -> None:
            self.told += [sorted(keys)] if keys else []

    buffer = Buffer()
    buffer._dapo_filtered_keys("train")
    assert buffer.told == [["a_0_0", "a_1_0"]]


def sampled_by(engine: str) -> Any:
    return OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": engine}}})


def test_restarts_are_counted_by_row_and_bounded_by_the_run(tmp_path: Path):
    from ray.exceptions import RayActorError

    trainer = trainer_of(tmp_path, "train.max_engine_restarts=3")
    trainer.config = sampled_by("vllm")
    assert trainer.engine_metrics() == {}, "nobody watches vLLM, so 0 would tell of nothing"
    trainer.config = sampled_by("sglang")
    trainer._count(RayActorError())
    trainer._count(RayActorError())
    assert trainer.engine_metrics() == {"engine/restarts": 2.0}
    assert trainer.engine_metrics() == {"engine/restarts": 0.0}, "since the row before"
    trainer._count(RayActorError())
    assert trainer.engine_metrics() == {"engine/restarts": 1.0}
    with pytest.raises(RunError, match=r"train\.max_engine_restarts = 3 is used up"):
        trainer._count(RayActorError())


def test_patience_is_counted_over_what_verls_validation_and_ours_have_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: {"val-core/x": 1.0})
    settings = ("best.metric=val/accuracy", "best.patience=[2, 0]", "validation.every=2", "checkpoint.every_steps=2")
    trainer = trainer_of(tmp_path, *settings)
    trainer._run.run.dir.mkdir(parents=True)
    trainer.config, trainer.total_training_steps = OmegaConf.create({"trainer": {"val_before_train": False}}), 24
    trainer._resume_best(0)
    for step, value in ((2, 0.5), (4, 0.75), (6, 0.6), (8, 0.7)):
        trainer.global_steps = step
        trainer.replay_buffer = SimpleNamespace(val_metrics={"val/accuracy": value})
        assert trainer._validate() == {"val-core/x": 1.0}
        assert trainer.validated == {"val-core/x": 1.0, "val/accuracy": value}, "best.metric may be either's"
        trainer._stop_without_progress(step)
        assert trainer.total_training_steps == (8 if step == 8 else 24)
    assert trainer._best.metrics() == {"best/step": 4, "best/value": 0.75, "best/waited": 2}


def test_polls_of_a_validation_are_in_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those before it in its step are, and those of a server that noted none are nothing."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from retool_mcore.verl import engines

    for hook in ("on_validate_begin", "on_validate_end"):
        monkeypatch.setattr(PPOTrainerSync, hook, lambda self: None)
    monkeypatch.setattr(engines.ray, "get", lambda value: value)
    polls = [[(4, 1)], [(90, 90)], [(8, 3)], []]
    server = SimpleNamespace(take_polls=SimpleNamespace(remote=lambda: polls.pop(0)))
    trainer = trainer_of(tmp_path)
    trainer.servers, trainer._writer, trainer.config = lambda: [server], object(), sampled_by("sglang")
    trainer.on_validate_begin()
    trainer.on_validate_end()
    trainer.keep_engine_load()
    row = {"engine/restarts": 0.0, "engine/running/mean": 6.0, "engine/queued/mean": 2.0}
    assert trainer.engine_metrics() == row
    assert trainer.engine_metrics() == {"engine/restarts": 0.0}, "each poll is in one row"


def test_validations_rows_are_held_out_and_those_of_training_are_not(tmp_path: Path):
    trainer = trainer_of(tmp_path)
    trainer.train_dataset, trainer.val_dataset = SimpleNamespace(held_out=False), SimpleNamespace(held_out=False)
    trainer.train_dataloader = None
    trainer._order_training_rows()
    assert (trainer.train_dataset.held_out, trainer.val_dataset.held_out) == (False, True)


def test_a_curriculum_that_goes_on_has_its_state_before_the_first_batch(tmp_path: Path):
    """torchdata loads it when the iterator is made; metrics and a save may come before that."""
    trainer = trainer_of(tmp_path)
    trainer._run.run.dir.mkdir(parents=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.train_dataloader_it, trainer.train_dataloader = "made before the state was loaded", ["state"]
    trainer._resume_best(4)
    assert trainer.train_dataloader_it == "made before the state was loaded", "verl's own order needs nothing"
    trainer._order = SimpleNamespace()
    trainer._resume_best(4)
    assert list(trainer.train_dataloader_it) == ["state"]


def test_tokens_a_second_are_of_all_devices_and_mfu_of_those_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, written = writing_trainer(tmp_path, monkeypatch, *OWN)
    rows = SimpleNamespace(keys=["a_0_0"], tags=[{"seq_len": 80}], partition_id="train")
    trainer._compute_metrics(rows, {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0}, {"step": 2.0})
    row = written[0][0]
    assert (row["tokens_per_s"], row["perf/throughput"]) == (40.0, 10.0)


@pytest.mark.parametrize(("tp", "pp", "seed"), [(2, 1, None), (1, 1, (5, 6)), (2, 2, (5, 6))])
def test_another_layout_begins_random_states_of_the_step_that_it_resumes_from(
    tp: int, pp: int, seed: tuple[int, int] | None, tmp_path: Path
):
    from retool_mcore.run.checkpoint import LAYOUT, STATE_FILE, VERSION
    from retool_mcore.verl.checkpoint import seed_at, seed_of_other_layout

    layout = {size: {"tp": 2}.get(size, 1) for size in LAYOUT}
    rest = {"identity": {}, "settings": {}, "reshardable": True, "files": {}}
    state = {"version": VERSION, "step": 6, "layout": layout, **rest}
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    now = SimpleNamespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, seed=5)
    found = seed_of_other_layout(SimpleNamespace(engine_config=now), tmp_path)
    assert found == (seed and seed_at(*seed)) and seed_at(5, 6) != seed_at(5, 0)


@pytest.mark.parametrize(("stopped_early", "steps"), [(True, 6), (False, 24)])
def test_a_run_that_resumes_with_its_patience_spent_makes_no_step_more(
    stopped_early: bool, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer = trainer_of(tmp_path, "run.trackers=[]")
    trainer._run.run.dir.mkdir(parents=True)
    trainer._best, trainer.total_training_steps = SimpleNamespace(stopped_early=stopped_early), 24
    trainer.global_steps, trainer.validated = 7, {}  # the first that would come
    trainer.replay_buffer = SimpleNamespace(val_metrics={}, writer=SimpleNamespace(drop_rows_after=lambda step: None))
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
    read = "engine", "checkpoint/actor"
    monkeypatch.setattr(workers, "seed_of_other_layout", lambda engine, folder: (engine, str(folder)))
    monkeypatch.setattr(workers, "load_checkpoint", lambda *given, new_seed: done.append((*given, new_seed)))
    worker: Any = object.__new__(workers.SavingCriticWorker)
    saved = SimpleNamespace(engine="engine", free_reserved_memory=lambda: done.append("room"))
    monkeypatch.setattr(workers.SavingCriticWorker, "_saved_worker", lambda self: saved)
    worker.load_checkpoint("checkpoint/actor")
    assert done == ["room", (*read, ("engine", "checkpoint"))]


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


def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, queue: dict[str, Any], *words: str) -> Any:
    """A trainer that has loaded a checkpoint of ``step`` with that queue; 0: there is none."""
    from retool_mcore.verl import engines, replay
    from retool_mcore.verl import trainer as module

    def gone(partition_id: str, keys: list[str]) -> None:
        for key in keys:
            del queue[key]

    monkeypatch.setattr(module.tq, "kv_list", lambda *_: {"train": dict(queue)})
    monkeypatch.setattr(replay.tq, "kv_clear", gone)
    monkeypatch.setattr(engines.EngineRestarts, "on_init_end", lambda self: None)
    trainer = trainer_of(tmp_path, *words)
    trainer._run.run.dir.mkdir(parents=True, exist_ok=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.global_steps, trainer.replay_buffer = step, SimpleNamespace()
    trainer.on_init_end()
    return trainer


def test_a_resume_keeps_of_the_queue_what_has_a_prompt_and_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The step's own prompts were taken before the queue was saved; 7-11 waits for the next one."""
    prompt = {"is_prompt": True}
    queue = {"6-3_0_0": {}, "6-3_1_0": {}, "7-11": prompt, "7-11_0_0": {}}
    trainer = resumed(tmp_path, monkeypatch, 6, queue)
    assert sorted(queue) == ["7-11", "7-11_0_0"]
    assert (trainer._has_fetched, trainer._uid_step, trainer._uid_count) == (True, 7, 12)


@pytest.mark.parametrize(
    ("step", "words", "validates"),
    [
        (0, ("validation.before=true",), True),
        (0, ("validation.before=false",), False),
        (6, ("validation.before=true",), False),
        (6, ("best.metric=val/accuracy", "validation.every=2", "checkpoint.every_steps=2"), True),
    ],
)  # fmt: skip
def test_what_training_starts_from_is_validated_once_and_a_validation_that_a_kill_took_again(
    step: int, words: tuple[str, ...], validates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = resumed(tmp_path, monkeypatch, step, {}, *words)
    assert trainer.config.trainer.val_before_train is validates


def test_each_worker_belongs_to_the_run_that_its_signs_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl import trainer as module
    from retool_mcore.verl.workers import _Saving

    monkeypatch.setattr(heartbeat, "_process", heartbeat._Process())
    monkeypatch.setattr(module.start, "begin", lambda *_: None)
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, manager: heartbeat.send())
    trainer = trainer_of(tmp_path)
    trainer._run.run.dir.mkdir(parents=True)
    trainer.use_critic, trainer.actor_rollout_wg, trainer.critic_wg = True, _Saving(), SimpleNamespace(told=[])
    trainer.replay_buffer = SimpleNamespace()
    trainer.critic_wg.start_heartbeat = trainer.critic_wg.told.append
    trainer._saver, trainer._writer = module.checkpoint.Saver(trainer._run, lambda folder, step: None), None
    trainer.fit(SimpleNamespace(causes=Counter()))
    assert (trainer._run.run.dir / heartbeat.FILE).is_file()
    assert trainer.critic_wg.told == [str(trainer._run.run.dir.absolute())]


@pytest.mark.parametrize(("step", "rows"), [(1, [0]), (7, [])])
def test_what_training_starts_from_is_row_0_and_a_resume_writes_none(
    step: int, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer, kept = trainer_of(tmp_path, "run.trackers=[]"), []
    trainer._run.run.dir.mkdir(parents=True)
    trainer._best, trainer.total_training_steps = SimpleNamespace(stopped_early=False), 24
    trainer.global_steps, trainer.validated = step, {"val/accuracy": 0.25, "val/words": "none"}
    trainer.replay_buffer = SimpleNamespace(
        val_metrics={"val/accuracy": 0.25}, traces=[], writer=SimpleNamespace(drop_rows_after=kept.append)
    )
    trainer.on_train_begin()
    trainer._writer.close()
    lines = (trainer._run.run.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == rows
    assert [json.loads(line)["val/accuracy"] for line in lines] == [0.25] * len(rows)
    assert kept == [step - 1] and trainer.replay_buffer.val_metrics == {}


def test_a_row_has_the_engines_the_queues_and_the_goals_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of a validation in the row of its step, and in no other."""
    trainer, written = writing_trainer(tmp_path, monkeypatch)
    trainer.engine_metrics = lambda: {"engine/queued/mean": 3.0, "engine/restarts": 2.0}
    trainer._best = SimpleNamespace(stopped_early=False, metrics=lambda: {"best/step": 4})
    trainer._order = SimpleNamespace(metrics=lambda: {"curriculum/seen": 0.5})
    trainer.replay_buffer.step_metrics = lambda batch, metrics: {"behavior/calls": metrics["rollout_corr/kl"] * 8}
    trainer.replay_buffer.val_metrics = {"val/accuracy": 0.5}
    rows = SimpleNamespace(keys=["a_0_0"], tags=[{"seq_len": 7}], partition_id="train")
    for _ in range(2):
        found = {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0, "rollout_corr/kl": 0.125}
        trainer._compute_metrics(rows, found, {"step": 2.0})
    first, second = (row for row, _ in written)
    always = {"engine/queued/mean": 3.0, "engine/restarts": 2.0, "behavior/calls": 1.0, "curriculum/seen": 0.5}
    of_validation = {"val/accuracy": 0.5, "best/step": 4.0}
    assert {name: first[name] for name in always | of_validation} == always | of_validation
    assert {name: second[name] for name in always} == always and not second.keys() & of_validation.keys()
    assert first["perf/total_num_tokens"] == 7


def test_a_row_has_each_number_under_one_name():
    from retool_mcore.verl.trainer import row_of

    metrics = {"actor/grad_norm": 0.5, "actor/lr": 0.1, "note": "words"}
    scores = {"critic/score/mean": 1.0, "critic/rewards/mean": 1.0}
    lengths = {"response_length/mean": 7.0, "behavior/response_tokens": 7.0, "response_length/max": np.int64(9)}
    assert row_of(metrics | scores | lengths) == {
        "actor/grad_norm": 0.5,
        "actor/lr": 0.1,
        "critic/rewards/mean": 1.0,
        "response_length/mean": 7.0,
        "response_length/max": 9.0,
    }
    with_penalty = scores | {"critic/rewards/mean": 0.5}
    assert row_of(with_penalty) == with_penalty
    assert row_of({"behavior/response_tokens": 7.0}) == {"behavior/response_tokens": 7.0}

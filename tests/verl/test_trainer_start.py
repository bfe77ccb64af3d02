"""What our trainer does between verl's start and its first step, and what it puts into a row."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from retool_mcore.run import alive
from tests.verl.test_trainer_wiring import trainer_of, writing_trainer

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, queue: dict[str, Any], *words: str) -> Any:
    """A trainer that has loaded a checkpoint of ``step`` with that queue; 0: there is none."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from retool_mcore.verl import in_flight, replay
    from retool_mcore.verl import trainer as module

    def gone(partition_id: str, keys: list[str]) -> None:
        for key in keys:
            del queue[key]

    monkeypatch.setattr(in_flight.tq, "kv_list", lambda *_: {"train": dict(queue)})
    monkeypatch.setattr(replay.tq, "kv_clear", gone)
    saved = SimpleNamespace(step=step, has_random_states_of=lambda run: True)
    monkeypatch.setattr(module.checkpoint, "find_resume", lambda run: saved if step else None)
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", step))
    trainer = trainer_of(tmp_path, *words)
    trainer._run.run.dir.mkdir(parents=True, exist_ok=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer._load_checkpoint()
    return trainer


def test_a_resume_keeps_of_the_queue_what_has_a_prompt_and_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The step's own prompts were taken before the queue was saved; 7-11 waits for the next one."""
    prompt = {"is_prompt": True}
    queue = {"6-3_0_0": {}, "6-3_1_0": {}, "7-11": prompt, "7-11_0_0": {}}
    trainer = resumed(tmp_path, monkeypatch, 6, queue)
    assert sorted(queue) == ["7-11", "7-11_0_0"]
    assert (trainer._has_fetched, trainer._prompts_named) == (True, 12)


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
    from retool_mcore.verl import trainer as module
    from retool_mcore.verl.asked_to_end import EndingMixin
    from retool_mcore.verl.workers import _Saving

    monkeypatch.setattr(alive, "_process", alive._Process())
    monkeypatch.setattr(module.start, "begin", lambda *_: None)
    monkeypatch.setattr(EndingMixin, "fit", lambda self, manager: alive.sign())
    trainer = trainer_of(tmp_path)
    trainer._run.run.dir.mkdir(parents=True)
    trainer.use_critic, trainer.actor_rollout_wg, trainer.critic_wg = True, _Saving(), SimpleNamespace(told=[])
    trainer.critic_wg.belong_to = trainer.critic_wg.told.append
    trainer._saver, trainer._writer = module.saving.Saver(trainer._run, lambda folder, step: None), None
    trainer.fit(None)
    assert (trainer._run.run.dir / alive.FILE).is_file()
    assert trainer.critic_wg.told == [str(trainer._run.run.dir.absolute())]


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ((), ["engines", "checkpoint", "agent_loops"]),
        (("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1"), ["checkpoint", "engines", "agent_loops"]),
    ],
)
def test_engines_with_their_own_devices_start_after_the_checkpoint(
    words: tuple[str, ...], stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The stages that test_rl.py sees in a whole start, as verl comes to them in each mode."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from retool_mcore.run.start import begun
    from retool_mcore.verl import runner

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", {"vllm": lambda: object})
    monkeypatch.setattr(runner._TaskRunner, "init_agent_loop_manager", lambda self: None)
    run = trainer_of(tmp_path, *words)._run
    runner.register_engine(run, "vllm")
    run.run.dir.mkdir(parents=True)
    assert RolloutReplicaRegistry.get("vllm") is object
    resumed(tmp_path, monkeypatch, 0, {}, *words)
    driver = runner.Driver()
    driver._run_dir = run.run.dir
    driver.init_agent_loop_manager()
    assert [stage for stage, _ in begun(run.run.dir)] == stages


@pytest.mark.parametrize(("step", "rows"), [(1, [0]), (7, [])])
def test_what_training_starts_from_is_row_0_and_a_resume_writes_none(
    step: int, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer, kept = trainer_of(tmp_path, "run.trackers=[]"), []
    trainer._run.run.dir.mkdir(parents=True)
    trainer._best, trainer.total_training_steps = SimpleNamespace(given_up=False), 24
    trainer.global_steps, trainer.validated = step, {"val/accuracy": 0.25, "val/words": "none"}
    trainer._clock = SimpleNamespace(row_written=dict)
    trainer.replay_buffer = SimpleNamespace(
        val_metrics={"val/accuracy": 0.25}, traces=[], writer=SimpleNamespace(keep_up_to=kept.append)
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
    trainer._mismatch = SimpleNamespace(metrics=lambda: {"mismatch/kl": 0.125})
    trainer._load = SimpleNamespace(metrics=lambda: {"engine/queued/max": 3.0})
    trainer.engine_metrics = lambda: {"engine/restarts": 2.0}
    trainer.goal_metrics = lambda validated: {"best/step": 4} if validated else {}
    trainer.replay_buffer.step_metrics = lambda batch, metrics: {"behavior/calls": metrics["mismatch/kl"] * 8}
    trainer.replay_buffer.val_metrics = {"val/accuracy": 0.5}
    ended: list[int] = []
    trainer.stop_without_progress = ended.append
    rows = SimpleNamespace(keys=["a_0_0"], tags=[{"seq_len": 7}], partition_id="train")
    for _ in range(2):
        trainer._compute_metrics(rows, {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0}, {"step": 2.0})
    first, second = (row for row, _ in written)
    always = {"mismatch/kl": 0.125, "engine/queued/max": 3.0, "engine/restarts": 2.0, "behavior/calls": 1.0}
    of_validation = {"val/accuracy": 0.5, "best/step": 4.0}
    assert {name: first[name] for name in always | of_validation} == always | of_validation
    assert {name: second[name] for name in always} == always and not second.keys() & of_validation.keys()
    assert ended == [4, 4] and first["tokens"] == 7

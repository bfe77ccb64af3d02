"""The trainer around a step: start, resume, validation, and rows of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, load_config
from retool_mcore.model.shape import ModelShape
from retool_mcore.platforms import get_platform
from retool_mcore.run.metrics import NonFiniteLoss
from tests.unit.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
OWN = ("train.mode=async", "cluster.gpus_per_node=4", "rollout.gpus=3")
UPDATE = {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0}  # verl's metrics of a step


def trainer_of(tmp_path: Path, *settings: str) -> Any:
    """Ours without verl's set-up, which starts workers."""
    from retool_mcore.verl.step import ReToolTrainer

    trainer = object.__new__(ReToolTrainer)
    trainer._run = load_config(RlConfig, RL, [f"run.root={tmp_path}", *settings])
    trainer._run.run.dir.mkdir(parents=True, exist_ok=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.global_steps, trainer.total_training_steps = 4, 24
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
    trainer._shape = None
    trainer.actor_rollout_wg = SimpleNamespace(peak_memory_gib=lambda: [1.0, 2.5])
    trainer._writer = SimpleNamespace(write=lambda step, row, traces: written.append((row, traces)))
    return trainer, written


def rows_of(*tags: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(keys=[f"a_{row}_0" for row in range(len(tags))], tags=tags, partition_id="train")


@pytest.mark.parametrize("bad", ["actor/pg_loss", "actor/grad_norm", "critic/vf_loss"])
def test_a_loss_that_is_no_number_ends_the_run_before_a_row_is_written(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, written = writing_trainer(tmp_path, monkeypatch)
    with pytest.raises(NonFiniteLoss, match="nan at step 4"):
        trainer._compute_metrics(rows_of({"seq_len": 7}), UPDATE | {bad: float("nan")}, {"step": 2.0})
    assert written == []


def test_rates_and_mfu_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MFU counts the update's seconds and the devices that train; token rates count all devices.

    A frozen weight counts 4 FLOP and not 6.
    """
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    rows = rows_of({"seq_len": 1}, {"seq_len": 3}, {"seq_len": 9, "is_padding": True})
    for settings, flops in (((), 7728), (("lora.rank=1", 'lora.targets=["q_proj","down_proj"]'), 6304)):
        trainer, written = writing_trainer(tmp_path, monkeypatch, *OWN, *settings)
        trainer._shape, trainer._peak_flops = shape, 1000.0
        trainer._compute_metrics(rows, dict(UPDATE), {"step": 9.0, "update_actor": 4.0})
        row = written[0][0]
        assert row["flops"] == flops and row["mfu"] == flops / 4000
        assert row["tokens_per_s"] == 4 / 9 and row["perf/throughput"] == 1 / 9


def test_a_row_has_each_number_under_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The numbers of a validation are in the row of its step, and in no other."""
    trainer, written = writing_trainer(tmp_path, monkeypatch)
    trainer.engine_metrics = lambda: {"engine/queued/mean": 3.0, "engine/restarts": 2.0}
    trainer._best = SimpleNamespace(stopped_early=True, metrics=lambda: {"best/step": 4})
    trainer._order = SimpleNamespace(metrics=lambda: {"curriculum/seen": 0.5})
    trainer.replay_buffer.step_metrics = lambda batch, metrics: {"behavior/calls": metrics["rollout_corr/kl"] * 8}
    trainer.replay_buffer.val_metrics = {"val/accuracy": 0.5}
    found = UPDATE | {"rollout_corr/kl": 0.125, "note": "words"}
    found |= {"actor/loss_tokens": 30, "actor/experts/unused": 0.25, "behavior/response_tokens": 7.0}
    found |= {"critic/score/mean": 1.0, "response_length/mean": 7.0, "response_length/max": np.int64(9)}
    timers = {"step": 2.0, "gen": 1.5, "engine_sleep": 1.0, "testing": 4.0}
    for mean_reward, slowest_s in ((1.0, 0.25), (0.75, 9.0)):  # the second has a penalty of its divergence in it
        metrics = found | {"critic/rewards/mean": mean_reward, "behavior/slowest_tool_s": slowest_s}
        trainer._compute_metrics(rows_of({"seq_len": 7}), metrics, timers)
    (first, traces), (second, no_traces) = written
    wanted = UPDATE | {"rollout_corr/kl": 0.125, "behavior/slowest_tool_s": 0.25, "behavior/calls": 1.0}
    wanted |= {"engine/queued/mean": 3.0, "engine/restarts": 2.0, "curriculum/seen": 0.5, "actor/loss_tokens": 30.0}
    wanted |= {"loss_tokens": 30.0, "experts/unused": 0.25, "memory_gib": 2.5, "perf/total_num_tokens": 7.0}
    wanted |= {"response_length/mean": 7.0, "response_length/max": 9.0, "critic/rewards/mean": 1.0}
    wanted |= {f"timing_s/{name}": seconds for name, seconds in timers.items()}
    wanted |= {"timing_s/tool_wait": 0.25, "timing_s/other": 0.5}  # a validation is not a phase of the step
    measured = {"timing_s/between_steps", "timing_s/metrics", "tokens_per_s", "perf/throughput"}
    wanted |= {name: first[name] for name in measured}
    assert first == wanted | {"val/accuracy": 0.5, "best/step": 4.0}
    assert second.keys() == wanted.keys() | {"critic/score/mean"}
    assert second["timing_s/tool_wait"] == 0.5, "of 1.5 s of sampling the engines took 1 s to sleep"
    assert (traces, no_traces) == (["one"], []), "a row's trajectories go with it, and with no other"
    assert trainer.total_training_steps == 4, "its patience is exhausted"


@pytest.mark.parametrize(
    ("name", "words", "mode", "updates", "devices"),
    [("ReToolTrainer", (), "sync", 3, 5), ("ReToolAsyncTrainer", OWN, "separate_async", 1, 2)],
)
def test_a_trainer_has_verls_name_of_its_mode_the_updates_of_a_batch_and_the_peak_of_what_trains(
    *, name: str, words: Any, mode: str, updates: int, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from retool_mcore.verl import step
    from retool_mcore.verl import trainer as module

    size = ("cluster.gpus_per_node=5", "rollout.group_size=5", "train.mini_batch_prompts=4")
    run = trainer_of(tmp_path, *words, *size, "run.platform=cuda")._run
    config = OmegaConf.create({"trainer": {"v1": {}}})
    for verls in (step.PPOTrainer, step.PPOTrainerSeparateAsync):
        monkeypatch.setattr(verls, "__init__", lambda self, config: None)
    monkeypatch.setattr(module, "settings_of_run", lambda path: run)
    monkeypatch.setattr(module, "read_config", lambda path: {})
    trainer, peak = getattr(step, name)(config), get_platform("cuda").device.peak_flops
    assert (config.trainer.v1.trainer_mode, trainer.updates_per_batch) == (mode, updates)
    assert peak and trainer._peak_flops == devices * peak


def test_engine_metrics_are_of_one_row_and_of_no_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Polls before a validation in its step are in the row; a server may have noted none."""
    from ray.exceptions import RayActorError
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from retool_mcore.verl import engines

    for hook in ("on_validate_begin", "on_validate_end"):
        monkeypatch.setattr(PPOTrainerSync, hook, lambda self: None)
    monkeypatch.setattr(engines.ray, "get", lambda value: value)
    polls = [[(4, 1)], [(90, 90)], [(8, 3)], []]
    server = SimpleNamespace(pop_load_polls=SimpleNamespace(remote=lambda: polls.pop(0)))
    trainer = trainer_of(tmp_path, "train.max_engine_restarts=3")
    trainer.servers, trainer._writer = lambda: [server], object()
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}})
    trainer._count(RayActorError())
    trainer._count(RayActorError())
    trainer.on_validate_begin()
    trainer.on_validate_end()
    trainer.collect_engine_load()
    row = {"engine/restarts": 2.0, "engine/running/mean": 6.0, "engine/queued/mean": 2.0}
    assert trainer.engine_metrics() == row
    trainer._count(RayActorError())
    assert trainer.engine_metrics() == {"engine/restarts": 1.0}, "since the row before"
    trainer.config.actor_rollout_ref.rollout.name = "vllm"
    assert trainer.engine_metrics() == {}, "vLLM's restarts are unknown, so there is no count"


def test_patience_is_counted_over_what_verls_validation_and_ours_have_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: {"val-core/x": 1.0})
    settings = ("best.metric=val/accuracy", "best.patience=[2, 0]", "validation.every=2", "checkpoint.every_steps=2")
    trainer = trainer_of(tmp_path, *settings)
    trainer._resume_best(0)
    for step, value in ((2, 0.5), (4, 0.75), (6, 0.6), (8, 0.7)):
        trainer.global_steps = step
        trainer.replay_buffer = SimpleNamespace(val_metrics={"val/accuracy": value})
        assert trainer._validate() == {"val-core/x": 1.0}
        assert trainer.validated == {"val-core/x": 1.0, "val/accuracy": value}, "best.metric may be either's"
        trainer._stop_without_progress(step)
        assert trainer.total_training_steps == (8 if step == 8 else 24)
    assert trainer._best.metrics() == {"best/step": 4, "best/value": 0.75, "best/waited": 2}


def test_validations_rows_are_held_out_and_those_of_training_have_the_curriculums_order(tmp_path: Path):
    trainer = trainer_of(tmp_path)
    trainer.train_dataset, trainer.val_dataset = SimpleNamespace(held_out=False), SimpleNamespace(held_out=False)
    trainer.train_dataloader = None
    trainer._order_training_rows()
    assert (trainer.train_dataset.held_out, trainer.val_dataset.held_out) == (False, True)
    trainer = trainer_of(tmp_path, "data.curriculum=0.5", "run.seed=7")
    trainer.train_dataset, trainer.val_dataset = range(16), SimpleNamespace(held_out=False)
    trainer.train_dataloader = SimpleNamespace(batch_size=5, collate_fn=None)
    trainer.replay_buffer = SimpleNamespace()
    trainer._order_training_rows()
    assert (trainer.train_dataloader.batch_size, trainer._order.floor, trainer._order.seed) == (5, 0.5, 7)
    assert trainer.replay_buffer.observe == trainer._order.observe
    rows = [trainer._order._next() for _ in range(60)]
    assert all(len({*rows[at : at + 12]}) == 12 for at in range(49)), "a step has no problem twice"
    trainer.train_dataloader_it, trainer.train_dataloader = "made before the state was loaded", ["state"]
    trainer._resume_best(4)
    assert list(trainer.train_dataloader_it) == ["state"], "or a save before the first batch has none"


@pytest.mark.parametrize(("tp", "pp", "same"), [(2, 1, True), (1, 1, False), (2, 2, False)])
def test_another_layout_begins_random_states_of_the_step_that_it_resumes_from(
    tp: int, pp: int, same: bool, monkeypatch: pytest.MonkeyPatch
):
    from retool_mcore.verl import checkpoint

    def state(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(layout={"tp": 2, "pp": 1, "cp": 3}, step=int(folder.name))

    monkeypatch.setattr(checkpoint, "read_state", state)
    config = SimpleNamespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, seed=5)
    engine = SimpleNamespace(engine_config=config)
    seeds = {checkpoint.new_seed_if_relaid_out(engine, Path(step)) for step in ("6", "7")}
    assert seeds == {None} if same else len(seeds) == 2 and None not in seeds


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
    from retool_mcore.verl import engines
    from retool_mcore.verl import trainer as module

    monkeypatch.setattr(module.tq, "kv_list", lambda *_: {})
    monkeypatch.setattr(engines.EngineManager, "on_init_end", lambda self: None)
    trainer = trainer_of(tmp_path, *words)
    trainer.global_steps, trainer.replay_buffer = step, SimpleNamespace()
    trainer.on_init_end()
    assert trainer.config.trainer.val_before_train is validates
    assert trainer.replay_buffer.while_waiting == trainer.while_sampling, "or no signal is heeded"


def test_a_worker_starts_an_asynchronous_save_and_finishes_it_once(monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import workers

    calls: list[Any] = []
    pending = SimpleNamespace(ended=lambda: False, finish=lambda: calls.append("finished"))
    monkeypatch.setattr(workers, "start_save", lambda *given: calls.append(given) or pending)
    worker: Any = workers._Saving()
    worker.engine, worker.checkpoint_config = "engine", SimpleNamespace(async_save=True)
    worker.save_checkpoint("folder", global_step=4, max_ckpt_to_keep=1)
    assert not worker.save_ended()
    worker.finish_save()
    worker.finish_save()
    assert calls == [("engine", "folder", 4), "finished"] and worker.save_ended()


def test_the_data_loaders_state_in_a_checkpoint_is_that_of_the_saved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """verl saves the current step's state, which a run that stops within a step must not keep."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, actor = trainer_of(tmp_path), tmp_path / "actor"
    trainer._saver = SimpleNamespace(save=lambda step: trainer._write_checkpoint(str(actor), step))
    trainer._ending = SimpleNamespace(first_signal=0)
    trainer.trainer_mode = "sync"
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: torch.save(state["now"], tmp_path / "data.pt"))
    state, kept = {"now": "step 4"}, list[str]()
    trainer.train_dataloader = SimpleNamespace(state_dict=lambda: state["now"])
    trainer.save_if_requested()
    state["now"] = "step 5"
    for trainer._stopped in (False, True):
        trainer._save_checkpoint()
        kept.append(torch.load(tmp_path / "data.pt"))
    assert kept == ["step 5", "step 4"]


@pytest.mark.parametrize(("step", "rows", "steps"), [(1, [0], 24), (7, [], 6)])
def test_training_starts_with_row_0_and_a_resume_writes_none(
    step: int, rows: list[int], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that resumes with its patience exhausted makes no further step."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer, kept = trainer_of(tmp_path, "run.trackers=[]"), []
    trainer._best, trainer.total_training_steps = SimpleNamespace(stopped_early=step > 1), 24
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
    assert trainer.total_training_steps == steps

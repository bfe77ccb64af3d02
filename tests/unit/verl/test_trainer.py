"""The trainer around a step: start, resume, validation, and rows of metrics."""

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
from retool_mcore.errors import CheckpointError
from retool_mcore.model.shape import ModelShape
from retool_mcore.platforms import get_platform
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
    trainer._shape = None
    trainer.actor_rollout_wg = SimpleNamespace(peak_memory_gib=lambda: [1.0, 2.5])
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


def test_rates_and_mfu_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MFU counts the update's seconds and the devices that train; token rates count all devices.

    A frozen weight counts 4 FLOP and not 6.
    """
    shape = ModelShape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7, tied=False)
    tags = [{"seq_len": 1}, {"seq_len": 3}, {"seq_len": 9, "is_padding": True}]
    rows = SimpleNamespace(keys=["a_0_0", "a_1_0", "a_1_0"], tags=tags, partition_id="train")
    for settings, flops in (((), 7728), (("lora.rank=1", 'lora.targets=["q_proj","down_proj"]'), 6304)):
        trainer, written = writing_trainer(tmp_path, monkeypatch, *OWN, *settings)
        trainer._shape, trainer._peak_flops = shape, 1000.0
        trainer._compute_metrics(
            rows, {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0}, {"step": 9.0, "update_actor": 4.0}
        )
        row = written[0][0]
        assert row["flops"] == flops and row["mfu"] == flops / 4000
        assert row["tokens_per_s"] == 4 / 9 and row["perf/throughput"] == 1 / 9


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


def sampled_by(engine: str) -> Any:
    return OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": engine}}})


def test_restarts_are_counted_by_row_and_bounded_by_the_run(tmp_path: Path):
    from ray.exceptions import RayActorError

    trainer = trainer_of(tmp_path, "train.max_engine_restarts=3")
    trainer.config = sampled_by("vllm")
    assert trainer.engine_metrics() == {}, "vLLM's restarts are unknown, so there is no count"
    trainer.config = sampled_by("sglang")
    trainer._count(RayActorError())
    trainer._count(RayActorError())
    assert trainer.engine_metrics() == {"engine/restarts": 2.0}
    assert trainer.engine_metrics() == {"engine/restarts": 0.0}, "since the row before"
    trainer._count(RayActorError())
    assert trainer.engine_metrics() == {"engine/restarts": 1.0}


def test_patience_is_counted_over_what_verls_validation_and_ours_have_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    server = SimpleNamespace(pop_load_polls=SimpleNamespace(remote=lambda: polls.pop(0)))
    trainer = trainer_of(tmp_path)
    trainer.servers, trainer._writer, trainer.config = lambda: [server], object(), sampled_by("sglang")
    trainer.on_validate_begin()
    trainer.on_validate_end()
    trainer.collect_engine_load()
    row = {"engine/restarts": 0.0, "engine/running/mean": 6.0, "engine/queued/mean": 2.0}
    assert trainer.engine_metrics() == row
    assert trainer.engine_metrics() == {"engine/restarts": 0.0}, "each poll is in one row"


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


def test_validations_rows_are_held_out_and_those_of_training_are_not(tmp_path: Path):
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


def test_a_resumed_curriculum_has_its_state_before_the_first_batch(tmp_path: Path):
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


@pytest.mark.parametrize(("tp", "pp", "same"), [(2, 1, True), (1, 1, False), (2, 2, False)])
def test_another_layout_begins_random_states_of_the_step_that_it_resumes_from(
    tmp_path: Path, *, tp: int, pp: int, same: bool
):
    from retool_mcore.run.checkpoint import LAYOUT, STATE_FILE, VERSION
    from retool_mcore.verl.checkpoint import new_seed_if_relaid_out

    layout = {size: {"tp": 2}.get(size, 1) for size in LAYOUT}
    rest = {"identity": {}, "settings": {}, "reshardable": True, "files": {}}
    now = SimpleNamespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, seed=5)
    seeds: set[int | None] = set()
    for step in (6, 7):
        state = {"version": VERSION, "step": step, "layout": layout, **rest}
        (tmp_path / STATE_FILE).write_text(json.dumps(state))
        seeds.add(new_seed_if_relaid_out(SimpleNamespace(engine_config=now), tmp_path))
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
    assert worker.log_probs_of_update(asked[1]) is None, "a rank without the output"


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
    trainer._run.run.dir.mkdir(parents=True)
    trainer.config = OmegaConf.create({"trainer": {"val_before_train": None}})
    trainer.global_steps, trainer.replay_buffer = step, SimpleNamespace()
    trainer.on_init_end()
    assert trainer.config.trainer.val_before_train is validates


def test_each_worker_reports_progress_to_the_runs_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl import trainer as module
    from retool_mcore.verl.workers import _Saving

    monkeypatch.setattr(heartbeat, "_process", heartbeat._Process())
    monkeypatch.setattr(module.start, "begin", lambda *_: None)
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, manager: heartbeat.send())
    trainer = trainer_of(tmp_path)
    trainer._run.run.dir.mkdir(parents=True)
    trainer.use_critic, trainer.actor_rollout_wg, trainer.critic_wg = True, _Saving(), SimpleNamespace(folders=[])
    trainer.replay_buffer = SimpleNamespace()
    trainer.critic_wg.start_heartbeat = trainer.critic_wg.folders.append
    trainer._saver, trainer._writer = module.checkpoint.Saver(trainer._run, lambda folder, step: None), None
    trainer.fit(SimpleNamespace(pop_drop_causes=Counter))
    assert (trainer._run.run.dir / heartbeat.FILE).is_file()
    assert trainer.critic_wg.folders == [str(trainer._run.run.dir.absolute())]
    assert trainer.replay_buffer.pop_drop_causes is Counter, "the buffer names the causes in its error"


@pytest.mark.parametrize(("step", "rows", "steps"), [(1, [0], 24), (7, [], 6)])
def test_training_starts_with_row_0_and_a_resume_writes_none(
    step: int, rows: list[int], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that resumes with its patience exhausted makes no further step."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "on_train_begin", lambda self: None)
    trainer, kept = trainer_of(tmp_path, "run.trackers=[]"), []
    trainer._run.run.dir.mkdir(parents=True)
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


def test_a_row_has_the_engines_the_queues_and_the_goals_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of a validation in the row of its step, and in no other."""
    trainer, written = writing_trainer(tmp_path, monkeypatch)
    trainer.engine_metrics = lambda: {"engine/queued/mean": 3.0, "engine/restarts": 2.0}
    trainer._best = SimpleNamespace(stopped_early=True, metrics=lambda: {"best/step": 4})
    trainer._order = SimpleNamespace(metrics=lambda: {"curriculum/seen": 0.5})
    trainer.replay_buffer.step_metrics = lambda batch, metrics: {"behavior/calls": metrics["rollout_corr/kl"] * 8}
    trainer.replay_buffer.val_metrics = {"val/accuracy": 0.5}
    rows = SimpleNamespace(keys=["a_0_0"], tags=[{"seq_len": 7}], partition_id="train")
    for _ in range(2):
        found = {"actor/pg_loss": 0.5, "actor/grad_norm": 1.0, "rollout_corr/kl": 0.125}
        found |= {"actor/loss_tokens": 30, "actor/experts/unused": 0.25, "behavior/slowest_tool_s": 0.5}
        trainer._compute_metrics(rows, found, {"step": 2.0, "gen": 1.5})
    first, second = (row for row, _ in written)
    always = {"engine/queued/mean": 3.0, "engine/restarts": 2.0, "behavior/calls": 1.0, "curriculum/seen": 0.5}
    of_validation = {"val/accuracy": 0.5, "best/step": 4.0}
    assert {name: first[name] for name in always | of_validation} == always | of_validation
    assert {name: second[name] for name in always} == always and not second.keys() & of_validation.keys()
    assert first["perf/total_num_tokens"] == 7 and "actor/experts/unused" not in first
    assert (first["loss_tokens"], first["experts/unused"], first["memory_gib"]) == (30, 0.25, 2.5)
    assert first["timing_s/tool_wait"] == first["timing_s/other"] == 0.5
    assert trainer.total_training_steps == 4, "its patience is exhausted"


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


def test_phases_add_up_to_the_step_and_a_wait_for_calls_is_part_of_sampling():
    from retool_mcore.verl.trainer import phase_times

    timers = {"gen": 6.0, "engine_sleep": 1.0, "reward": 0.5, "update_actor": 3.0, "step": 11.0, "testing": 4.0}
    times = phase_times(timers, 2.0)
    assert (times["timing_s/gen"], times["timing_s/tool_wait"], times["timing_s/other"]) == (6.0, 2.0, 1.5)
    assert times["timing_s/testing"] == 4.0, "not a phase of the step"
    assert phase_times(timers, 9.0)["timing_s/tool_wait"] == 5.0, "the engines took 1 s of the 6 s to sleep"


@pytest.mark.parametrize(
    ("cause", "name"), [(CheckpointError("full"), "CheckpointError"), (KeyError("actor"), "RayTaskError(KeyError)")]
)
def test_a_workers_own_error_is_unwrapped_and_a_bug_keeps_its_traceback(cause: Exception, name: str):
    from ray.exceptions import RayTaskError

    from retool_mcore.verl.checkpoint import unwrap_worker_errors

    with pytest.raises(Exception) as caught, unwrap_worker_errors():
        raise RayTaskError("save", "the worker's traceback", cause).as_instanceof_cause()
    assert type(caught.value).__name__ == name
    assert ("the worker's traceback" in str(caught.value)) == (name != "CheckpointError")


@pytest.mark.parametrize(("before", "after"), [(40, 8), (12, 6), (2, 1), (1, 1)])
def test_the_driver_leaves_half_of_the_cores_to_engines_and_workers(before, after):
    from retool_mcore.verl.runner import use_few_threads

    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        use_few_threads()
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_worker_makes_a_save_or_starts_it_and_finishes_it_once(asynchronous: bool, monkeypatch: pytest.MonkeyPatch):
    from retool_mcore.verl import workers

    calls: list[Any] = []
    pending = SimpleNamespace(ended=lambda: False, finish=lambda: calls.append("finished"))
    monkeypatch.setattr(workers, "save", lambda *given: calls.append(given))
    monkeypatch.setattr(workers, "start_save", lambda *given: calls.append(given) or pending)
    worker: Any = workers._Saving()
    worker.engine, worker.checkpoint_config = "engine", SimpleNamespace(async_save=asynchronous)
    worker.save_checkpoint("folder", global_step=4, max_ckpt_to_keep=1)
    assert worker.save_ended() is not asynchronous
    worker.finish_save()
    worker.finish_save()
    assert calls == [("engine", "folder", 4), "finished"][: 1 + asynchronous] and worker.save_ended()

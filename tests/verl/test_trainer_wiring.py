"""What our trainer hands from verl to our parts, with values at which another wire would show."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import RunError
from retool_mcore.model.shape import ModelShape
from retool_mcore.run.metrics import NonFiniteLoss
from tests.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def trainer_of(tmp_path: Path, *settings: str) -> Any:
    """Ours without verl's set-up, which starts workers."""
    from retool_mcore.verl.trainer import ReToolTrainer

    trainer = object.__new__(ReToolTrainer)
    trainer._run = load_config(RlConfig, RL, [f"run.root={tmp_path}", *settings])
    trainer.global_steps = 4
    return trainer


def writing_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> tuple[Any, list[Any]]:
    """One that makes a step's row of verl's metrics, and the rows that it writes."""
    from retool_mcore.verl.unpadded import UnpaddedTrainer

    monkeypatch.setattr(UnpaddedTrainer, "_compute_metrics", lambda *_, **__: None)
    trainer, written = trainer_of(tmp_path, *settings), []
    trainer._forget_step()
    trainer._clock = SimpleNamespace(metrics_begin=lambda: None, row_written=dict)
    trainer.replay_buffer = SimpleNamespace(step_metrics=lambda batch, metrics: {}, val_metrics={}, traces=["one"])
    trainer.goal_metrics = lambda validated: {}
    trainer.stop_without_progress = lambda step: None
    trainer.engine_metrics = dict
    trainer._load = SimpleNamespace(metrics=dict)
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
    assert row["loss"] == 0.5 and row["grad_norm"] == 1.0
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


def test_rows_are_dealt_by_the_length_of_prompt_and_response_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transfer_queue import KVBatchMeta

    from retool_mcore.verl import trainer as module
    from retool_mcore.verl.dealing import deal, order_for_ranks

    monkeypatch.setattr(module, "upsample_batch_to_divisible_size", lambda batch, multiple, eos: batch)
    settings = ("cluster.gpus_per_node=2", "rollout.group_size=2", "train.prompts_per_step=4")
    trainer = trainer_of(tmp_path, *settings, "train.mini_batch_prompts=4")
    trainer.updates_of_a_batch, trainer.local_trigger_step = 1, 0
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    prompts, responses = [9, 1, 7, 3, 5, 8, 2, 6], [1, 80, 20, 3, 60, 7, 40, 10]
    keys = [f"{name}_{row}_0" for name in "abcd" for row in range(2)]
    tags = [
        {"prompt_len": 100 * prompt, "response_len": 10 * said, "seq_len": 100 * prompt + 10 * said}
        for prompt, said in zip(prompts, responses, strict=True)
    ]
    dealt = deal([key[0] for key in keys], 1, (0, 4, 0))
    orders = {name: order_for_ranks(dealt, [tag[name] for tag in tags], 2) for name in tags[0]}
    assert orders["seq_len"] not in (orders["prompt_len"], orders["response_len"])
    found = trainer._balance_batch(KVBatchMeta(partition_id="train", keys=list(keys), tags=tags), {})
    assert found.keys == [keys[row] for row in orders["seq_len"]]


@pytest.mark.parametrize(("quantization", "told"), [(None, ["once"]), ("fp8", [])])
def test_engines_of_their_own_get_the_base_once_and_new_ones_again(
    quantization: str | None, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Quantized weights are read whole each time."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    from retool_mcore.verl.workers import SavingDetachedActorWorker

    monkeypatch.setattr(DetachActorWorker, "init_model", lambda self: None)
    worker: Any = object.__new__(SavingDetachedActorWorker)
    found: list[str] = []
    adapters = SimpleNamespace(send_base_once=lambda: found.append("once"), engines_have_base=True)
    worker.actor, worker.rollout = SimpleNamespace(engine=SimpleNamespace(adapters=adapters)), None
    worker.config = OmegaConf.create({"rollout": {"quantization": quantization}})
    worker.init_model()
    assert found == told
    worker.forget_engines()
    assert adapters.engines_have_base is False


class Groups:
    """Stands for verl's buffer: which groups its filter has set aside."""

    def __init__(self, aside: set[str]) -> None:
        self.aside = aside

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        return self.aside, Counter()


def test_the_curriculum_is_told_a_group_that_was_set_aside_once():
    """verl asks again and again until it has cleared the group."""
    from retool_mcore.verl.replay import ReplayMixin

    class Buffer(ReplayMixin, Groups):
        def __init__(self) -> None:
            Groups.__init__(self, {"a"})
            self._observed: set[str] = set()
            self.finished_keys = {"train": {"a", "b"}, "val": {"c"}}
            self.partitions = {"train": {"a_0_0": {}, "a_1_0": {}, "b_0_0": {}}, "val": {"c_0_0": {}}}
            self.told: list[list[str]] = []

        def _tell_answers(self, keys: list[str], partition_id: str) -> None:
            self.told += [sorted(keys)] if keys else []

    buffer = Buffer()
    for _ in range(3):
        buffer._dapo_filtered_keys("train")
    assert buffer.told == [["a_0_0", "a_1_0"]]
    buffer.aside = {"a", "b"}
    buffer._dapo_filtered_keys("train")
    assert buffer.told[1:] == [["b_0_0"]]
    buffer._dapo_filtered_keys("val")
    assert len(buffer.told) == 2, "validation teaches the curriculum nothing"


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
    with pytest.raises(RunError, match=r"train\.max_engine_restarts = 3 allows no restart"):
        trainer._count(RayActorError())


def test_a_new_engine_gets_the_version_of_the_last_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also after a resume, and not that of the step that goes on."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    for hook in ("on_init_end", "on_step_end"):
        monkeypatch.setattr(PPOTrainerSync, hook, lambda self: None)
    trainer, synced = trainer_of(tmp_path), []
    calls = dict.fromkeys(("abort_replicas", "sleep_replicas", "resume_generation_replicas"), lambda: None)
    trainer.checkpoint_manager = SimpleNamespace(update_weights=synced.append, **calls)
    trainer.llm_server_manager, trainer.replay_buffer = SimpleNamespace(), SimpleNamespace()
    trainer._detach_dead = lambda: None
    trainer.on_init_end()
    trainer.trainer_mode, trainer.global_steps, trainer.total_training_steps = "sync", 5, 5
    trainer._sync_again()
    trainer.on_step_end()
    trainer.global_steps = 6
    trainer._sync_again()
    assert synced == [4, 5]


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
    trainer.resume_best(0)
    for step, value in ((2, 0.5), (4, 0.75), (6, 0.6), (8, 0.7)):
        trainer.global_steps = step
        trainer.replay_buffer = SimpleNamespace(val_metrics={"val/accuracy": value})
        assert trainer._validate() == {"val-core/x": 1.0}
        assert trainer.validated == {"val-core/x": 1.0, "val/accuracy": value}, "best.metric may be either's"
        trainer.stop_without_progress(step)
        assert trainer.total_training_steps == (8 if step == 8 else 24)
    assert trainer.goal_metrics(True) == {"best/step": 4, "best/value": 0.75, "best/waited": 2}
    assert trainer.goal_metrics(False) == {}, "in a row without a validation"

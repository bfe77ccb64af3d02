"""An RL run that is asked to end keeps the last step whose updates are whole."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from retool_mcore.config import RlConfig, load_config
from retool_mcore.run import saving
from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.ending import Ended
from tests.verl.loss_scenario import RL

pytestmark = pytest.mark.usefixtures("verl_on_cpu")
TRAINERS = {"sync": "ReToolTrainer", "partial_rollout": "ReToolPartialRolloutTrainer", "async": "ReToolAsyncTrainer"}
IN_FLIGHT = {"sync": (), "partial_rollout": ("train.mode=partial_rollout",),
             "async": ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1")}  # fmt: skip


class Run:
    """verl's trainer without models: a step changes ``weights``, and a phase may be signalled.

    ``given`` counts the prompts that the loader gave, one a step; ``queue`` has those in flight. In
    the modes that have some, the first stands there before the first step.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, mode: str = "sync") -> None:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        from retool_mcore.verl import trainer as ours

        kind: Any = getattr(ours, TRAINERS[mode])
        trainer: Any = object.__new__(kind)
        self.trainer, self.mode = trainer, mode
        trainer._run = load_config(
            RlConfig, RL, [f"run.root={tmp_path}", "train.steps=9", "checkpoint.every_steps=4", *settings]
        )
        trainer._saver = saving.Saver(trainer._run, trainer._write_checkpoint)
        trainer.global_steps, trainer.trainer_mode, trainer.local_trigger_step = 0, kind.verl_mode, 0
        trainer.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
        trainer.config, trainer.total_training_steps = SimpleNamespace(trainer=SimpleNamespace(test_freq=-1)), 9
        trainer.prev_step_profile, trainer._step_sample_wait_seconds = False, 0.0
        trainer.use_critic, trainer.timing_raw, trainer._detach_dead = False, {}, lambda: None
        trainer._load = SimpleNamespace(ask=lambda: None)
        trainer._reports = SimpleNamespace(read=lambda keys, partition: None)
        trainer._start_lost = lambda: []
        trainer._admit = trainer._put_to_sleep = lambda back: None
        trainer._restart_dead = lambda: None
        trainer.curr_step_profile, trainer._writer, trainer._saved_groups = False, None, lambda: []
        trainer._run.run.dir.mkdir(parents=True)
        self.weights, self.calls = [0], list[str]()
        first = 0 if mode == "sync" else 1  # a batch is in flight before the first step
        self.queue, self.state = [1][:first], {"given": first}
        engines = ("abort_replicas", "sleep_replicas", "update_weights", "resume_generation_replicas")
        trainer.checkpoint_manager = SimpleNamespace(**{name: self._call(name) for name in engines})
        trainer.standalone_checkpoint_manager = trainer.checkpoint_manager
        trainer.replay_buffer = SimpleNamespace()
        trainer.train_dataloader = SimpleNamespace(state_dict=lambda: self.state)  # which goes on changing
        self.at: Callable[[str, int], None] = lambda phase, step: None
        monkeypatch.setattr(PPOTrainer, "fit", self._fit)
        monkeypatch.setattr(PPOTrainer, "_add_batch_to_generate", lambda trainer: self._add())
        monkeypatch.setattr(PPOTrainer, "_save_checkpoint", self._save)
        monkeypatch.setattr(PPOTrainer, "_update_critic", lambda trainer, batch, metrics: self._update("critic"))
        monkeypatch.setattr(PPOTrainer, "_update_actor", lambda trainer, batch, metrics: self._update("actor"))
        (theirs,) = (
            base for base in kind.__mro__ if base.__module__.startswith("verl.") and base.__base__ is PPOTrainer
        )
        monkeypatch.setattr(theirs, "on_init_end", lambda trainer: None)
        trainer.on_init_end()

    def _call(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(name)

    def _update(self, role: str) -> None:
        self.at(role, self.trainer.global_steps)
        self.weights.append(self.trainer.global_steps)

    def _save(self) -> None:
        trainer = self.trainer
        folder = saving.step_folder(trainer._run, trainer.global_steps)
        self.calls.append(f"save {trainer.global_steps}")
        (folder / "actor").mkdir()
        (folder / "actor/weights").write_text(str(self.weights))
        torch.save(trainer.train_dataloader.state_dict(), folder / "data.pt")
        torch.save(self.queue, folder / "queue.pt")

    def _add(self) -> None:
        self.state["given"] += 1
        self.queue.append(self.state["given"])

    def _fit(self, agent_loop_manager: Any) -> None:
        trainer = self.trainer
        for step in range(1, 10):
            trainer.global_steps = step
            trainer._add_batch_to_generate()
            self.at("fetch", step)
            trainer.on_sample_begin()
            for _ in range(5):
                self.at("sample", step)
                trainer.replay_buffer.while_waiting()
            self.queue.pop(0)
            trainer.on_sample_end()
            self.at("values", step)
            batch = SimpleNamespace(extra_info={}, keys=[], partition_id="train")
            if trainer.use_critic:
                trainer._update_critic(batch, {})
            trainer._update_actor(batch, {})
            if step % 4 == 0:
                trainer._save_checkpoint()
                self.at("save", step)
            trainer.on_step_end()
            self.at("sync", step)

    def signalled(self, phase: str, step: int, number: int = signal.SIGTERM) -> Ended:
        def send(at: str, at_step: int) -> None:
            if (at, at_step) == (phase, step) and not self.trainer._ending.asked:
                os.kill(os.getpid(), number)
                while not self.trainer._ending.asked:
                    time.sleep(0.001)

        self.at = send
        with pytest.raises(Ended) as caught:
            self.trainer.fit(None)
        return caught.value

    def saved(self) -> tuple[int, str, int]:
        """Of the newest checkpoint: step, weights, and how many prompts the loader had given."""
        newest = complete_checkpoints(self.trainer._run.run.dir / "checkpoints")[-1]
        given = torch.load(newest.path / "data.pt")["given"]
        return newest.step, (newest.path / "actor/weights").read_text(), given


@pytest.mark.parametrize(
    ("phase", "kept"),
    [("fetch", 5), ("sample", 5), ("values", 5), ("actor", 6), ("sync", 6)],
)
def test_a_step_without_an_update_is_broken_off_and_another_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, kept: int
):
    run = Run(tmp_path, monkeypatch)
    ended = run.signalled(phase, 6)
    assert run.saved() == (kept, str(list(range(kept + 1))), kept), "prompts of the broken step are given again"
    assert ended.code == 143
    assert ended.words == f"note: ended by SIGTERM: step {kept} is saved, and the same command goes on after it"
    before = ["abort_replicas", "sleep_replicas"] if phase in ("fetch", "sample") else []
    if kept == 5:
        assert run.calls[-1 - len(before) :] == [*before, "save 5"], "a save needs the devices that engines have"
    else:
        assert run.calls.count("save 6") == 1


@pytest.mark.parametrize(("phase", "step"), [("save", 4), ("sync", 4), ("sample", 5)])
def test_what_is_saved_already_is_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, step: int
):
    run = Run(tmp_path, monkeypatch)
    run.signalled(phase, step)
    assert (run.saved()[0], run.saved()[2], run.calls.count("save 4")) == (4, 4, 1)


def test_engines_with_devices_of_their_own_go_on_while_a_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = ("train.mode=async", "cluster.gpus_per_node=2", "rollout.gpus=1", "algorithm.importance_sampling=token")
    run = Run(tmp_path, monkeypatch, *own)
    run.signalled("sample", 6)
    assert run.calls[-1] == "save 5" and "abort_replicas" not in run.calls


def test_the_critics_update_is_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path, monkeypatch)
    run.trainer.use_critic = True
    run.signalled("critic", 3)
    assert run.saved() == (3, str([0, 1, 1, 2, 2, 3, 3]), 3), "an actor without its critic's update is no state"
    run = Run(tmp_path / "before", monkeypatch)
    run.trainer.use_critic = True
    run.signalled("values", 3)
    assert run.saved()[0] == 2


@pytest.mark.parametrize("mode", ["partial_rollout", "async"])
@pytest.mark.parametrize(
    ("phase", "kept"),
    [("fetch", 5), ("sample", 5), ("values", 6), ("actor", 6), ("sync", 6)],
)
def test_no_prompt_in_flight_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, phase: str, kept: int):
    """What the loader gave was learnt from or is in the queue that is saved.

    A step that has taken its batch out of the queue is finished.
    """
    run = Run(tmp_path, monkeypatch, *IN_FLIGHT[mode], mode=mode)
    run.signalled(phase, 6)
    step, weights, given = run.saved()
    queue = torch.load(run.trainer._run.run.dir / f"checkpoints/global_step_{step}/queue.pt")
    assert (step, weights) == (kept, str(list(range(kept + 1))))
    assert [*range(1, kept + 1), *queue] == list(range(1, given + 1))
    at = run.calls.index(f"save {kept}")
    assert (run.calls[at - 2 : at] == ["abort_replicas", "sleep_replicas"]) == (mode == "partial_rollout")


@pytest.mark.parametrize("mode", ["sync", "partial_rollout", "async"])
def test_after_the_save_no_step_begins_although_its_batch_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    """Prompts in flight may fill the queue before a step asks, and then nobody waits."""
    run = Run(tmp_path, monkeypatch, *IN_FLIGHT[mode], mode=mode)
    run.trainer.replay_buffer.while_waiting = lambda: None
    run.signalled("actor", 3)
    assert run.saved()[:2] == (3, "[0, 1, 2, 3]") and run.weights[-1] == 3


def test_between_the_updates_of_a_step_nothing_is_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Mode "async" samples again within a step, when the weights are no step's any more."""
    run = Run(tmp_path, monkeypatch)

    def at(phase: str, step: int) -> None:
        run.trainer.local_trigger_step = int(step == 3)
        if (phase, step) == ("sample", 3) and not run.trainer._ending.asked:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not run.trainer._ending.asked:
                time.sleep(0.001)

    run.at = at
    with pytest.raises(Ended) as caught:
        run.trainer.fit(None)
    assert (caught.value.code, run.saved()[0]) == (143, 3)


def test_in_the_first_step_there_is_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path, monkeypatch)
    ended = run.signalled("sample", 1, signal.SIGINT)
    assert ended.code == 130 and "no checkpoint is kept, and the same command starts from the" in ended.words
    assert not any(call.startswith("save") for call in run.calls)


def test_a_run_that_keeps_nothing_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path, monkeypatch, "checkpoint.every_steps=0", "checkpoint.export=false")
    run.signalled("sample", 3)
    assert not any(call.startswith("save") for call in run.calls)


@pytest.mark.parametrize(("restored", "batches", "first_name"), [("7-11", 1, "8-12"), ("6-11", 2, "8-4")])
def test_a_step_that_repeats_one_has_its_prompts_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: str, batches: int, first_name: str
):
    """Step 7 begins. A checkpoint of step 6 itself has prompts of step 6 at most, an end in step 7
    has those of 7: none is fetched again, and later ones get names of their own.
    """
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl import in_flight

    tags = {"5-9": {"is_prompt": True}, restored: {"is_prompt": True}, "7-8_0_0": {"seq_len": 3}}
    monkeypatch.setattr(in_flight.tq, "kv_list", lambda partition: {"train": tags})
    trainer: Any = Run(tmp_path, monkeypatch).trainer
    fetched: list[list[str]] = []

    def add(trainer: Any) -> None:
        fetched.append(list(trainer._fetch_one_gen_batch()["uid"]))

    monkeypatch.setattr(PPOTrainer, "_fetch_one_gen_batch", lambda trainer: TensorDict({"raw": torch.zeros(4)}, 4))
    monkeypatch.setattr(PPOTrainer, "_add_batch_to_generate", add)
    trainer.global_steps = 6
    trainer.prompts_restored()
    for trainer.global_steps in (7, 8):
        trainer.prepare_step()
    assert len(fetched) == batches and fetched[-1][0] == first_name

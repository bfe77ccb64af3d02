"""An RL run that is asked to end keeps the last step whose updates are whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")
from retool_mcore.config import RlConfig, load_config
from retool_mcore.platforms import get_platform
from retool_mcore.run import saving
from retool_mcore.run.checkpoint import complete_checkpoints
from retool_mcore.run.ending import Ended
from retool_mcore.verl.plugin import assert_loaded
from tests.verl.loss_scenario import RL

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="platform cpu refuses an accelerator")
PHASES = ("fetch", "sample", "values", "critic", "actor", "save", "sync")


@pytest.fixture(autouse=True, scope="module")
def verl_imports_here() -> None:
    get_platform("cpu").activate()
    assert_loaded()


class Run:
    """verl's trainer without models: a step changes ``weights``, and a phase may be signalled."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

        from retool_mcore.verl.trainer import ReToolTrainer

        trainer: Any = object.__new__(ReToolTrainer)
        self.trainer = trainer
        trainer._run = load_config(
            RlConfig, RL, [f"run.root={tmp_path}", "train.steps=9", "checkpoint.every_steps=4", *settings]
        )
        trainer._saver = saving.Saver(trainer._run, trainer._write_checkpoint)
        trainer.global_steps, trainer.trainer_mode, trainer.local_trigger_step = 0, "sync", 0
        trainer.use_critic, trainer.timing_raw, trainer._detach_dead = False, {}, lambda: None
        trainer._start_lost = lambda: []
        trainer._admit = trainer._put_to_sleep = lambda back: None
        trainer._restart_dead = lambda: None
        trainer.curr_step_profile, trainer._writer, trainer._saved_groups = False, None, lambda: []
        trainer._run.run.dir.mkdir(parents=True)
        self.weights, self.state, self.calls = [0], {"given": 0}, list[str]()
        engines = ("abort_replicas", "sleep_replicas", "update_weights", "resume_generation_replicas")
        trainer.checkpoint_manager = SimpleNamespace(**{name: self._call(name) for name in engines})
        trainer.replay_buffer = SimpleNamespace()
        trainer.train_dataloader = SimpleNamespace(state_dict=lambda: self.state)  # which goes on changing
        self.at: Callable[[str, int], None] = lambda phase, step: None
        monkeypatch.setattr(PPOTrainer, "fit", self._fit)
        monkeypatch.setattr(PPOTrainer, "_save_checkpoint", self._save)
        monkeypatch.setattr(PPOTrainer, "_update_critic", lambda trainer, batch, metrics: self._update("critic"))
        monkeypatch.setattr(PPOTrainer, "_update_actor", lambda trainer, batch, metrics: self._update("actor"))
        monkeypatch.setattr(PPOTrainerSync, "on_init_end", lambda trainer: None)
        trainer.on_init_end()

    def _call(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)

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

    def _fit(self, agent_loop_manager: Any) -> None:
        trainer = self.trainer
        for step in range(1, 10):
            trainer.global_steps = step
            self.state["given"] += 1
            self.at("fetch", step)
            trainer.on_sample_begin()
            for _ in range(5):
                self.at("sample", step)
                trainer.replay_buffer.while_waiting()
            trainer.on_sample_end()
            self.at("values", step)
            batch = SimpleNamespace(extra_info={})
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

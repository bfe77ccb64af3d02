"""In mode "sync" the next step's prompts are sampled while the metrics of a step are written."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def steps_of(monkeypatch: pytest.MonkeyPatch, *, mode: str, validates_every: int = -1) -> list[str]:
    """What a trainer of three steps with two prompts each does, in order."""
    from tensordict import TensorDict
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from retool_mcore.verl.in_flight import InFlightMixin

    done: list[str] = []

    class Trainer(InFlightMixin):
        def on_sample_end(self) -> None: ...

    def submitted(batch: Any) -> None:
        names = [getattr(uid, "data", uid) for uid in batch["uid"]]
        done.append(f"prompts {' '.join(names)} of step {batch['global_steps']}")

    class Data(dict[str, int]):
        train_batch_size = 2

    fetched = TensorDict({"row": torch.arange(2)}, batch_size=2)
    monkeypatch.setattr(PPOTrainer, "_fetch_one_gen_batch", lambda _: fetched.clone())
    monkeypatch.setattr(PPOTrainer, "on_step_end", lambda self: done.append(f"weights of step {self.global_steps}"))
    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_batch_put=lambda **_: None))
    trainer: Any = object.__new__(Trainer)
    trainer.config = SimpleNamespace(data=Data(), trainer=SimpleNamespace(test_freq=validates_every))
    trainer.trainer_mode, trainer.total_training_steps = mode, 3
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=submitted)
    for step in (1, 2, 3):
        trainer.global_steps = step
        trainer.prepare_step()
        done.append(f"learns {step}")
        trainer.on_step_end()
        done.append(f"metrics of step {trainer.global_steps}")
    return done


def test_the_next_prompts_are_sampled_before_the_metrics_are_written(monkeypatch: pytest.MonkeyPatch):
    assert steps_of(monkeypatch, mode="sync") == [
        "prompts 1-0 1-1 of step 1",
        "learns 1",
        "weights of step 1",
        "prompts 2-2 2-3 of step 2",
        "metrics of step 1",
        "learns 2",
        "weights of step 2",
        "prompts 3-4 3-5 of step 3",
        "metrics of step 2",
        "learns 3",
        "weights of step 3",
        "metrics of step 3",
    ]


def test_a_validation_has_the_engines_for_itself(monkeypatch: pytest.MonkeyPatch):
    done = steps_of(monkeypatch, mode="sync", validates_every=2)
    assert done.index("metrics of step 2") < done.index("prompts 3-4 3-5 of step 3")
    assert done.index("prompts 2-2 2-3 of step 2") < done.index("metrics of step 1")


def test_other_modes_have_their_prompts_in_flight_anyway(monkeypatch: pytest.MonkeyPatch):
    done = steps_of(monkeypatch, mode="colocate_async")
    assert [each for each in done if each.startswith("prompts")] == [
        "prompts 1-0 1-1 of step 1",
        "prompts 2-2 2-3 of step 2",
        "prompts 3-4 3-5 of step 3",
    ]
    assert done.index("metrics of step 1") < done.index("prompts 2-2 2-3 of step 2")

"""What a resume refuses because the saved schedule would not fit it, and that it names the rest."""

from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.run import checkpoint
from tests.unit.run.test_checkpoint_files import PPO, RL_7B, run_in, save

COSINE = ("optim.schedule=cosine",)


@pytest.mark.parametrize(
    ("before", "setting", "said"),
    [
        (COSINE, "train.mini_batch_prompts=32", "mini_batch_prompts was 64, now 32"),
        ((*COSINE, *PPO), "critic.warmup_steps=4", "critic.warmup_steps was 0, now 4"),
    ],
)
def test_what_moves_the_updates_along_the_schedule_is_refused(
    tmp_path: Path, before: tuple[str, ...], setting: str, said: str
):
    """With half the mini-batch step 51 would start at update 400 of 800 as if it were of 1,600."""
    here = f"run.root={tmp_path}"
    save(load_config(RlConfig, RL_7B, [here, *before]), 50)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.find_resume(load_config(RlConfig, RL_7B, [here, *before, setting]))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.group_size=8", "group_size was 16, now 8"),
        ("train.prompts_per_step=256", "prompts_per_step was 512, now 256"),
        ("rollout.tools=[]", "tool was True, now False"),
    ],
)
def test_another_step_or_another_task_is_another_run(tmp_path: Path, setting: str, said: str):
    here = f"run.root={tmp_path}"
    save(load_config(RlConfig, RL_7B, [here]), 50)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.find_resume(load_config(RlConfig, RL_7B, [here, setting]))


def test_every_other_changed_setting_is_told_by_name(tmp_path: Path):
    """The 7B recipe has a constant rate, so that the number of updates bends nothing."""
    here = (f"run.root={tmp_path}", "validation.temperature=1.0")
    save(load_config(RlConfig, RL_7B, here), 50)
    changes = {
        "train.mini_batch_prompts": ("64", "32"),
        "algorithm.loss": ("'ppo'", "'gspo'"),
        "algorithm.clip": ("[0.2, 0.28]", "[0.2, 0.3]"),
        "algorithm.mask": ("[]", "['truncated']"),
        "rollout.temperature": ("1.0", "0.7"),
        "reward.call_bonus": ("[0.0, -0.6]", "[0.1, -0.6]"),
    }
    settings = [f"{key}={new.strip(chr(39)).lower()}" for key, (_, new) in changes.items()]
    config = load_config(RlConfig, RL_7B, [*here, *settings])
    found = checkpoint.find_resume(config)
    assert found is not None
    assert set(checkpoint.changed_settings(found, config)) == {
        f"{key} was {old}, now {new}" for key, (old, new) in changes.items()
    }


CONSTANT = ("optim.schedule=constant", "optim.warmup_fraction=0.1")


@pytest.mark.parametrize(
    ("saved", "settings", "now", "said"),
    [
        (200, CONSTANT, 201, ""),
        (200, CONSTANT, 4000, "the warm-up of 0.1 of all steps is not over at step 200"),
        (100, CONSTANT, 150, ""),
        (10, CONSTANT, 201, "is not over at step 10. First .* beyond step 21"),
        (200, (), 201, ""),
        (200, ("optim.min_lr=0",), 201, r"ended at optim.min_lr = 0, at which nothing is learnt. Set optim.min_lr"),
        (150, (), 201, r'"cosine" spans all steps, so the rates of the first 150 .* retool export \S+_150 --to'),
        (150, (), 180, r'"cosine" spans all steps, so the rates of the first 150'),
    ],
)
def test_a_run_goes_on_to_more_steps_where_its_schedule_allows_it(
    tmp_path: Path, saved: int, settings: tuple[str, ...], now: int, said: str
):
    save(run_in(tmp_path, *settings, "train.steps=200"), saved)
    longer = run_in(tmp_path, *settings, f"train.steps={now}")
    if said:
        with pytest.raises(CheckpointError, match=said):
            checkpoint.find_resume(longer)
        return
    found = checkpoint.find_resume(longer)
    assert found is not None and found.step == saved
    changed = checkpoint.changed_settings(found, longer)
    assert f"train.steps was 200, now {now}" in changed
    ended = "the schedule has ended, and the rate stays at optim.min_lr = 0.0003"
    assert (ended in changed) == (settings == ())


def test_the_actors_warm_up_begins_after_the_critics(tmp_path: Path):
    """40 steps of the critic alone, then a tenth of the actor's 160: until step 56."""
    settings = (f"run.root={tmp_path}", *PPO, *CONSTANT, "critic.warmup_steps=40")
    longer = load_config(RlConfig, RL_7B, [*settings, "train.steps=200"])
    save(load_config(RlConfig, RL_7B, [*settings, "train.steps=150"]), 55)
    with pytest.raises(CheckpointError, match=r"is not over at step 55\. First .* beyond step 56"):
        checkpoint.find_resume(longer)
    save(load_config(RlConfig, RL_7B, [*settings, "train.steps=150"]), 56)
    assert checkpoint.find_resume(longer)


def test_another_run_is_still_another_run_whatever_its_steps(tmp_path: Path):
    save(run_in(tmp_path, "train.steps=200"), 200)
    with pytest.raises(CheckpointError, match=r"belongs to a different run: seed was 0, now 1\. Restore"):
        checkpoint.find_resume(run_in(tmp_path, "train.steps=201", "run.seed=1"))

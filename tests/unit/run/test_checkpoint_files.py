"""A checkpoint is complete or absent, belongs to its run, and old ones go only after a newer one is
complete.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.run import checkpoint, saving
from retool_mcore.run.checkpoint import STATE_FILE
from retool_mcore.run.export import closing_lines, export, export_at_end, find_weights

QWEN_7B = ("sft_qwen2.5_7b_h200x8", "rl_qwen2.5_7b_h200x8")
CONFIGS = Path(__file__).parents[3] / "configs"
SFT, SFT_7B, RL_7B = (CONFIGS / f"{name}.toml" for name in ("sft_tiny_cpu", *QWEN_7B))


def run_in(tmp_path: Path, *overrides: str) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={tmp_path}", *overrides])


def write_something(folder: str, step: int = 0) -> None:
    path = Path(folder) / "model" / "huggingface"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")


def save(config: SftConfig, step: int) -> None:
    with saving.Saver(config, write_something, rank=0, barrier=lambda: None) as saver:
        saver.save(step)


def steps(config: SftConfig) -> list[int]:
    return [saved.step for saved in checkpoint.complete_checkpoints(config.run.dir / "checkpoints")]


def test_the_newest_few_are_kept_in_order_of_step(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    for step in (50, 100, 1000, 150):
        save(config, step)
    assert steps(config) == [150, 1000]


def test_a_save_that_was_killed_leaves_the_previous_one_to_resume_from(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)

    def die(folder: str, step: int) -> None:
        write_something(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), saving.Saver(config, die, rank=0, barrier=lambda: None) as saver:
        saver.save(100)
    found = checkpoint.find_resume(config)
    assert found is not None and found.step == 50
    save(config, 100)
    assert steps(config) == [50, 100]


def test_the_next_run_deletes_what_a_kill_has_left_and_nothing_else(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    write_something(str(saving.step_folder(config, 100) / "actor"))
    saving.delete_incomplete(config)
    assert [path.name for path in (config.run.dir / "checkpoints").iterdir()] == ["global_step_50"]


class BackgroundSave:
    """Files that somebody else writes: ``ended`` when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done, self.killed, self._error = False, False, error

    def ended(self) -> bool:
        return self.done

    def finish(self) -> None:
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        self.killed = True


def test_an_asynchronous_save_counts_once_its_writers_have_ended(tmp_path: Path):
    config = run_in(tmp_path)
    writes = iter([BackgroundSave(), BackgroundSave(), BackgroundSave()])
    started: list[BackgroundSave] = []

    def write(folder: str, step: int) -> BackgroundSave:
        write_something(folder)
        started.append(next(writes))
        return started[-1]

    with saving.Saver(config, write, rank=0, barrier=lambda: None) as saver:
        saver.save(50)
        saver.poll()
        assert steps(config) == [] and saver.busy
        started[0].done = True
        saver.poll()
        assert steps(config) == [50] and not saver.busy
        saver.save(100)
        saver.save(150)  # waits for the one in flight
        assert steps(config) == [50, 100]
    assert steps(config) == [100, 150]  # and so does the end of the run


def test_a_run_that_fails_gives_up_the_save_in_flight(tmp_path: Path):
    config = run_in(tmp_path)
    pending = BackgroundSave()
    with (
        pytest.raises(ZeroDivisionError),
        saving.Saver(config, lambda folder, step: pending, rank=0, barrier=lambda: None) as saver,
    ):
        saver.save(50)
        raise ZeroDivisionError
    assert pending.killed and steps(config) == []


def test_a_full_disk_met_in_the_background_is_the_same_error(tmp_path: Path):
    config = run_in(tmp_path)
    pending = BackgroundSave(CheckpointError("rank 0: OSError: [Errno 28] No space left on device"))
    with (
        pytest.raises(CheckpointError, match=r"no space is left for .*global_step_50\. .* before it is kept"),
        saving.Saver(config, lambda folder, step: pending, rank=0, barrier=lambda: None) as saver,
    ):
        saver.save(50)
    assert steps(config) == []


def test_auto_starts_afresh_without_checkpoints(tmp_path: Path):
    assert checkpoint.find_resume(run_in(tmp_path)) is None


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path):
    save(run_in(tmp_path), 50)
    with pytest.raises(CheckpointError, match="seed was 0, now 1"):
        checkpoint.find_resume(run_in(tmp_path, "run.seed=1"))


PPO = ("algorithm.name=ppo", "critic.lr=1e-5")


@pytest.mark.parametrize(
    ("kind", "path", "before", "after", "said"),
    [
        (SftConfig, SFT, (), ("optim.lr=1e-4", "optim.min_lr=0"), "optim.lr was 0.003, now 0.0001; optim.min_lr was"),
        (RlConfig, RL_7B, (), ("optim.lr=5e-7",), "optim.lr was 1e-06, now 5e-07"),
        (RlConfig, RL_7B, PPO, ("critic.lr=2e-5",), "critic.lr was 1e-05, now 2e-05"),
        (
            SftConfig,
            SFT,
            (),
            ("optim.weight_decay=0.5", "optim.clip_grad=9.0"),
            "weight_decay was 0.01, now 0.5; optim.c",
        ),
    ],
)
def test_a_changed_learning_rate_is_told_and_counts(
    tmp_path: Path, kind: type[RunConfig], path: Path, *, before: tuple[str, ...], after: tuple[str, ...], said: str
):
    """That it counts is in test_sft_engine.py, and in load_checkpoint, which RL's workers call,
    too.
    """
    here = f"run.root={tmp_path}"
    save(load_config(kind, path, [here, *before]), 50)
    for settings, lines in ((after, 1), ((), 0)):
        config = load_config(kind, path, [here, *before, *settings])
        found = checkpoint.find_resume(config)
        assert found is not None
        found, notes = checkpoint.choose_resume(config)
        changes = [note for note in notes if "changed since global_step_50, from step 51: " in note]
        assert len(changes) == lines and (not lines or said in changes[0])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optim.schedule=linear", "optim.schedule was 'cosine', now 'linear'"),
        ("optim.warmup_fraction=0.2", "optim.warmup_fraction was 0.1, now 0.2"),
        ("optim.betas=[0.5, 0.999]", "optim.betas was [0.9, 0.999], now [0.5, 0.999]"),
    ],
)
def test_what_bends_the_schedule_or_adams_moments_is_refused_by_name(tmp_path: Path, setting: str, said: str):
    save(run_in(tmp_path), 50)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.find_resume(run_in(tmp_path, setting))
    assert f"belongs to a different run: {said}. Restore the setting" in str(caught.value)


def test_a_kill_while_an_old_one_is_deleted_leaves_none_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = run_in(tmp_path, "checkpoint.keep=1")
    save(config, 50)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if Path(path) == saving.step_folder(config, 50) / "actor":
            (Path(path) / "model/huggingface/config.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(config, 100)
    assert steps(config) == [100]


@pytest.mark.parametrize(("kind", "path"), [(SftConfig, SFT_7B), (RlConfig, RL_7B)])
def test_a_writer_process_does_not_inherit_an_optimizer_in_pinned_memory(kind: type[RunConfig], path: Path):
    with pytest.raises(ConfigError, match=r"memory\.optimizer_on_cpu = 0\.5 is not supported: .* pinned memory"):
        load_config(kind, path, ["checkpoint.asynchronous=true", "memory.optimizer_on_cpu=0.5"])


def test_never_refuses_to_overwrite(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.resume=never")
    assert checkpoint.find_resume(config) is None
    save(config, 50)
    with pytest.raises(CheckpointError, match="would overwrite"):
        checkpoint.find_resume(config)


def test_an_explicit_path_must_be_complete(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    path = saving.step_folder(config, 50)
    found = checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={path}"))
    assert found is not None and found.path == path
    (path / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={path}"))


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def owned_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    else:
        os.chown(path, 65534, -1)


@pytest.mark.parametrize("part", ["actor/model/huggingface/config.json", "actor", "."])
@pytest.mark.parametrize(
    ("change", "said"),
    [(writable_by_all, "is writable by every user"), (owned_by_another, r"belongs to user \d+")],
)
def test_files_that_another_user_could_have_written_are_not_resumed_from(
    tmp_path: Path, part: str, change: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
):
    config = run_in(tmp_path)
    save(config, 50)
    assert checkpoint.find_resume(config) is not None
    change(saving.step_folder(config, 50) / part, monkeypatch)
    for setting in ("auto", str(saving.step_folder(config, 50))):
        with pytest.raises(CheckpointError, match=rf"{said}, and resuming runs code"):
            checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={setting}"))


def test_a_corrupt_state_file_is_named(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    (saving.step_folder(config, 50) / STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole \(global_step_50: state\.json is not"):
        checkpoint.require_whole(config)


def test_export_takes_the_newest_complete_checkpoint(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    save(config, 100)
    write_something(str(saving.step_folder(config, 150) / "actor"))  # a kill came before state.json
    assert find_weights(config.run.dir).parts[-4:] == ("global_step_100", "actor", "model", "huggingface")
    assert json.loads((find_weights(saving.step_folder(config, 50)) / "config.json").read_text()) == {}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_export_says_the_dtype_of_its_weights(tmp_path: Path, key: str):
    """A bfloat16 run from a float32 model leaves bfloat16 weights beside its config.json."""
    config = run_in(tmp_path)

    def write(folder: str, step: int) -> None:
        write_something(folder)
        weights = Path(folder) / "model/huggingface"
        (weights / "config.json").write_text(json.dumps({"model_type": "qwen2", key: "float32"}))
        tensors = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)}
        save_file({**tensors, "router": torch.zeros(2)}, weights / "model.safetensors")

    with saving.Saver(config, write) as saver:
        saver.save(50)
    weights = find_weights(config.run.dir)
    made = export(config.run.dir, tmp_path / "out")
    assert json.loads((made / "config.json").read_text()) == {"model_type": "qwen2", key: "bfloat16"}
    assert json.loads((weights / "config.json").read_text())[key] == "float32", "the checkpoint is left as it is"


def test_a_run_ends_without_an_export_only_where_that_is_written(tmp_path: Path):
    export_at_end(run_in(tmp_path, "checkpoint.export=false"))
    for changes in ((), ("checkpoint.every_steps=0",)):
        config = run_in(tmp_path, *changes)
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            export_at_end(config)


def test_export_refuses_incomplete_weights_and_foreign_folders(tmp_path: Path):
    config = run_in(tmp_path)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        export(config.run.dir, tmp_path / "out")
    save(config, 50)
    with pytest.raises(CheckpointError, match=r"model\.safetensors are missing or corrupt"):
        export(config.run.dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_last_lines_of_a_run_name_its_model_its_validation_and_the_next_commands(tmp_path: Path):
    best = ("best.metric=val/accuracy", "validation.every=12", "checkpoint.every_steps=12")
    config = load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", [f"run.root={tmp_path}/a b", *best])
    save(config, 24)  # type: ignore[arg-type]
    run = config.run.dir
    (run / "export").mkdir()
    values = [{"step": 12, "value": 0.75}, {"step": 24, "value": 0.5}]
    rule = {"metric": "val/accuracy", "mode": "max", "patience": 0, "min_delta": 0.0}
    (run / "best.json").write_text(json.dumps({**rule, "values": values}))
    row = {"step": 24, "val/accuracy": 0.5, "val/accuracy/low": 0.4, "val/accuracy/high": 0.6}
    (run / "metrics.jsonl").write_text(f'{json.dumps(row)}\n{{"step": 25}}\n')
    assert list(closing_lines(config)) == [
        f"exported {run}/export: best val/accuracy 0.75 at step 12, not bettered in 1 validation",
        "validation at step 24: accuracy 0.500 (95 %: 0.400 to 0.600)",
        f"next: retool report '{run}' --out '{run}/report.html'",
        f"      retool view '{run}' --out '{run}/view.html'",
        f"      retool eval '{run}/config.toml' --model '{run}/export' --out '{run}/eval'",
    ]

"""A checkpoint is complete or absent, belongs to its run, and old ones go only after a newer one is complete."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from retool_mcore.config import SftConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.train import checkpoint
from retool_mcore.train.export import export, find_weights

SFT = Path(__file__).parents[2] / "configs" / "sft_tiny_cpu.toml"


def run_in(tmp_path: Path, *overrides: str) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={tmp_path}", *overrides])


def write_something(folder: str) -> None:
    path = Path(folder) / "model" / "huggingface"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")


def save(config: SftConfig, step: int) -> None:
    checkpoint.save(config, step, write_something, rank=0, barrier=lambda: None)


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

    def die(folder: str) -> None:
        write_something(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(config, 100, die, rank=0, barrier=lambda: None)
    found = checkpoint.find_resume(config)
    assert found is not None and found.step == 50
    save(config, 100)
    assert steps(config) == [50, 100]


def test_auto_starts_afresh_without_checkpoints(tmp_path: Path):
    assert checkpoint.find_resume(run_in(tmp_path)) is None


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path):
    save(run_in(tmp_path), 50)
    with pytest.raises(CheckpointError, match="seed was 0, now 1"):
        checkpoint.find_resume(run_in(tmp_path, "run.seed=1"))


def test_never_refuses_to_overwrite(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.resume=never")
    assert checkpoint.find_resume(config) is None
    save(config, 50)
    with pytest.raises(CheckpointError, match="would overwrite"):
        checkpoint.find_resume(config)


def test_an_explicit_path_must_be_complete(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    path = checkpoint.step_folder(config, 50)
    found = checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={path}"))
    assert found is not None and found.path == path
    (path / checkpoint.STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={path}"))


def test_a_corrupt_state_file_is_named(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    (checkpoint.step_folder(config, 50) / checkpoint.STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json is not a checkpoint's state"):
        checkpoint.find_resume(config)


def test_export_takes_the_newest_complete_checkpoint(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    save(config, 100)
    write_something(str(checkpoint.step_folder(config, 150) / "actor"))  # a kill came before state.json
    assert find_weights(config.run.dir).parts[-4:] == ("global_step_100", "actor", "model", "huggingface")
    assert json.loads((find_weights(checkpoint.step_folder(config, 50)) / "config.json").read_text()) == {}


def test_export_refuses_incomplete_weights_and_foreign_folders(tmp_path: Path):
    config = run_in(tmp_path)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        export(config.run.dir, tmp_path / "out")
    save(config, 50)
    with pytest.raises(CheckpointError, match=r"model\.safetensors are missing or corrupt"):
        export(config.run.dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("I/O error: No space left on device (28)")]
)
def test_a_full_disk_is_told_whatever_library_meets_it(error: Exception, tmp_path: Path):
    said = r"no space is left for .*step_4\. .* the checkpoint before it is kept"
    with pytest.raises(CheckpointError, match=said), checkpoint.full_disk_is_told(tmp_path / "step_4"):
        raise error


def test_another_error_of_a_writer_stays_what_it_is(tmp_path: Path):
    with pytest.raises(KeyError), checkpoint.full_disk_is_told(tmp_path):
        raise KeyError("a bug")

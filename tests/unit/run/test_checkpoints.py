"""Checkpoints: complete or absent, resumed only by their run, and never resumed when damaged."""

import errno
import json
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.report.record import read_run
from retool_mcore.run import checkpoint
from retool_mcore.run.checkpoint import STATE_FILE
from retool_mcore.run.export import export, export_at_end, find_weights
from retool_mcore.run.folder import explain_full_disk
from retool_mcore.verl.checkpoint import explain_failed_write

CONFIGS = Path(__file__).parents[3] / "configs"
SFT, RL_7B = (CONFIGS / f"{name}.toml" for name in ("sft_tiny_cpu", "rl_qwen2.5_7b_h200x8"))
MODEL = "actor/model/huggingface"
MOMENTS = "actor/optimizer/dist_ckpt/__1_0.distcp"
PPO = ("algorithm.name=ppo", "critic.lr=1e-5")
CONSTANT = ("optim.schedule=constant", "optim.warmup_fraction=0.1")
TP2, DP2, PP2 = ("parallel.tp=2",), ("parallel.tp=1",), ("parallel.tp=1", "parallel.pp=2")
RESHARDABLE = "checkpoint.reshardable=true"


def run_in(tmp_path: Path, *overrides: str) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={tmp_path}", *overrides])


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    return run_in(tmp_path)


def write_model(folder: str, step: int = 0) -> None:
    """What two ranks write, and, after them, rank 0 alone."""
    model = Path(folder) / "model" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "step": step}))
    save_file({"a": torch.full((4096,), float(step))}, model / "model.safetensors")
    for part in ("optimizer", "extra"):
        shards = Path(folder) / part / "dist_ckpt"
        shards.mkdir(parents=True)
        for rank in (0, 1):
            (shards / f"__{rank}_0.distcp").write_bytes(bytes([step % 251]) * 5000)
    for rank in (0, 1):
        checkpoint.record_checksums(Path(folder), rank)
    (Path(folder) / "optimizer/dist_ckpt/.metadata").write_bytes(b"described last")


def save(config: RunConfig, *steps: int, write: Any = write_model) -> None:
    with checkpoint.Saver(config, write) as saver:
        for step in steps:
            saver.save(step)


def at(config: RunConfig, step: int) -> Path:
    return checkpoint.step_folder(config, step)


def steps(config: RunConfig) -> list[int]:
    return [saved.step for saved in checkpoint.complete_checkpoints(config.run.dir / "checkpoints")]


def names(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (config.run.dir / "checkpoints").iterdir())


def resumed_step(config: RunConfig) -> int:
    found = checkpoint.find_resume(config)
    return 0 if found is None else found.step


def test_the_newest_few_are_kept_in_order_of_step(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    save(config, 50, 100, 1000, 150)
    assert steps(config) == [150, 1000]


def test_a_save_that_was_killed_leaves_the_previous_one_to_resume_from(config: SftConfig):
    def die(folder: str, step: int) -> None:
        write_model(folder)
        raise KeyboardInterrupt

    save(config, 50)
    with pytest.raises(KeyboardInterrupt):
        save(config, 100, write=die)
    assert resumed_step(config) == 50
    save(config, 100)
    assert steps(config) == [50, 100]


def background_save() -> Mock:
    """Files that somebody else writes: ``ended`` when a test says so."""
    return Mock(ended=Mock(return_value=False))


def test_an_asynchronous_save_counts_once_its_writers_have_ended(config: SftConfig):
    started: list[Mock] = []

    def write(folder: str, step: int) -> Mock:
        write_model(folder)
        started.append(background_save())
        return started[-1]

    with checkpoint.Saver(config, write) as saver:
        saver.save(50)
        saver.poll()
        assert steps(config) == [] and saver.busy
        started[0].ended.return_value = True
        saver.poll()
        assert steps(config) == [50] and not saver.busy
        saver.save(100)
        saver.save(150)  # waits for the one in flight
        assert steps(config) == [50, 100]
    assert steps(config) == [100, 150]  # and so does the end of the run


def test_a_save_in_flight_is_given_up_when_the_run_fails_or_the_disk_is_full(config: SftConfig):
    pending = background_save()
    with pytest.raises(ZeroDivisionError), checkpoint.Saver(config, lambda folder, step: pending) as saver:
        saver.save(50)
        raise ZeroDivisionError
    assert pending.kill.called and steps(config) == []
    full = background_save()
    full.finish.side_effect = CheckpointError("rank 0: OSError: [Errno 122] Disk quota exceeded")
    with pytest.raises(CheckpointError, match=r"no space is left for .*global_step_50\. .* before it is kept"):
        save(config, 50, write=lambda folder, step: full)
    assert names(config) == [], "its files are deleted"


def test_only_rank_0_touches_the_folder_and_the_ranks_wait_for_it(config: SftConfig):
    """At each barrier: the folder that rank 0 empties, all files, and what rank 0 publishes."""
    written, seen, folder = ["actor", "checksums"], list[list[str]](), at(config, 50)
    folder.mkdir(parents=True)
    (folder / "data.pt").touch()  # of a save that was killed

    def look() -> None:
        seen.append(sorted(path.name for path in folder.glob("*")))

    for rank in (1, 0):
        with checkpoint.Saver(config, write_model, rank=rank, barrier=look) as saver:
            saver.save(50)
    left, stays = ["data.pt"], [*written, "data.pt"]
    assert seen == [left, stays, stays, [], written, ["actor", "state.json"]]


def test_a_kill_while_an_old_one_is_deleted_leaves_none_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = run_in(tmp_path, "checkpoint.keep=1")
    save(config, 50)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if Path(path) == at(config, 50) / "actor":
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(config, 100)
    assert steps(config) == [100]


def test_never_refuses_to_overwrite_and_a_named_one_must_be_complete(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.resume=never")
    assert checkpoint.find_resume(config) is None
    save(config, 50)
    with pytest.raises(CheckpointError, match="would overwrite"):
        checkpoint.find_resume(config)
    named = run_in(tmp_path, f"checkpoint.resume={at(config, 50)}")
    assert resumed_step(named) == 50
    (at(config, 50) / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        checkpoint.find_resume(named)


def test_files_that_another_user_could_have_written_are_not_resumed_from(
    config: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(config, 50)
    file = at(config, 50) / MODEL / "config.json"
    file.chmod(0o646)
    for each in (config, run_in(tmp_path, f"checkpoint.resume={at(config, 50)}")):
        with pytest.raises(CheckpointError, match="is writable by every user, and resuming runs code"):
            checkpoint.find_resume(each)
    file.chmod(0o664)
    assert resumed_step(config) == 50
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    else:
        os.chown(file, 65534, -1)
    with pytest.raises(CheckpointError, match=r"belongs to user \d+, and resuming runs code"):
        checkpoint.find_resume(config)


def test_an_export_says_the_dtype_of_its_weights(config: SftConfig, tmp_path: Path):
    """A bfloat16 run from a float32 model leaves bfloat16 weights beside its config.json."""

    def write(folder: str, step: int) -> None:
        write_model(folder)
        weights = Path(folder) / "model/huggingface"
        (weights / "config.json").write_text('{"model_type": "qwen2", "torch_dtype": "float32"}')
        tensors = {name: torch.zeros(2, dtype=torch.bfloat16) for name in ("a", "b")}
        save_file({**tensors, "router": torch.zeros(2)}, weights / "model.safetensors")

    save(config, 50, write=write)
    made = export(config.run.dir, tmp_path / "out")
    assert json.loads((made / "config.json").read_text()) == {"model_type": "qwen2", "torch_dtype": "bfloat16"}
    source = find_weights(config.run.dir) / "config.json"
    assert json.loads(source.read_text())["torch_dtype"] == "float32", "the checkpoint is left as it is"


def test_export_refuses_incomplete_weights_and_foreign_folders(config: SftConfig, tmp_path: Path):
    export_at_end(run_in(tmp_path, "checkpoint.export=false"))  # a run may end without one
    save(config, 50, write=lambda folder, step: Path(folder, "model/huggingface").mkdir(parents=True))
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        export_at_end(config)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    save(config, 100)
    with pytest.raises(CheckpointError, match="is not empty and is not a model directory"):
        export(config.run.dir, tmp_path / "out")


SFT_REFUSED = ("run.seed=1", "optim.betas=[0.5, 0.999]", "optim.schedule=linear", "optim.warmup_fraction=0.2",
               "train.global_batch=16", "data.max_length_tokens=256", "data.train_file=other.parquet",
               "model.path=other", "lora.rank=8")  # fmt: skip
SFT_ALLOWED = ("optim.lr=1e-3", "optim.min_lr=1e-4", "optim.weight_decay=0.1", "optim.clip_grad=0.5", "lora.alpha=16",
               f"data.train_file={Path('runs/task/sft_train.parquet').absolute()}")  # fmt: skip
RL_REFUSED = ("train.mini_batch_prompts=32", "train.prompts_per_step=256", "rollout.group_size=8", "rollout.tools=[]",
              "data.curriculum=1", "data.train_file=other.parquet", "critic.warmup_steps=5")  # fmt: skip
RL_ALLOWED = ("optim.lr=1e-7", "critic.lr=2e-5", "data.curriculum=0.25", "rollout.temperature=0.9")
DECAYING = (*PPO, "optim.schedule=cosine", "data.curriculum=0.125")


@pytest.mark.parametrize(
    ("kind", "path", "before", "refused", "allowed"),
    [
        (SftConfig, SFT, (), SFT_REFUSED, SFT_ALLOWED),
        (RlConfig, RL_7B, DECAYING, RL_REFUSED, RL_ALLOWED),
        (RlConfig, RL_7B, (), ("algorithm.name=rloo",), ("train.mini_batch_prompts=32",)),  # it has no schedule
    ],
)
def test_a_setting_that_the_saved_state_depends_on_is_refused_and_no_other(
    tmp_path: Path, *, kind: type[RunConfig], path: Path, before: tuple[str, ...], refused: Any, allowed: Any
):
    def changed(*changes: str) -> RunConfig:
        return load_config(kind, path, [f"run.root={tmp_path}", *before, *changes])

    save(changed(), 50)
    for change in refused:
        with pytest.raises(CheckpointError, match=r"different run: [\w.]+ was [^;]*\. Restore the setting"):
            checkpoint.find_resume(changed(change))
    assert resumed_step(changed(*allowed)) == 50


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        (TP2, (*TP2, "cluster.gpus_per_node=4"), ""),
        (
            TP2,
            DP2,
            r"saved on tp 2, .*dp 1, but the run's layout is tp 1, pp 1, vpp 1, cp 1, ep 1, dp 2\. .*reshardable",
        ),
        ((*TP2, RESHARDABLE), PP2, ""),
        # Megatron-core 0.18.2 raises KeyError: 'optimizer' for ep 2 to ep 1.
        ((*DP2, "parallel.ep=2", RESHARDABLE), DP2, r"ep 1, dp 2\. .* may not change\. Set parallel\.ep = 2, or start"),
    ],
)
def test_a_layout_changes_only_as_far_as_the_saved_state_can(
    tmp_path: Path, saved: tuple[str, ...], now: tuple[str, ...], said: str
):
    save(run_in(tmp_path, *saved), 50)
    with pytest.raises(CheckpointError, match=said) if said else nullcontext():
        assert resumed_step(run_in(tmp_path, *now)) == 50


def test_a_full_disk_that_other_libraries_writers_meet_is_told(tmp_path: Path):
    from torch.distributed.checkpoint.api import CheckpointException

    said = r"no space is left for .*step_4\. Free some space"
    archive = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    with pytest.raises(CheckpointError, match=said), explain_full_disk(tmp_path / "step_4", "Free some space."):
        raise ValueError("in a thread") from archive
    full = {1: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)}
    tell = explain_failed_write("step_4/actor")
    with pytest.raises(CheckpointError, match="no space is left for"), explain_full_disk(tmp_path, "Free."), tell:
        raise CheckpointException("write", full)
    said = "step_4/actor could not be written: see the error of rank 0"
    with pytest.raises(CheckpointError, match=said), explain_failed_write("step_4/actor"):
        raise CheckpointException("write", {})


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 4)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        (MOMENTS, overwrite, f"{MOMENTS} differs from what was written"),
        (MOMENTS, cut, f"{MOMENTS} has 4999 bytes, but 5000 were written"),
        (MOMENTS, Path.unlink, f"{MOMENTS} cannot be read: No such file"),
        (STATE_FILE, lambda path: path.write_text(""), "state.json is not a valid checkpoint state"),
    ],
)
def test_a_run_goes_on_from_the_newest_whole_one_and_says_so(config: SftConfig, name: str, harm: Any, said: str):
    save(config, 50, 100)
    harm(at(config, 100) / name)
    found, [note, resuming] = checkpoint.choose_resume(config)
    assert f"global_step_100 is damaged: {said}" in note
    assert note.endswith("It is kept as global_step_100.damaged") and "resuming after step 50" in resuming
    assert found is not None and found.step == 50
    assert names(config) == ["global_step_100.damaged", "global_step_50"]
    save(config, 100)  # the run comes there again
    assert checkpoint.require_intact(config) == [] and steps(config) == [50, 100]
    harm(at(config, 100) / name)
    assert "kept as global_step_100.damaged2" in checkpoint.require_intact(config)[0]


def test_an_older_damaged_one_blocks_nothing_and_is_not_deleted(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    save(config, 50, 100)
    (at(config, 50) / STATE_FILE).write_text("")
    assert checkpoint.require_intact(config) == [] and resumed_step(config) == 100
    save(config, 150, 200)
    assert names(config) == ["global_step_150", "global_step_200", "global_step_50"]


def test_where_no_wanted_one_is_whole_nothing_is_moved_and_the_run_does_not_start_over(
    config: SftConfig, tmp_path: Path
):
    save(config, 50, 100)
    named = run_in(tmp_path, f"checkpoint.resume={at(config, 50)}")
    assert checkpoint.require_intact(named) == []
    for step in (50, 100):
        cut(at(config, step) / MOMENTS)
    said = r"is intact \(global_step_100: .*; global_step_50: .*Restore one, or move"
    for each, message in ((config, said), (named, r"resume = .*global_step_50' is damaged: .*Name another")):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.require_intact(each)
    assert names(config) == ["global_step_100", "global_step_50"]


def test_four_overwritten_bytes_are_not_exported(config: SftConfig, tmp_path: Path):
    save(config, 50, 100)
    overwrite(at(config, 100) / MODEL / "model.safetensors")
    said = r"global_step_100 is damaged: .*model\.safetensors differs from .* another one: --checkpoint 50"
    with pytest.raises(CheckpointError, match=said):
        export(config.run.dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [config.run.name]
    overwrite(at(config, 50) / MOMENTS)
    (tmp_path / ".out.partial").mkdir()  # a killed export left it
    for _ in range(2):  # the second replaces the first
        export(config.run.dir, tmp_path / "out", "50")  # the model itself is whole
        assert not (tmp_path / "out/old").exists() and not (tmp_path / ".out.partial").exists()
        (tmp_path / "out/old").touch()
    (at(config, 100) / STATE_FILE).write_text("")
    with pytest.raises(CheckpointError, match=r"global_step_100/state\.json is not a valid checkpoint state"):
        export(config.run.dir, tmp_path / "out")


def test_what_was_written_again_after_its_checksum_is_read_again(config: SftConfig):
    def write_twice(folder: str, step: int) -> None:
        write_model(folder, step)
        time.sleep(0.02)  # file systems count in milliseconds
        overwrite(Path(folder) / "model/huggingface/model.safetensors")

    save(config, 50, write=write_twice)
    assert checkpoint.require_intact(config) == []


def test_the_checksum_sees_every_piece_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "READ_BYTES", 300)
    path = tmp_path / "file"
    data = bytes(range(256)) * 20
    changed = [data[:place] + b"?" + data[place + 1 :] for place in (0, 299, 300, 999, 1000, 5119)]
    two_pieces_swapped = data[1000:2000] + data[:1000] + data[2000:]
    seen: set[str] = set()
    for content in (data, *changed, two_pieces_swapped):
        path.write_bytes(content)
        [found] = checkpoint.checksums_of([path])
        assert found.bytes == 5120
        seen.add(found.crc32)
    assert len(seen) == 8


def test_a_checkpoint_of_the_core_before_is_not_resumed(config: SftConfig):
    save(config, 50, 100)
    path = at(config, 100) / STATE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(CheckpointError, match=r"global_step_100 was written with Megatron-core 0\.16"):
        checkpoint.find_resume(config)


def test_a_checkpoint_of_a_newer_release_is_refused_and_left_where_it_is(config: SftConfig):
    save(config, 50, 100)
    path = at(config, 100) / STATE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 4}))
    for ask in (checkpoint.require_intact, checkpoint.find_resume):
        with pytest.raises(CheckpointError, match=r"global_step_100 was written by a newer release: .* version 4"):
            ask(config)
    assert names(config) == ["global_step_100", "global_step_50"]


def test_an_incomplete_save_is_deleted_and_a_users_copies_and_notes_are_not(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=1")
    save(config, 50)
    folder = config.run.dir / "checkpoints"
    copies = ("global_step_50_keep", "global_step_0100", "global_step_", "global_step_60", "backup")
    for name in copies:
        shutil.copytree(folder / "global_step_50", folder / name)
    (folder / "global_step_70_half").mkdir()
    write_model(str(at(config, 80) / "actor"))  # what a killed save leaves
    (folder / "global_step_50/notes.txt").write_text("the good one")
    (config.run.dir / "config.toml").write_text(config.to_toml())
    assert steps(config) == [50] and checkpoint.require_intact(config) == []
    checkpoint.delete_incomplete(config)
    save(config, 60, 100)
    assert steps(config) == read_run(config.run.dir).checkpoints == [100]
    assert [path.name for path in (folder / "global_step_50").iterdir()] == ["notes.txt"]
    left = {*copies, "global_step_70_half", "global_step_50", "global_step_100"}
    assert set(names(config)) == (left - {"global_step_60"}) | {"global_step_60.found"}
    named = run_in(tmp_path, f"checkpoint.resume={folder / 'global_step_50_keep'}")
    assert resumed_step(named) == 50, "one that is named is what was asked for"


def test_changed_settings_that_a_run_may_change_are_notes_and_take_effect(tmp_path: Path):
    here = (f"run.root={tmp_path}", *PPO)
    save(load_config(RlConfig, RL_7B, here), 50)
    settings = ("critic.lr=2e-05", "algorithm.loss=gspo")
    found, notes = checkpoint.choose_resume(load_config(RlConfig, RL_7B, [*here, *settings]))
    assert found is not None
    [note] = [note for note in notes if "new since global_step_50, used from step 51: " in note]
    assert "critic.lr was 1e-05, now 2e-05" in note and "algorithm.loss was 'ppo', now 'gspo'" in note
    moved = ("run.root=elsewhere", "run.name=moved", f"checkpoint.resume={found.path}")
    unchanged, [note] = checkpoint.choose_resume(load_config(RlConfig, RL_7B, [*here, *moved]))
    assert unchanged == found and note == f"note: resuming after step 50, from {found.path}"


@pytest.mark.parametrize(
    ("saved", "settings", "now", "said"),
    [
        (200, CONSTANT, 201, ""),
        (200, CONSTANT, 4000, "the warm-up, 0.1 of all steps, is not over at step 200"),
        (10, CONSTANT, 201, "is not over at step 10. First .* beyond step 21"),
        (200, (), 201, ""),
        (200, ("optim.min_lr=0",), 201, r"ended at optim.min_lr = 0, so more steps would learn nothing. Set"),
        (150, (), 201, r'"cosine" spans all steps, so the rates of the first 150 .* retool export \S+_150 --to'),
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
    run, longer = (load_config(RlConfig, RL_7B, [*settings, f"train.steps={steps}"]) for steps in (150, 200))
    save(run, 55)
    with pytest.raises(CheckpointError, match=r"is not over at step 55\. First .* beyond step 56"):
        checkpoint.find_resume(longer)
    save(run, 56)
    assert resumed_step(longer) == 56

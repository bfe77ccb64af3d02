"""Checkpoints: complete or absent, resumed only by their run, and never resumed when damaged."""

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.report.record import read_run
from retool_mcore.run import checkpoint
from retool_mcore.run.checkpoint import STATE_FILE
from retool_mcore.run.export import closing_lines, export, export_at_end, find_weights
from retool_mcore.run.folder import explain_full_disk
from retool_mcore.verl.checkpoint import explain_failed_write

CONFIGS = Path(__file__).parents[3] / "configs"
SFT, RL_7B = (CONFIGS / f"{name}.toml" for name in ("sft_tiny_cpu", "rl_qwen2.5_7b_h200x8"))
WEIGHTS = "actor/model/huggingface/model.safetensors"
MOMENTS = "actor/optimizer/dist_ckpt/__1_0.distcp"
PPO = ("algorithm.name=ppo", "critic.lr=1e-5")
CONSTANT = ("optim.schedule=constant", "optim.warmup_fraction=0.1")
TP2, DP2, PP2 = ("parallel.tp=2",), ("parallel.tp=1",), ("parallel.tp=1", "parallel.pp=2")
FOUR = ("cluster.gpus_per_node=4",)


def run_in(tmp_path: Path, *overrides: str) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={tmp_path}", *overrides])


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


def save(config: RunConfig, *steps: int) -> None:
    with checkpoint.Saver(config, write_model) as saver:
        for step in steps:
            saver.save(step)


def steps(config: RunConfig) -> list[int]:
    return [saved.step for saved in checkpoint.complete_checkpoints(config.run.dir / "checkpoints")]


def names(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (config.run.dir / "checkpoints").iterdir())


def test_the_newest_few_are_kept_in_order_of_step(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    for step in (50, 100, 1000, 150):
        save(config, step)
    assert steps(config) == [150, 1000]


def test_a_save_that_was_killed_leaves_the_previous_one_to_resume_from(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)

    def die(folder: str, step: int) -> None:
        write_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), checkpoint.Saver(config, die) as saver:
        saver.save(100)
    found = checkpoint.find_resume(config)
    assert found is not None and found.step == 50
    save(config, 100)
    assert steps(config) == [50, 100]


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
        write_model(folder)
        started.append(next(writes))
        return started[-1]

    with checkpoint.Saver(config, write) as saver:
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


def test_only_rank_0_touches_the_folder_and_the_ranks_wait_for_it(tmp_path: Path):
    """At each barrier: the folder that rank 0 empties, all files, and what rank 0 publishes."""
    config, written, seen = run_in(tmp_path), ["actor", "checksums"], list[list[str]]()
    folder = checkpoint.step_folder(config, 50)
    folder.mkdir(parents=True)
    (folder / "data.pt").touch()  # of a save that was killed

    def look() -> None:
        seen.append(sorted(path.name for path in folder.glob("*")))

    for rank in (1, 0):
        with checkpoint.Saver(config, write_model, rank=rank, barrier=look) as saver:
            saver.save(50)
    left, stays = ["data.pt"], [*written, "data.pt"]
    assert seen == [left, stays, stays, [], written, ["actor", "state.json"]]


def test_a_run_that_fails_gives_up_the_save_in_flight(tmp_path: Path):
    config = run_in(tmp_path)
    pending = BackgroundSave()
    with pytest.raises(ZeroDivisionError), checkpoint.Saver(config, lambda folder, step: pending) as saver:
        saver.save(50)
        raise ZeroDivisionError
    assert pending.killed and steps(config) == []


def test_a_full_disk_met_in_the_background_is_the_same_error(tmp_path: Path):
    config = run_in(tmp_path)
    pending = BackgroundSave(CheckpointError("rank 0: OSError: [Errno 122] Disk quota exceeded"))
    said = r"no space is left for .*global_step_50\. .* before it is kept"
    with pytest.raises(CheckpointError, match=said), checkpoint.Saver(config, lambda folder, step: pending) as saver:
        saver.save(50)
    assert steps(config) == [] == names(config), "its files are deleted"


def test_a_kill_while_an_old_one_is_deleted_leaves_none_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = run_in(tmp_path, "checkpoint.keep=1")
    save(config, 50)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if Path(path) == checkpoint.step_folder(config, 50) / "actor":
            (Path(path) / "model/huggingface/config.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(config, 100)
    assert steps(config) == [100]


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


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (writable_by_all, ".", "is writable by every user"),
        (owned_by_another, "actor/model/huggingface/config.json", r"belongs to user \d+"),
    ],
)
def test_files_that_another_user_could_have_written_are_not_resumed_from(
    tmp_path: Path, change: Callable[..., None], name: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    config = run_in(tmp_path)
    save(config, 50)
    assert checkpoint.find_resume(config) is not None
    change(checkpoint.step_folder(config, 50) / name, monkeypatch)
    for setting in ("auto", str(checkpoint.step_folder(config, 50))):
        with pytest.raises(CheckpointError, match=rf"{said}, and resuming runs code"):
            checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={setting}"))


def test_an_export_says_the_dtype_of_its_weights(tmp_path: Path):
    """A bfloat16 run from a float32 model leaves bfloat16 weights beside its config.json."""
    config, key = run_in(tmp_path), "torch_dtype"

    def write(folder: str, step: int) -> None:
        write_model(folder)
        weights = Path(folder) / "model/huggingface"
        (weights / "config.json").write_text(json.dumps({"model_type": "qwen2", key: "float32"}))
        tensors = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)}
        save_file({**tensors, "router": torch.zeros(2)}, weights / "model.safetensors")

    with checkpoint.Saver(config, write) as saver:
        saver.save(50)
    weights = find_weights(config.run.dir)
    made = export(config.run.dir, tmp_path / "out")
    assert json.loads((made / "config.json").read_text()) == {"model_type": "qwen2", key: "bfloat16"}
    assert json.loads((weights / "config.json").read_text())[key] == "float32", "the checkpoint is left as it is"


def test_a_run_ends_without_an_export_only_where_that_is_written(tmp_path: Path):
    export_at_end(run_in(tmp_path, "checkpoint.export=false"))
    for changes in ((), ("checkpoint.every_steps=0",)):
        config = run_in(tmp_path, *changes)
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            export_at_end(config)


def test_export_refuses_incomplete_weights_and_foreign_folders(tmp_path: Path):
    config = run_in(tmp_path)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        export(config.run.dir, tmp_path / "out")
    with checkpoint.Saver(config, lambda folder, step: Path(folder, "model/huggingface").mkdir(parents=True)) as saver:
        saver.save(50)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        export(config.run.dir, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    save(config, 100)
    with pytest.raises(CheckpointError, match="is not empty and is not a model directory"):
        export(config.run.dir, tmp_path / "out")


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
        f"exported {run}/export: best val/accuracy 0.75 at step 12, no improvement in 1 validation",
        "validation at step 24: accuracy 0.500 (95 %: 0.400 to 0.600)",
        f"next: retool report '{run}' --out '{run}/report.html'",
        f"      retool view '{run}' --out '{run}/view.html'",
        f"      retool eval '{run}/config.toml' --model '{run}/export' --out '{run}/eval'",
    ]
    config = run_in(tmp_path)
    save(config, 50, 100)
    run = config.run.dir
    (run / "export").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 50, "val_loss": 2}\n{"step": 100, "val_loss": 1.23456}\n')
    assert list(closing_lines(config)) == [
        f"exported {run}/export, of step 100",
        "validation at step 100: val_loss 1.2346",
        f"next: retool report {run} --out {run}/report.html",
        f"      retool rl CONFIG model.path={run}/export",
    ]


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
    assert checkpoint.find_resume(changed(*allowed)) is not None


def test_experts_stay_spread_over_as_many_ranks(tmp_path: Path):
    """Megatron-core 0.16.1 raises KeyError: 'optimizer' for ep 2 to ep 1; other sizes change as
    with a dense model.
    """
    save(run_in(tmp_path, *DP2, "parallel.ep=2", "checkpoint.reshardable=true"), 50)
    with pytest.raises(CheckpointError, match=r"ep 1, dp 2\. .* may not change\. Set parallel\.ep = 2, or start"):
        checkpoint.find_resume(run_in(tmp_path, *DP2))


def test_without_it_only_the_number_of_data_parallel_ranks_may_change(tmp_path: Path):
    save(run_in(tmp_path, *TP2), 50)
    wider = run_in(tmp_path, *TP2, *FOUR)
    assert checkpoint.find_resume(wider) is not None
    said = (
        r"was saved on tp 2, pp 1, vpp 1, cp 1, ep 1, dp 1, but the run's layout is tp 1, pp 1, vpp 1, cp 1, ep 1, "
        r"dp 2\. .* on its own layout with checkpoint\.reshardable = true"
    )
    with pytest.raises(CheckpointError, match=said):
        checkpoint.find_resume(run_in(tmp_path, *DP2))
    save(run_in(tmp_path, *TP2, "checkpoint.reshardable=true"), 50)
    assert checkpoint.find_resume(run_in(tmp_path, *PP2)) is not None


def test_a_full_disk_that_pytorchs_writer_meets_is_told(tmp_path: Path):
    error = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    said = r"no space is left for .*step_4\. Free some space"
    with pytest.raises(CheckpointError, match=said), explain_full_disk(tmp_path / "step_4", "Free some space."):
        raise ValueError("in a thread") from error


def test_what_megatrons_writers_met_is_told_on_every_rank(tmp_path: Path):
    from torch.distributed.checkpoint.api import CheckpointException

    full = {1: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)}
    tell = explain_failed_write("step_4/actor")
    with pytest.raises(CheckpointError, match="no space is left for"), explain_full_disk(tmp_path, "Free."), tell:
        raise CheckpointException("write", full)
    said = "step_4/actor could not be written: see the error of rank 0"
    with pytest.raises(CheckpointError, match=said), explain_failed_write("step_4/actor"):
        raise CheckpointException("write", {})


def overwrite(path: Path, count: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * count)


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
def test_a_run_goes_on_from_the_newest_whole_one_and_says_so(tmp_path: Path, name: str, harm, said: str):
    config = run_in(tmp_path)
    save(config, 50, 100)
    harm(checkpoint.step_folder(config, 100) / name)
    found, [note, resuming] = checkpoint.choose_resume(config)
    assert f"global_step_100 is damaged: {said}" in note
    assert note.endswith("It is kept as global_step_100.damaged") and "resuming after step 50" in resuming
    assert found is not None and found.step == 50
    assert names(config) == ["global_step_100.damaged", "global_step_50"]
    assert checkpoint.require_intact(config) == []
    save(config, 100)  # the run comes there again
    assert checkpoint.require_intact(config) == [] and steps(config) == [50, 100]
    harm(checkpoint.step_folder(config, 100) / name)
    assert "kept as global_step_100.damaged2" in checkpoint.require_intact(config)[0]


def test_an_older_damaged_one_blocks_nothing_and_is_not_deleted(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    save(config, 50, 100)
    (checkpoint.step_folder(config, 50) / STATE_FILE).write_text("")
    assert checkpoint.require_intact(config) == []
    found = checkpoint.find_resume(config)
    assert found is not None and found.step == 100
    save(config, 150, 200)
    assert names(config) == ["global_step_150", "global_step_200", "global_step_50"]


def test_where_none_is_whole_nothing_is_moved_and_the_run_does_not_start_over(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50, 100)
    for step in (50, 100):
        cut(checkpoint.step_folder(config, step) / MOMENTS)
    with pytest.raises(
        CheckpointError, match=r"is intact \(global_step_100: .*; global_step_50: .*Restore one, or move"
    ):
        checkpoint.require_intact(config)
    assert names(config) == ["global_step_100", "global_step_50"]


def test_a_damaged_one_that_is_asked_for_is_refused(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    path = checkpoint.step_folder(config, 50)
    assert checkpoint.require_intact(run_in(tmp_path, f"checkpoint.resume={path}")) == []
    overwrite(path / MOMENTS)
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume = .*global_step_50' is damaged: .*Name another"):
        checkpoint.require_intact(run_in(tmp_path, f"checkpoint.resume={path}"))


def test_four_overwritten_bytes_are_not_exported(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50, 100)
    overwrite(checkpoint.step_folder(config, 100) / WEIGHTS)
    said = r"global_step_100 is damaged: .*model\.safetensors differs from .* another one: --checkpoint 50"
    with pytest.raises(CheckpointError, match=said):
        export(config.run.dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [config.run.name]
    overwrite(checkpoint.step_folder(config, 50) / MOMENTS)
    (tmp_path / ".out.partial").mkdir()  # a killed export left it
    for _ in range(2):  # the second replaces the first
        export(config.run.dir, tmp_path / "out", "50")  # the model itself is whole
        assert not (tmp_path / "out/old").exists() and not (tmp_path / ".out.partial").exists()
        (tmp_path / "out/old").touch()
    (checkpoint.step_folder(config, 100) / STATE_FILE).write_text("")
    with pytest.raises(CheckpointError, match=r"global_step_100/state\.json is not a valid checkpoint state"):
        export(config.run.dir, tmp_path / "out")


def test_what_was_written_again_after_its_checksum_is_read_again(tmp_path: Path):
    config = run_in(tmp_path)

    def write_twice(folder: str, step: int) -> None:
        write_model(folder, step)
        time.sleep(0.02)  # file systems count in milliseconds
        overwrite(Path(folder) / "model/huggingface/model.safetensors")

    with checkpoint.Saver(config, write_twice) as saver:
        saver.save(50)
    assert checkpoint.require_intact(config) == []


def test_the_checksum_sees_every_piece_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "READ_BYTES", 300)
    path = tmp_path / "file"
    data = bytes(range(256)) * 20
    seen: set[str] = set()
    for change in (None, 0, 299, 300, 999, 1000, 5119):
        path.write_bytes(data if change is None else data[:change] + b"?" + data[change + 1 :])
        [found] = checkpoint.checksums_of([path])
        assert found.bytes == 5120
        seen.add(found.crc32)
    path.write_bytes(data[1000:2000] + data[:1000] + data[2000:])
    seen |= {checkpoint.checksums_of([path])[0].crc32}
    assert len(seen) == 8, "two pieces that change places are seen, too"


def test_a_checkpoint_of_a_newer_release_is_refused_and_left_where_it_is(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50, 100)
    path = checkpoint.step_folder(config, 100) / STATE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    for ask in (checkpoint.require_intact, checkpoint.find_resume):
        with pytest.raises(
            CheckpointError, match=r"global_step_100 was written by a newer release: .* version 3, but th"
        ):
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
    write_model(str(checkpoint.step_folder(config, 80) / "actor"))  # what a killed save leaves
    (folder / "global_step_50/notes.txt").write_text("the good one")
    (config.run.dir / "config.toml").write_text(config.to_toml())
    assert steps(config) == [50] and checkpoint.require_intact(config) == []
    checkpoint.delete_incomplete(config)
    save(config, 60, 100)
    assert steps(config) == read_run(config.run.dir).checkpoints == [100]
    assert [path.name for path in (folder / "global_step_50").iterdir()] == ["notes.txt"]
    left = {*copies, "global_step_70_half", "global_step_50", "global_step_100"}
    assert set(names(config)) == (left - {"global_step_60"}) | {"global_step_60.found"}
    path = folder / "global_step_50_keep"
    found = checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={path}"))
    assert found is not None and (found.step, found.path) == (50, path), "one that is named is what was asked for"


def test_changed_settings_that_a_run_may_change_are_notes_and_take_effect(tmp_path: Path):
    here = (f"run.root={tmp_path}", *PPO)
    save(load_config(RlConfig, RL_7B, here), 50)
    changes = {"critic.lr": ("1e-05", "2e-05"), "algorithm.loss": ("'ppo'", "'gspo'")}
    settings = [f"{key}={new.strip(chr(39))}" for key, (_, new) in changes.items()]
    found, notes = checkpoint.choose_resume(load_config(RlConfig, RL_7B, [*here, *settings]))
    assert found is not None
    [note] = [note for note in notes if "new since global_step_50, used from step 51: " in note]
    assert all(f"{key} was {old}, now {new}" in note for key, (old, new) in changes.items())
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
    longer = load_config(RlConfig, RL_7B, [*settings, "train.steps=200"])
    save(load_config(RlConfig, RL_7B, [*settings, "train.steps=150"]), 55)
    with pytest.raises(CheckpointError, match=r"is not over at step 55\. First .* beyond step 56"):
        checkpoint.find_resume(longer)
    save(load_config(RlConfig, RL_7B, [*settings, "train.steps=150"]), 56)
    assert checkpoint.find_resume(longer)

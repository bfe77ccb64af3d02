"""A checkpoint whose files are not as they were written is neither resumed from nor exported."""

import json
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import SftConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.report.record import read_run
from retool_mcore.run import checkpoint, saving
from retool_mcore.run.checkpoint import STATE_FILE
from retool_mcore.run.export import export
from tests.unit.run.saved_steps import save_steps, steps

SFT = Path(__file__).parents[3] / "configs" / "sft_tiny_cpu.toml"
WEIGHTS = "actor/model/huggingface/model.safetensors"
METADATA = "actor/optimizer/dist_ckpt/.metadata"
MOMENTS = "actor/optimizer/dist_ckpt/__1_0.distcp"


def run_in(tmp_path: Path, *overrides: str) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={tmp_path}", *overrides])


def write_model(folder: str, step: int) -> None:
    """What two ranks write, and, after them, rank 0 alone."""
    model = Path(folder) / "model" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    save_file({"a": torch.full((4096,), float(step))}, model / "model.safetensors")
    for part in ("optimizer", "extra"):
        shards = Path(folder) / part / "dist_ckpt"
        shards.mkdir(parents=True)
        for rank in (0, 1):
            (shards / f"__{rank}_0.distcp").write_bytes(bytes([step % 251]) * 5000)
    for rank in (0, 1):
        checkpoint.record_checksums(Path(folder), rank)
    (Path(folder) / "optimizer/dist_ckpt/.metadata").write_bytes(b"described last")


save = partial(save_steps, write_model)


def names(config: SftConfig) -> list[str]:
    return sorted(path.name for path in (config.run.dir / "checkpoints").iterdir())


def overwrite(path: Path, count: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * count)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        (WEIGHTS, overwrite, f"{WEIGHTS} has other bytes than were written"),
        (MOMENTS, overwrite, f"{MOMENTS} has other bytes than were written"),
        (MOMENTS, cut, f"{MOMENTS} has 4999 bytes and was written with 5000"),
        (MOMENTS, Path.unlink, f"{MOMENTS} cannot be read: No such file"),
        (METADATA, cut, f"{METADATA} has 13 bytes and was written with 14"),
        (STATE_FILE, lambda path: path.write_text(""), "state.json is not a checkpoint's state"),
    ],
)
def test_a_run_goes_on_from_the_newest_whole_one_and_says_so(tmp_path: Path, name: str, harm, said: str):
    config = run_in(tmp_path)
    save(config, 50, 100)
    harm(saving.step_folder(config, 100) / name)
    found, [note, resuming] = checkpoint.choose_resume(config)
    assert f"global_step_100 is damaged: {said}" in note
    assert note.endswith("It is kept as global_step_100.damaged") and "resuming after step 50" in resuming
    assert found is not None and found.step == 50
    assert names(config) == ["global_step_100.damaged", "global_step_50"]
    assert checkpoint.require_whole(config) == []
    save(config, 100)  # the run comes there again
    assert checkpoint.require_whole(config) == [] and steps(config) == [50, 100]
    harm(saving.step_folder(config, 100) / name)
    assert "kept as global_step_100.damaged2" in checkpoint.require_whole(config)[0]


def test_an_older_damaged_one_blocks_nothing_and_is_not_deleted(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=2")
    save(config, 50, 100)
    (saving.step_folder(config, 50) / STATE_FILE).write_text("")
    assert checkpoint.require_whole(config) == []
    found = checkpoint.find_resume(config)
    assert found is not None and found.step == 100
    save(config, 150, 200)
    assert names(config) == ["global_step_150", "global_step_200", "global_step_50"]


def test_where_none_is_whole_nothing_is_moved_and_the_run_does_not_start_over(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50, 100)
    for step in (50, 100):
        cut(saving.step_folder(config, step) / MOMENTS)
    with pytest.raises(
        CheckpointError, match=r"is whole \(global_step_100: .*; global_step_50: .*Restore one, or move"
    ):
        checkpoint.require_whole(config)
    assert names(config) == ["global_step_100", "global_step_50"]


def test_a_damaged_one_that_is_asked_for_is_refused(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50)
    path = saving.step_folder(config, 50)
    assert checkpoint.require_whole(run_in(tmp_path, f"checkpoint.resume={path}")) == []
    overwrite(path / MOMENTS)
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume = .*global_step_50' is damaged: .*Name another"):
        checkpoint.require_whole(run_in(tmp_path, f"checkpoint.resume={path}"))


def test_four_overwritten_bytes_are_not_exported(tmp_path: Path):
    config = run_in(tmp_path)
    save(config, 50, 100)
    overwrite(saving.step_folder(config, 100) / WEIGHTS)
    said = r"global_step_100 is damaged: .*model\.safetensors has other bytes .* another one: --checkpoint 50"
    with pytest.raises(CheckpointError, match=said):
        export(config.run.dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [config.run.name]
    overwrite(saving.step_folder(config, 50) / MOMENTS)
    export(config.run.dir, tmp_path / "out", "50")  # the model itself is whole
    (saving.step_folder(config, 100) / STATE_FILE).write_text("")
    with pytest.raises(CheckpointError, match=r"global_step_100/state\.json is not a checkpoint's state"):
        export(config.run.dir, tmp_path / "out")


def test_what_was_written_again_after_its_checksum_is_read_again(tmp_path: Path):
    config = run_in(tmp_path)

    def write_twice(folder: str, step: int) -> None:
        write_model(folder, step)
        time.sleep(0.02)  # file systems count in milliseconds
        overwrite(Path(folder) / "model/huggingface/model.safetensors")

    with saving.Saver(config, write_twice) as saver:
        saver.save(50)
    assert checkpoint.require_whole(config) == []


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
    path = saving.step_folder(config, 100) / STATE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    for ask in (checkpoint.require_whole, checkpoint.find_resume):
        with pytest.raises(
            CheckpointError, match=r"global_step_100 was written by a newer release: .* version 3, and th"
        ):
            ask(config)
    assert names(config) == ["global_step_100", "global_step_50"]


def test_a_users_copies_and_notes_are_neither_counted_nor_deleted(tmp_path: Path):
    config = run_in(tmp_path, "checkpoint.keep=1")
    save(config, 50)
    folder = config.run.dir / "checkpoints"
    copies = ("global_step_50_keep", "global_step_0100", "global_step_", "global_step_60", "backup")
    for name in copies:
        shutil.copytree(folder / "global_step_50", folder / name)
    (folder / "global_step_70_half").mkdir()
    (folder / "global_step_50/notes.txt").write_text("the good one")
    (config.run.dir / "config.toml").write_text(config.to_toml())
    assert steps(config) == [50] and checkpoint.require_whole(config) == []
    saving.delete_incomplete(config)
    save(config, 60, 100)
    assert steps(config) == read_run(config.run.dir).checkpoints == [100]
    assert [path.name for path in (folder / "global_step_50").iterdir()] == ["notes.txt"]
    left = {*copies, "global_step_70_half", "global_step_50", "global_step_100"}
    assert set(names(config)) == (left - {"global_step_60"}) | {"global_step_60.found"}
    path = folder / "global_step_50_keep"
    found = checkpoint.find_resume(run_in(tmp_path, f"checkpoint.resume={path}"))
    assert found is not None and (found.step, found.path) == (50, path), "one that is named is what was asked for"


def test_a_root_may_be_a_link_to_another_disk(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    through, direct = run_in(tmp_path / "runs", "checkpoint.keep=1"), run_in(tmp_path / "disk")
    save(through, 50, 100)
    assert names(direct) == ["global_step_100"]
    overwrite(saving.step_folder(direct, 100) / MOMENTS)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.require_whole(through)
    save(through, 100)
    assert checkpoint.require_whole(direct) == []
    export(through.run.dir, tmp_path / "out")
    moved = direct.run.dir / "elsewhere"
    saving.step_folder(direct, 100).rename(moved)
    saving.step_folder(direct, 100).symlink_to(moved)
    assert steps(through) == [100] and checkpoint.require_whole(through) == []
    save(through, 150)
    assert steps(through) == [150]

"""A disk that fills while a checkpoint or an export is written: one error, and nothing is left."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from retool_mcore.config import SftConfig, load_config
from retool_mcore.errors import CheckpointError
from retool_mcore.run import checkpoint, saving
from retool_mcore.run.export import export

SFT = Path(__file__).parents[2] / "configs" / "sft_tiny_cpu.toml"
MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_bsize


def run_in(root: Path) -> SftConfig:
    return load_config(SftConfig, SFT, [f"run.root={root}"])


def write_model(folder: str, step: int, mib: int = 1) -> None:
    model = Path(folder) / "model" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    save_file({"a": torch.zeros(mib * MIB // 4)}, model / "model.safetensors")


def write_moments(folder: str, step: int) -> None:
    """As Megatron does: PyTorch's archive, whose error hides the disk."""
    path = Path(folder) / "optimizer"
    path.mkdir(parents=True)
    if step > 50:
        torch.save({"moment": torch.ones(8 * MIB // 4)}, path / "__0_0.distcp")


@pytest.mark.parametrize("write", [lambda folder, step: write_model(folder, step, step // 50), write_moments])
def test_a_checkpoint_that_finds_no_room_is_one_error_and_gives_the_room_back(small_disk: Path, write):
    config = run_in(small_disk)
    with saving.Saver(config, write) as saver:
        saver.save(50)
    left = free(small_disk)
    said = r"no space is left for .*global_step_200\. Nothing of it is left; the checkpoint before it is kept\. Free"
    with pytest.raises(CheckpointError, match=said), saving.Saver(config, write) as saver:
        saver.save(200)
    assert free(small_disk) == left
    assert [path.name for path in (config.run.dir / "checkpoints").iterdir()] == ["global_step_50"]
    assert checkpoint.require_whole(config) == []


def test_an_export_that_finds_no_room_is_one_error_and_gives_the_room_back(small_disk: Path):
    config = run_in(small_disk)
    with saving.Saver(config, lambda folder, step: write_model(folder, step, 2)) as saver:
        saver.save(50)
    left = free(small_disk)
    with pytest.raises(
        CheckpointError, match=r"no space is left for .*export\. Nothing was left there\. Free some, or"
    ):
        export(config.run.dir, config.run.dir / "export")
    assert free(small_disk) == left
    assert sorted(path.name for path in config.run.dir.iterdir()) == ["checkpoints"]

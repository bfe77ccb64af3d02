"""A temporary folder whose name is too long for sockets is found at the start, not hours later."""

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import RlConfig, RunConfig, SftConfig, load_config
from retool_mcore.preflight.limits import MANAGER, RAY, sockets

CONFIGS = Path(__file__).parents[3] / "configs"
SFT = load_config(SftConfig, CONFIGS / "sft_tiny_cpu.toml", [])
RL = load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", [])


def use_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int, name: str = "TMPDIR") -> str:
    folder = str(tmp_path / ("x" * (length - len(str(tmp_path)) - 1)))
    assert len(folder) == length
    Path(folder).mkdir()
    monkeypatch.setenv(name, folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    remembered: Any = multiprocessing.current_process()
    monkeypatch.setitem(remembered._config, "tempdir", None)  # of a test before, whose server of forks still runs
    return folder


@pytest.fixture
def short(request: pytest.FixtureRequest):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("config", "name", "length", "library"),
    [
        (SFT, "TMPDIR", 107 - len(MANAGER), ""),
        (SFT, "TMPDIR", 107 - len(MANAGER) + 1, "multiprocessing"),
        (SFT, "RAY_TMPDIR", 90, ""),
        (RL, "TMPDIR", 107 - len(RAY), ""),
        (RL, "TMPDIR", 107 - len(RAY) + 1, "Ray"),
        (RL, "RAY_TMPDIR", 107 - len(RAY) + 1, "Ray"),
    ],
)
def test_rays_folder_counts_for_rl(  # noqa: PLR0917
    short: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig, name: str, length: int, library: str
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    use_folder(monkeypatch, short, length, name)
    wrong = [finding.text for finding in sockets(config) if finding.severity == "error"]
    assert len(wrong) == bool(library), wrong
    assert all(text.startswith(f"{name} = ") and f": {library} creates sockets" in text for text in wrong)


def test_rays_own_folder_comes_before_the_folder_of_all_programs(short: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", "/tmp")
    use_folder(monkeypatch, short, 107 - len(RAY) + 1, "RAY_TMPDIR")
    [wrong] = [finding.text for finding in sockets(RL) if finding.severity == "error"]
    assert wrong.startswith("RAY_TMPDIR = ")


def test_ray_has_room_up_to_that_length():
    assert len(MANAGER) == len("/pymp-12345678/listener-12345678"), "as multiprocessing names them"
    from ray._private.utils import validate_socket_filepath

    validate_socket_filepath("/" + "t" * (107 - len(RAY) - 1) + RAY)
    with pytest.raises(OSError, match="AF_UNIX path length"):
        validate_socket_filepath("/" + "t" * (107 - len(RAY)) + RAY)


def test_the_sandboxs_socket_counts(monkeypatch: pytest.MonkeyPatch):
    long = "/tmp/" + "s" * 103
    for path, count in ((long[:-1], 0), (long, 1)):
        config = load_config(RlConfig, CONFIGS / "rl_tiny_cpu.toml", [f'sandbox.where=["unix://{path}"]'])
        wrong = [finding.text for finding in sockets(config) if finding.severity == "error"]
        assert len(wrong) == count and all("108 bytes" in text for text in wrong)

"""On what a run ran: written beside its settings, and no reason for it to end."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import get_platform
from retool_mcore.run.environment import read_environment, write_environment


def test_versions_and_hardware_are_written_and_read(tmp_path: Path):
    write_environment(tmp_path, get_platform("cpu"))
    found = read_environment(tmp_path)
    assert found["versions"]["torch"] == version("torch") and found["versions"]["verl"] == version("verl")
    assert int(found["hardware"]["cores"]) > 0 and found["hardware"]["memory"].endswith(" GiB")


@pytest.mark.parametrize("error", [PlatformError("GPU 3 is taken"), subprocess.TimeoutExpired("nvidia-smi", 30)])
def test_a_machine_that_does_not_tell_its_devices_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    platform = get_platform("cpu")

    def facts() -> dict[str, str]:
        raise error

    monkeypatch.setattr(platform, "facts", facts)
    write_environment(tmp_path, platform)
    assert read_environment(tmp_path)["hardware"]["devices"].startswith("unknown: ")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"versions": 3}'])
def test_a_file_that_says_nothing_is_as_none(tmp_path: Path, text: str):
    assert read_environment(tmp_path) == {}
    (tmp_path / "environment.json").write_text(text)
    assert read_environment(tmp_path) == {}
    (tmp_path / "environment.json").write_text(json.dumps({"versions": {"torch": 2}, "other": 1}))
    assert read_environment(tmp_path) == {"versions": {"torch": "2"}}

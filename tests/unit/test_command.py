"""The `retool` command itself: its version, and the name of an evaluated model."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.evaluate import _name_of  # pyright: ignore[reportPrivateUsage]
from retool_mcore.cli.main import all_commands


def shown(*words: str) -> str:
    done = CliRunner().invoke(all_commands(), [*words])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_version_is_that_of_the_installed_package():
    assert shown("--version") == f"retool_mcore {version('retool_mcore')}"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/sft/export", "sft"),
        ("runs/sft/export/", "sft"),
        ("./export", "export"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/", "model"),
    ],
)
def test_an_export_is_called_as_its_run(model: str, name: str):
    assert _name_of(model) == name

"""The `retool` command itself: its version, and the help of its commands."""

import re
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


def test_help_keeps_the_names_of_sections():
    """rich takes a word in brackets for a style, and leaves it out."""
    assert "come from section [validation] of CONFIG." in shown("eval", "run", "--help")
    assert "Train and score ReTool models." in shown("--help")


def test_help_cuts_no_name_at_80_columns():
    for group in ((), ("data",), ("sandbox",), ("rollout",), ("eval", "run"), ("config", "from-verl")):
        message = CliRunner(env={"COLUMNS": "80"}).invoke(all_commands(), [*group, "--help"]).output
        assert "\N{HORIZONTAL ELLIPSIS}" not in message and not re.search(
            r"\w\.\.\.$", message.partition("\n")[2], re.MULTILINE
        )
        assert "<bool>" not in message and max(map(len, message.splitlines())) <= 80
    assert "--max-tool-output-tokens" in shown("rollout", "--help")


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

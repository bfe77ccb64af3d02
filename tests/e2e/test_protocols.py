"""A dry run and a start refuse a protocol before they read any weight."""

from pathlib import Path

import pytest

from tests.unit.preflight.test_preflight import command
from tests.unit.preflight.test_protocols import SFT, settings, task  # noqa: F401  a fixture


@pytest.mark.long
@pytest.mark.parametrize("options", [("--dry-run",), ()])
def test_a_command_refuses_a_protocol_before_any_weight_is_read(task: Path, options: tuple[str, ...]):
    done = command("sft", str(SFT), *settings(task, "plain"), *options)
    assert done.returncode == 2 and "It supports retool" in done.stderr and "Traceback" not in done.stderr

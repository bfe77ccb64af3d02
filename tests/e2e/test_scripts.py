"""Launch scripts and the commands of the pages are valid bash."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.unit.docs.test_pages import (
    ALL,
    GUIDES,
    PAGES,
    ROOT,
    commands,
)


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_of_a_page_is_a_command_of_bash(page: Path):
    done = subprocess.run(["bash", "-n"], input="\n".join(commands(page)), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


SCRIPTS = sorted({f"launch/{name}" for _, line in ALL for name in re.findall(r"bash launch/(\w+\.sh)", line)})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_launch_script_is_bash(script: str):
    assert subprocess.run(["bash", "-n", ROOT / script], check=False).returncode == 0

"""A limit of the machine (descriptors, file size, permissions) is one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.preflight.test_limits import ROOT, SFT

NOBODY = 65534


def started(limits: str, *words: str) -> tuple[int, list[str]]:
    """The exit code and all lines of a command in a shell that has set ``limits``."""
    command = f"{limits} && exec {sys.executable} -m retool_mcore {' '.join(words)}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ("ulimit -n 64", "error: 64 open files are allowed (ulimit -n), and a run needs 512. Raise the limit"),
        ("ulimit -v 2000000", "error: this shell limits the address space of a process to 1.9 GiB (ulimit -v)"),
    ],
)
def test_a_limit_that_would_end_a_start_is_one_line(tmp_path: Path, limits: str, told: str):
    code, lines = started(limits, "sft", str(SFT), f"run.root={tmp_path}")
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith(told)
    assert not list(tmp_path.iterdir())


def test_a_command_that_may_not_write_its_file_says_so_in_one_line(tmp_path: Path):
    """/sys is a file system in which nobody, root neither, makes files."""
    run = ROOT / "tests" / "report" / "quickstart" / "tool_rl"
    code, lines = started("true", "report", str(run), "--out", "/sys/report.html")
    assert code == 2 and lines[-1].startswith("error: "), lines
    assert "/sys/" in lines[-1] and not any("Traceback" in line for line in lines)

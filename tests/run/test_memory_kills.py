"""A process that the kernel kills for want of memory is told as that, by a real cgroup's limit."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from retool_mcore.run import memory_kills

LIMIT = 1200 << 20  # torchrun's agent has a third of it
LIMITS = {memory_kills.V1: "memory.limit_in_bytes", memory_kills.V2: "memory.max"}
HUNGRY = "held = bytearray(3 << 30)"
WATCH = f"""
import subprocess, sys
from retool_mcore.errors import RunError
from retool_mcore.run.memory_kills import MemoryKills
kills = MemoryKills()
subprocess.run([sys.executable, "-c", "pass"], check=True)
assert kills.words() == "", "a process that ends by itself is none"
assert subprocess.run([sys.executable, "-c", "{HUNGRY}"]).returncode == -9
print(kills.words())
assert MemoryKills().words() == "", "those of before are not counted again"
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup whose processes have LIMIT bytes together."""
    counter = memory_kills._counter()
    if counter is None or os.geteuid() != 0:
        pytest.skip("needs root and a memory cgroup")
    folder = counter.parent / f"retool_test_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / LIMITS[counter.name]).write_text(str(LIMIT), encoding="ascii")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    for _ in range(50):
        with suppress(OSError):
            folder.rmdir()
            return
        subprocess.run(["sleep", "0.1"], check=True)


def in_group(group: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    script = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, str(group), sys.executable, "-W", "ignore", *argv],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_kill_for_want_of_memory_is_counted_from_the_runs_start_on(group: Path):
    done = in_group(group, "-c", WATCH)
    assert done.returncode == 0, done.stderr
    assert "killed 1 of this job's processes for want of memory" in done.stdout and str(group) in done.stdout


@pytest.mark.slow
def test_a_rank_of_sft_that_is_killed_so_is_one_line_and_may_be_started_again(group: Path, tmp_path: Path):
    (tmp_path / "rank.py").write_text(HUNGRY, encoding="utf-8")
    done = in_group(
        group, "-m", "retool_mcore.cli.torchrun", "--standalone", "--nproc-per-node", "1", str(tmp_path / "rank.py")
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 3, "launch/nodes.sh starts it again where RESTARTS allows"
    assert len(errors) == 1 and "rank 0" in errors[0] and "for want of memory" in errors[0], done.stderr
    assert "Traceback" not in done.stderr

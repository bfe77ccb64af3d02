"""Root's executions have uids that no other sandbox on the machine uses."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.confine import FIRST_UID, NUM_UIDS
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import claim_uid
from tests.sandbox.ordinary import ROOT, OrdinaryUser


@pytest.fixture
def claimed() -> Iterator[list[int]]:
    """The fds of locks that a test claims; closes them."""
    fds: list[int] = []
    yield fds
    for fd in fds:
        os.close(fd)


def claim(directory: Path, count: int, claimed: list[int]) -> set[int]:
    claims = [claim_uid(directory) for _ in range(count)]
    claimed += [fd for _, fd in claims]
    return {uid for uid, _ in claims}


def test_no_uid_is_claimed_twice_until_its_process_is_killed(tmp_path: Path, claimed: list[int]):
    directory = tmp_path / "uids"  # not the shared one, because this test claims all uids
    code = "from pathlib import Path\nfrom retool_mcore.sandbox.supervisor.slots import claim_uid\n"
    code += f"print(claim_uid(Path({str(directory)!r}))[0], flush=True)\nopen(0).read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    first = int(other.stdout.readline())
    uids = claim(directory, NUM_UIDS - 1, claimed)
    assert len(uids) == NUM_UIDS - 1 and first not in uids
    assert min(uids) >= FIRST_UID and max(uids) < FIRST_UID + NUM_UIDS < 65_534
    with pytest.raises(SandboxUnavailable, match="use all 4480 execution uids"):
        claim_uid(directory)
    other.kill()
    other.wait()
    assert claim(directory, 1, claimed) == {first}


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to start a process of another user")
def test_another_user_cannot_take_the_uids(ordinary_user: OrdinaryUser):
    os.close(claim_uid()[1])  # creates the directory, if this is the first sandbox
    code = "from retool_mcore.sandbox.supervisor.slots import claim_uid\nclaim_uid()"
    assert "not a directory that only root can enter" in ordinary_user.run(code).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's executions have separate uids")
@pytest.mark.parametrize("level", [Level.LANDLOCK, Level.RLIMITS])
async def test_executions_run_under_claimed_uids(level: Level):
    async with LocalSandbox(min_level=level, max_level=level, workers=1) as sandbox:
        uid = int((await sandbox.execute("import os; os.getuid()")).stdout)
        assert FIRST_UID <= uid < FIRST_UID + NUM_UIDS


WITHOUT_CAPABILITY = """
import asyncio, logging
from retool_mcore.sandbox.supervisor import kernel
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
kept = ((1 << 41) - 1) & ~(1 << 21) & ~(1 << 24)  # all but CAP_SYS_ADMIN and CAP_SYS_RESOURCE
kernel._libc.prctl(24, 21, 0, 0, 0)
kernel._capset(kept, kept)
async def main():
    async with LocalSandbox(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1) as sandbox:
        print((await sandbox.execute("import wave\\nprint('imported')")).text)
logging.basicConfig()
asyncio.run(main())
"""


def test_python_in_a_closed_directory_works_without_the_capability_and_logs_a_warning():
    """The warning is expected only if other users cannot enter the directory of root's Python."""
    if os.geteuid() != 0:
        pytest.skip("requires root")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_CAPABILITY], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout == "imported\n", result.stderr
    base = os.path.realpath(sys.base_prefix)
    closed = False
    while base != "/":
        closed, base = closed or not os.stat(base).st_mode & 0o001, os.path.dirname(base)
    assert ("is in a directory that other users cannot enter" in result.stderr) == closed

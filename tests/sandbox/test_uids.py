"""Root's executions have uids that no other sandbox on the machine uses."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.confine import FIRST_UID, NUM_UIDS
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import Uids
from tests.sandbox.ordinary import ROOT, OrdinaryUser

NAME = f"tests-{os.getpid()}"  # another name, so that claiming all uids does not affect sandboxes of other tests


@pytest.fixture
def sandboxes() -> Iterator[list[Uids]]:
    made = [Uids(NAME) for _ in range(3)]
    yield made
    for each in made:
        each.close()


def test_no_two_sandboxes_share_a_uid_with_any_number_of_workers(sandboxes: list[Uids]):
    """If uids depended only on pid and slot number, those of two pids would overlap."""
    taken = [each.of(number) for each in sandboxes for number in range(-1, 130)]
    assert len(set(taken)) == 3 * 131
    assert min(taken) >= FIRST_UID and max(taken) < FIRST_UID + NUM_UIDS < 65_534
    assert [sandboxes[0].of(number) for number in (-1, 5, 129)] == [taken[0], taken[6], taken[130]]


def test_uids_of_another_process_become_free_only_when_it_is_killed(sandboxes: list[Uids]):
    code = f"from retool_mcore.sandbox.supervisor.slots import Uids\nu = Uids({NAME!r})\n"
    code += "print(u.of(-1), flush=True)\nopen(0).read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    first = int(other.stdout.readline())
    num_others = NUM_UIDS - 16  # its block is one of 280
    assert first not in [sandboxes[0].of(number) for number in range(-1, num_others - 1)]
    with pytest.raises(SandboxUnavailable, match="use all 4480 uids"):
        sandboxes[1].of(-1)
    other.kill()
    other.wait()
    assert sandboxes[1].of(-1) == first


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to start a process of another user")
def test_another_user_cannot_take_the_uids(ordinary_user: OrdinaryUser):
    with contextlib.closing(Uids()) as claimed:  # creates the directory, if this is the first sandbox
        claimed.of(0)
    code = (
        "import socket\nfrom retool_mcore.sandbox.supervisor.slots import FIRST_UID, NUM_UIDS, Uids\nkept = []\n"
        "for start in range(FIRST_UID, FIRST_UID + NUM_UIDS, 16):\n"
        "  kept.append(socket.socket(socket.AF_UNIX))\n"
        "  kept[-1].bind(f'\\0retool-sandbox-uids-{start}')\n"
        "try: kept.append(Uids()); kept[-1].of(NUM_UIDS - 2)\n"
        "except Exception as error: print(error)\n"
        "print('ready', flush=True)\nopen(0).read()"
    )
    squatter = ordinary_user.start(code)
    assert squatter.stdout is not None
    try:
        while squatter.stdout.readline() not in ("ready\n", ""):
            pass
        with contextlib.closing(Uids()) as claimed:
            assert claimed.of(0)
    finally:
        squatter.kill()
        squatter.wait()


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
    """The warning is expected only if root's Python is in a closed directory."""
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
    assert ("is in a closed directory" in result.stderr) == closed

"""What outlives guardian and zygote at level rlimits, where a user's code can kill both."""

import pytest

from retool_mcore.sandbox.orphans import Kind, Process, orphans
from tests.sandbox.ordinary import OrdinaryUser

# A survivor in a session of its own, after the death of everything above it; beside it, an
# execution of another sandbox of the same user.
KILLING = """
import asyncio, os, pathlib, sys
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox

ATTACK = '''
import ctypes, os, signal, time
main, guardian = os.getpid(), os.getppid()
zygote = int(open(f"/proc/{guardian}/stat").read().rpartition(")")[2].split()[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"rt-orphan", 0, 0, 0)
        for pid, number in KILLS: os.kill(pid, number)
        while True:
            time.sleep(0.01)
            if os.fork() == 0: os._exit(0)
    os._exit(0)
time.sleep(9)
'''

def statuses():
    for path in pathlib.Path("/proc").glob("[0-9]*/status"):
        try: yield path.read_text()
        except OSError: continue

def alive():
    return sum("rt-orphan" in text and "State:\\tZ" not in text for text in statuses())

def stopped():
    return sum("State:\\tT" in text and f"Uid:\\t{os.getuid()}\\t" in text for text in statuses())

async def main():
    options = dict(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1, attempts=1)
    async with LocalSandbox(**options) as one, LocalSandbox(**options) as other:
        innocent = asyncio.ensure_future(other.execute("import time; time.sleep(2); print('whole')"))
        await asyncio.sleep(0.5)
        try:
            await one.execute(ATTACK.replace("KILLS", sys.argv[1]), run_timeout_s=5)
        except SandboxUnavailable:
            print("lost")
        print("alive", alive(), "stopped", stopped())
        print((await one.execute("6 * 7")).stdout.strip(), (await innocent).stdout.strip())
asyncio.run(main())
"""


def processes(*lines: tuple[int, int, Kind]) -> dict[int, Process]:
    return {pid: Process(pid, parent, kind) for pid, parent, kind in lines}


def test_an_execution_under_way_is_none():
    tree = processes((10, 1, "other"), (20, 10, "zygote"), (21, 20, "guardian"), (22, 21, "execution"))
    assert orphans(tree | processes((23, 22, "execution"))) == []


def test_what_has_lost_guardian_or_zygote_is_one():
    assert orphans(processes((22, 1, "execution"), (23, 22, "execution"))) == [22, 23]
    assert orphans(processes((20, 1, "zygote"), (22, 20, "execution"))) == [22]
    assert orphans(processes((21, 1, "guardian"), (22, 21, "execution"))) == [22]


def test_a_guardian_without_a_zygote_is_ended_only_if_it_cannot_end_itself():
    assert orphans(processes((21, 1, "stopped guardian"), (22, 1, "guardian"))) == [21]
    assert orphans(processes((20, 1, "zygote"), (21, 20, "stopped guardian"))) == []


def test_other_processes_are_left_alone():
    assert orphans(processes((1, 0, "other"), (5, 1, "other"), (20, 5, "zygote"))) == []


@pytest.mark.parametrize(
    ("kills", "outcome"),
    [
        ("((guardian, 9), (main, 9))", []),
        ("((guardian, 9), (zygote, 9), (main, 9))", ["lost"]),
        ("((guardian, signal.SIGSTOP), (zygote, 9), (main, 9))", ["lost"]),
    ],
)
def test_nothing_outlives_the_call(kills: str, outcome: list[str], ordinary_user: OrdinaryUser):
    result = ordinary_user.run(KILLING, kills)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [*outcome, "alive 0 stopped 0", "42 whole"]

"""All files that code leaves behind are deleted, and they affect no other execution."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import remove_directory
from tests.sandbox.ordinary import OrdinaryUser
from tests.sandbox.sandbox_helpers import LEVELS, longest_stall_s, still_works

DEEP = "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"
CLOSED = "import os\nos.makedirs('x/y/z'); open('x/y/f', 'w').close(); os.chmod('x/y', 0); os.chmod('x', 0)"
CLOSED_HOME = "import os\nos.mkdir('a'); os.chmod('a', 0); os.chmod('.', 0)"
NAMED_AS_THE_HOSTS = "import os\nfor n in ('runs', 'id_rsa'): os.mkdir(n); os.chmod(n, 0)"
MANY = "import os\nfor i in range(900): os.makedirs(f'd/{i}')"
ODD = """
import os
try: os.mkfifo('p')
except OSError: pass
os.symlink('/', 'l'); os.symlink('gone', 'm'); os.mkdir(b'\\xff\\n'); os.mkdir('k' * 255)
"""
LEFT_BEHIND = [DEEP, CLOSED, CLOSED_HOME, NAMED_AS_THE_HOSTS, MANY, ODD]


def test_targets_of_links_are_not_touched(tmp_path: Path):
    host = tmp_path / "host"
    host.mkdir()
    (host / "checkpoint").write_text("weights")
    host.chmod(0o500)
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    for place in (tree, tree / "below"):
        (place / "link").symlink_to(host)
        (place / "relative").symlink_to("../host")
        os.link(host / "checkpoint", place / "hard")
    assert remove_directory(tree)
    assert (host / "checkpoint").read_text() == "weights"
    assert host.stat().st_mode & 0o777 == 0o500


def test_a_tree_that_cannot_be_deleted_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PATH", str(tmp_path))  # without rm
    assert not remove_directory(tmp_path)
    assert f"{tmp_path} could not be removed" in caplog.text


@pytest.mark.parametrize("code", LEFT_BEHIND)
async def test_no_execution_sees_files_of_an_earlier_one(sandbox: LocalSandbox, code: str, tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o755)
    (tmp_path / "id_rsa").touch(0o640)
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for result in await asyncio.gather(*(sandbox.execute(code) for _ in range(sandbox.workers))):
            assert result.ok or "No space left" in result.stderr  # namespaces: 1024 files
    finally:
        os.chdir(here)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("runs", "id_rsa")] == [0o755, 0o640]
    for _ in range(2 * sandbox.workers):
        assert (await sandbox.execute("import os; os.listdir('.')")).stdout == "[]\n"
    slots = [slot.directory for slot in sandbox._slots if slot.directory is not None]  # pyright: ignore[reportPrivateUsage]
    assert [path for path in slots if path.exists()] == []
    assert list(state_of(sandbox).glob("left-*")) == []


def state_of(sandbox: LocalSandbox) -> Path:
    assert sandbox._state is not None
    return sandbox._state.path


async def test_a_large_tree_is_deleted_while_others_are_served(sandbox: LocalSandbox):
    """A thread deletes it, so that the event loop keeps answering pings and reading outputs."""
    if sandbox.level not in (Level.LANDLOCK, Level.RLIMITS):
        pytest.skip(f"at {sandbox.level} the number of files is bounded")
    code = "import os\nfor i in range(40_000): os.close(os.open(str(i), os.O_CREAT))"
    call = asyncio.ensure_future(sandbox.execute(code, run_timeout_s=300))
    assert await longest_stall_s(call) < 0.15
    assert (await call).ok
    assert await still_works(sandbox)
    assert list(state_of(sandbox).glob("left-*")) == []


async def test_a_call_cancelled_during_a_long_deletion_frees_its_worker(monkeypatch: pytest.MonkeyPatch):
    deleted: list[Path] = []
    may_delete = threading.Event()

    def remove_late(path: Path) -> bool:
        if path.name.startswith("left-"):
            may_delete.wait(60)
            deleted.append(path)
        return remove_directory(path)

    async with LocalSandbox(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1) as sandbox:
        monkeypatch.setattr("retool_mcore.sandbox.supervisor.slots.remove_directory", remove_late)
        flood = asyncio.ensure_future(sandbox.execute("import os\nfor i in range(300): os.symlink('x', str(i))"))
        async with asyncio.timeout(60):
            while not list(state_of(sandbox).glob("left-*")):
                await asyncio.sleep(0.01)
        flood.cancel()
        after = await sandbox.execute("import os; os.listdir('.')")
        assert (after.stdout, deleted) == ("[]\n", [])
        may_delete.set()
        async with asyncio.timeout(60):
            while list(state_of(sandbox).glob("left-*")):
                await asyncio.sleep(0.01)


ORDINARY = """
import asyncio, os, sys
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
async def main():
    level = Level(sys.argv[1])
    os.mkdir("runs")
    os.close(os.open("id_rsa", os.O_CREAT, 0o640))
    async with LocalSandbox(min_level=level, max_level=level, workers=2) as sandbox:
        for code in sys.argv[2:]:
            for _ in range(4):
                result = await sandbox.execute(code)
                if result.return_code and not any(word in result.stderr for word in ("not permitted", "No space left")):
                    print(result)
            print((await sandbox.execute("6 * 7")).text, (await sandbox.execute("__import__('os').listdir('.')")).text)
        print((await sandbox.execute("import numpy, sympy; sympy.factorint(12)")).text)
        bomb = "import os\\nwhile True:\\n try:\\n  if os.fork() == 0: os.setsid()\\n except OSError: pass"
        print((await sandbox.execute(bomb, run_timeout_s=0.5)).status)
        forks = "import os\\nfor n in range(200):\\n  if os.fork() == 0: __import__('time').sleep(9)"
        print((await sandbox.execute(forks)).text.splitlines()[-1][:22])
        if level != Level.RLIMITS:
            kills = "import os\\nfor p in (os.getppid(), 1, -1):\\n try: os.kill(p, 9)\\n except OSError: pass"
            await sandbox.execute(kills, run_timeout_s=2)
        print((await sandbox.execute("6 * 7")).text)
        state = sandbox._state.path
    print(state.exists(), oct(os.stat("runs").st_mode), oct(os.stat("id_rsa").st_mode))
    os.rmdir("runs"), os.unlink("id_rsa")
asyncio.run(main())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_an_ordinary_users_sandbox_works_and_removes_everything(level: str, ordinary_user: OrdinaryUser):
    result = ordinary_user.run(ORDINARY, level, *LEFT_BEHIND)
    works = ["{2: 2, 3: 1}", "time_limit", "BlockingIOError: [Errn", "42"]
    expected = ["42 []"] * len(LEFT_BEHIND) + works + ["False 0o40755 0o100640"]
    assert result.stdout.splitlines() == expected, result.stderr

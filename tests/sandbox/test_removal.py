"""All files that code leaves behind are deleted, and they affect no other execution."""

import asyncio
from pathlib import Path

import pytest

from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import remove_directory
from tests.sandbox.ordinary import OrdinaryUser
from tests.sandbox.sandbox_helpers import LEVELS

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
        (place / "hard").hardlink_to(host / "checkpoint")
    assert remove_directory(tree)
    assert (host / "checkpoint").read_text() == "weights"
    assert host.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize("code", LEFT_BEHIND)
async def test_no_execution_sees_files_of_an_earlier_one(
    sandbox: LocalSandbox, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir(mode=0o755)
    Path("id_rsa").touch(0o640)
    for result in await asyncio.gather(*(sandbox.execute(code) for _ in range(sandbox.workers))):
        assert result.ok or "No space left" in result.stderr  # namespaces: 1024 files
    assert [Path(name).stat().st_mode & 0o777 for name in ("runs", "id_rsa")] == [0o755, 0o640]
    for _ in range(2 * sandbox.workers):
        assert (await sandbox.execute("import os; os.listdir('.')")).stdout == "[]\n"
    assert sandbox._state is not None
    assert [*sandbox._state.path.glob("slot*"), *sandbox._state.path.glob("left-*")] == []


ORDINARY = """
import asyncio, os, sys
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
async def main():
    level = Level(sys.argv[1])
    async with LocalSandbox(min_level=level, max_level=level, workers=2) as sandbox:
        for code in sys.argv[2:]:
            for _ in range(4):
                result = await sandbox.execute(code)
                if result.return_code and not any(word in result.stderr for word in ("not permitted", "No space left")):
                    print(result)
            print((await sandbox.execute("6 * 7")).text, (await sandbox.execute("__import__('os').listdir('.')")).text)
        print((await sandbox.execute("import numpy, sympy; sympy.factorint(12)")).text)
        state = sandbox._state.path
    print(state.exists())
asyncio.run(main())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_an_ordinary_users_sandbox_works_and_removes_everything(level: str, ordinary_user: OrdinaryUser):
    result = ordinary_user.run(ORDINARY, level, *LEFT_BEHIND)
    expected = ["42 []"] * len(LEFT_BEHIND) + ["{2: 2, 3: 1}", "False"]
    assert result.stdout.splitlines() == expected, result.stderr

"""sandbox.python: another Python runs the code. sandbox.preload: modules imported in advance."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import LEVELS, last_line, open_at, start

MODULES = {
    "only_there": "WHO = 'the other Python'\n",
    "warm": "import os, tempfile\n"
    "for place in (tempfile.gettempdir(), os.environ['HOME']):\n"
    "    with open(os.path.join(place, 'cache'), 'w') as file: file.write('x')\n"
    "CACHE = os.path.abspath(file.name)\n",
    "raises": "raise RuntimeError('no display')\n",
    "leaves": "raise SystemExit('not here')\n",
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
}


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """A virtual environment with only MODULES.

    It is not under /tmp, because executions see their own directory there.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        home = Path(folder)
        home.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "env")], check=True)
        (packages,) = (home / "env/lib").glob("python*/site-packages")
        for name, source in MODULES.items():
            (packages / name).mkdir()
            (packages / name / "__init__.py").write_text(source)
        (packages / "warm" / "part.py").touch()
        yield str(home / "env/bin/python")


async def at(level: Level, python: str, *preload: str) -> LocalSandbox:
    return await open_at(level, workers=1, interpreter=Interpreter(python, preload))


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_code_sees_only_the_packages_of_the_other_python(level: Level, python: str):
    async with await at(level, python) as sandbox:
        there = await sandbox.execute("import only_there\nonly_there.WHO")
        assert there.stdout == "'the other Python'\n", there.stderr
        for ours in ("httpx", "numpy", "retool_mcore"):
            failing = await sandbox.execute(f"import {ours}")
            assert last_line(failing.stderr) == f"ModuleNotFoundError: No module named '{ours}'"
        failing = await sandbox.execute("import json\njson.loads('{')")
        assert "File" in failing.stderr and "retool" not in failing.stderr and "json/" not in failing.stderr
        pool = "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1]))"
        pools = await sandbox.execute(pool, run_timeout_s=60)
        assert pools.stdout == "[1]\n" or (level == Level.LANDLOCK and "Permission denied" in pools.stderr)


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("local", {"python": "bin/python"}, r"sandbox.python = 'bin/python' is not an absolute path"),
        ("local", {"preload": ["scikit-learn"]}, r"sandbox.preload: 'scikit-learn' is not a module name"),
        ("http://127.0.0.1:1", {"python": "/opt/bin/python"}, r"Start that server with --python PATH"),
    ],
)
def test_bad_values_are_configuration_errors(where: str, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        open_sandbox(where, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_preloaded_modules_are_imported_before_the_code_starts(level: Level, python: str):
    """Other code runs in the light image. Files that an import writes do not reach executions."""
    before = {*os.listdir("/"), *os.listdir("/tmp")}
    async with await at(level, python, "warm.part") as sandbox:
        preloaded = await sandbox.execute("import sys\nprint('warm.part' in sys.modules)\nimport warm.part")
        light = await sandbox.execute("import sys\nprint('wa' + 'rm' in sys.modules)")
        assert (preloaded.stdout, light.stdout) == ("True\n", "False\n")
        seen = await sandbox.execute(
            "import warm, os, tempfile\nos.path.exists(warm.CACHE), tempfile.gettempdir() == os.getcwd(), os.listdir()"
        )
        kept = level == Level.RLIMITS  # among the host's files
        assert seen.stdout == f"({kept}, True, [])\n", seen.stderr
        assert (await sandbox.execute("import tempfile, warm\ntempfile.TemporaryFile().write(b'x')")).stdout == "1\n"
    after = {name for name in os.listdir("/tmp") if name.startswith("cache")}.union(os.listdir("/"))
    assert after <= before


@pytest.mark.parametrize(
    ("level", "name", "message"),
    [
        (Level.NAMESPACES, "warm.absent", "No module named 'warm.absent'. Install its package"),
        (Level.NAMESPACES, "raises", "cannot import 'raises': RuntimeError: no display"),
        (Level.NAMESPACES, "threads", "importing 'threads' leaves 1 threads running"),
        *((level, "leaves", "SystemExit: not here") for level in LEVELS),
    ],
)
async def test_a_module_that_cannot_be_preloaded_is_a_configuration_error(
    level: Level, name: str, message: str, python: str
):
    """The sandbox does not fall back to a weaker level."""
    await (await open_at(level, workers=1)).close()  # skips where the level is not supported
    with pytest.raises(ConfigError, match=f"^sandbox.preload: .*{message}"):
        await at(level, python, "only_there", name)


async def test_the_processes_of_a_server_have_its_python_and_preload(python: str):
    preload = ("--preload", "warm", "--preload", "only_there")
    server, url = start("--port", "0", "--python", python, *preload, "--workers", "2", "--processes", "2")
    try:
        async with open_sandbox(url, min_level="rlimits") as sandbox:
            code = "import sys\nprint({'warm', 'only_there'} <= sys.modules.keys())\nimport warm"
            assert (await sandbox.execute(code)).stdout == "True\n"
    finally:
        server.terminate()
        server.communicate()

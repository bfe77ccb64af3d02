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
from tests.sandbox.sandbox_helpers import LEVELS, children_of, open_at, start

MODULES = {
    "only_there": "WHO = 'the other Python'\n",
    "warm": "import os, tempfile\n"
    "for place in (tempfile.gettempdir(), os.environ['HOME']):\n"
    "    with open(os.path.join(place, 'cache'), 'w') as file: file.write('x')\n"
    "CACHE = os.path.abspath(file.name)\n",
    "warm.part": "",
    "raises": "raise RuntimeError('no display')\n",
    "leaves": "raise SystemExit('not here')\n",
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
}

POOL = """
import concurrent.futures, multiprocessing
with multiprocessing.Pool(2) as one, concurrent.futures.ProcessPoolExecutor(2) as other:
    print(one.map(abs, [-1]), list(other.map(abs, [-2])))
"""


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """A virtual environment with only MODULES.

    It is not under /tmp, because executions see their own directory there.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield make_environment(Path(folder))


def make_environment(folder: Path, of: str = sys.executable) -> str:
    subprocess.run([of, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    for name, source in MODULES.items():
        parts = name.split(".")
        (packages / parts[0]).mkdir(exist_ok=True)
        (packages / parts[0] / (f"{parts[1]}.py" if parts[1:] else "__init__.py")).write_text(source)
    return str(folder / "env/bin/python")


async def at(level: Level, python: str, *preload: str) -> LocalSandbox:
    return await open_at(level, workers=1, interpreter=Interpreter(python, preload))


async def imports(sandbox: LocalSandbox, name: str) -> str:
    result = await sandbox.execute(f"import {name}\nprint({name}.__name__)", run_timeout_s=60)
    return result.stdout.strip() or result.stderr.strip().splitlines()[-1]


# ---------------------------------------------------------------- sandbox.python


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_code_sees_only_the_packages_of_the_other_python(level: Level, python: str):
    async with await at(level, python) as sandbox:
        there = await sandbox.execute("import only_there\nonly_there.WHO")
        assert there.stdout == "'the other Python'\n", there.stderr
        for ours in ("httpx", "numpy", "retool_mcore"):
            assert await imports(sandbox, ours) == f"ModuleNotFoundError: No module named '{ours}'"
        failing = await sandbox.execute("import json\njson.loads('{')")
        assert "File" in failing.stderr and "retool" not in failing.stderr and "json/" not in failing.stderr
        pools = await sandbox.execute(POOL, run_timeout_s=60)
        assert pools.stdout == "[1] [2]\n" or (level == Level.LANDLOCK and "Permission denied" in pools.stderr)


@pytest.mark.parametrize("other", [True, False])
async def test_another_python_does_not_get_our_ld_library_path(
    other: bool, python: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    executable = python if other else sys.executable
    others = zygotes_of(executable)
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1, interpreter=Interpreter(python if other else "")):
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in zygotes_of(executable) - others]
    assert environments and all(
        (f"LD_LIBRARY_PATH={tmp_path}".encode() in environment) != other for environment in environments
    )


def zygotes_of(executable: str) -> set[int]:
    return set(children_of(os.getpid(), f"{executable}\0-s\0-P"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "cannot be started: No such file or directory"),
        ("#!/bin/sh\necho a shell\n", "cannot run the sandbox: 'a shell'"),
    ],
)
async def test_an_executable_that_is_not_a_python_is_refused(script: str | None, message: str, tmp_path: Path):
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        await open_sandbox("local", python=str(path), min_level="rlimits").execute("1")
    assert f"sandbox.python = {str(path)!r} {message}" in str(caught.value)
    assert "python3 -m venv /opt/sandbox" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "bin/python"}, r"sandbox.python = 'bin/python' is not an absolute path"),
        ({"preload": ["scikit-learn"]}, r"sandbox.preload: 'scikit-learn' is not a module name"),
        ({"preload": ["pandas\n"]}, r"is not a module name"),
    ],
)
def test_bad_values_are_configuration_errors(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        open_sandbox("local", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"python": "/opt/sandbox/bin/python"}, {"preload": ["pandas"]}])
def test_a_remote_sandbox_refuses_python_and_preload(options: dict[str, object]):
    with pytest.raises(
        ConfigError, match=r"do not apply to the server 'http://127.0.0.1:1'. Start that server with --python PATH"
    ):
        open_sandbox("http://127.0.0.1:1", **options)  # type: ignore[arg-type]


# --------------------------------------------------------------- sandbox.preload


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_preloaded_modules_are_imported_before_the_code_starts(level: Level, python: str):
    """Other code runs in the light image. Files that an import writes do not reach executions."""
    before = set(os.listdir("/")), set(os.listdir("/tmp"))
    async with await at(level, python, "warm.part") as sandbox:
        assert printed_true(await sandbox.execute("import sys\nprint('warm.part' in sys.modules)\nimport warm.part"))
        assert not printed_true(await sandbox.execute("import sys\nprint('wa' + 'rm' in sys.modules)"))
        files = (
            "import warm, os, tempfile\nos.path.exists(warm.CACHE), tempfile.gettempdir() == os.getcwd(), os.listdir()"
        )
        seen = await sandbox.execute(files)
        kept = level == Level.RLIMITS  # among the host's files
        assert seen.stdout == f"({kept}, True, [])\n", seen.stderr
        for zygote in zygotes_of(python) if level == Level.NAMESPACES else ():
            (inside,) = children_of(zygote, python)
            assert " /box " not in Path(f"/proc/{inside}/mountinfo").read_text(), "the tmpfs is still mounted"
        assert (await sandbox.execute("import tempfile, warm\ntempfile.TemporaryFile().write(b'x')")).stdout == "1\n"
    assert not {name for name in os.listdir("/") if name not in before[0]}
    assert not {name for name in os.listdir("/tmp") if name not in before[1] and name.startswith("cache")}


def printed_true(result: object) -> bool:
    assert result.stdout in ("True\n", "False\n"), result.stderr  # type: ignore[attr-defined]
    return result.stdout == "True\n"  # type: ignore[attr-defined]


NOT_PRELOADED = {
    "sklearn": ("env/bin/python -m pip install", "No module named 'sklearn'"),
    "warm.absent": ("No module named 'warm.absent'",),
    "raises": ("cannot import 'raises'", "RuntimeError: no display"),
    "leaves": ("SystemExit: not here",),
    "threads": ("importing 'threads' leaves 1 threads running",),
}
REFUSALS = [
    *((Level.NAMESPACES, name) for name in NOT_PRELOADED),
    *((level, "leaves") for level in (Level.LANDLOCK, Level.RLIMITS)),
]


@pytest.mark.parametrize(("level", "name"), REFUSALS, ids=str)
async def test_a_module_that_cannot_be_preloaded_is_a_configuration_error(level: Level, name: str, python: str):
    """The sandbox does not fall back to a weaker level."""
    await (await open_at(level, workers=1)).close()  # skips where the level is not supported
    with pytest.raises(ConfigError) as caught:
        await LocalSandbox(
            min_level=level, max_level=level, workers=1, interpreter=Interpreter(python, ("only_there", name))
        ).open()
    assert str(caught.value).startswith("sandbox.preload: ")
    assert [words for words in NOT_PRELOADED[name] if words not in str(caught.value)] == []


# ------------------------------------------------------------------- from outside


@pytest.mark.parametrize("options", [(), ("--workers", "2", "--processes", "2")])
async def test_a_server_accepts_python_and_preload(options: tuple[str, ...], python: str):
    server, url = start("--port", "0", "--python", python, "--preload", "warm", "--preload", "only_there", *options)
    try:
        async with open_sandbox(url, min_level="rlimits") as sandbox:
            code = "import sys\nprint({'warm', 'only_there'} <= sys.modules.keys())\nimport warm"
            assert printed_true(await sandbox.execute(code))
    finally:
        server.terminate()
        server.communicate()

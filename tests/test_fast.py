"""What `make test-fast` runs: a test that starts a process is left out, however it does so."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import asyncio, multiprocessing, os, subprocess, sys
import pytest

async def in_a_task():
    return await asyncio.gather(asyncio.create_subprocess_exec("true"), return_exceptions=True)

@pytest.fixture(scope="module")
def server():
    try:
        return subprocess.Popen(["true"])
    except BaseException:
        raise ValueError("no server")

def process(way):
    started = multiprocessing.get_context(way).Process(target=print)
    started.start()
    started.join()

def test_subprocess(): subprocess.run(["true"], check=True)
def test_system(): assert os.system("true") == 0
def test_fork(): os.fork() or os._exit(0)
def test_posix_spawn(): os.posix_spawn("/bin/true", ["true"], {})
def test_spawn(): process("spawn")
def test_forked(): process("fork")
def test_server(): process("forkserver")
def test_task(): assert asyncio.run(in_a_task()) is None
def test_first_of_fixture(server): pass
def test_second_of_fixture(server): pass
def test_pure(): assert 1 + 1 == 2
def test_pure_and_wrong(): assert 1 + 1 == 3
def test_wrong_before_it(): assert not sys.argv; os.fork()
"""


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    (folder / "test_these.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", "--rootdir", folder, *options, folder]
    # What this run was told (CI: `--reruns 1 -raR`) would add lines of its own.
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if "test_these.py::test_" in line]
    found = {line[0].partition("::test_")[2]: line[1] for line in lines if line[0] != "FAILED"}
    assert found, done.stdout + done.stderr
    return found


def test_what_starts_a_process_is_skipped_and_what_fails_without_one_fails(tmp_path: Path):
    runs = {"pure": "PASSED", "pure_and_wrong": "FAILED", "wrong_before_it": "FAILED"}
    found = outcomes(tmp_path, "-p", "tests.fast")
    assert len(found) == 13 and {name: found.pop(name) for name in runs} == runs
    assert set(found.values()) == {"SKIPPED"}
    alone = outcomes(tmp_path, "-k", "subprocess or spawn or server")
    assert set(alone.values()) == {"PASSED"} and len(alone) == 4


def test_its_parts_together_are_all_tests():
    command = ["make", "-n", "test-fast-verl", "test-fast-pure", "test-fast-rest"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    *parts, rest = (line.split() for line in told.splitlines() if "pytest" in line)
    rooms = [word for part in parts for word in part if word.startswith("tests/")]
    assert rooms and [word.removeprefix("--ignore=") for word in rest if word.startswith("--ignore=")] == rooms
    assert all((ROOT / room).is_dir() for room in rooms)
    assert all("-p tests.fast" in " ".join(part) for part in (*parts, rest))

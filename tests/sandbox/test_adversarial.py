"""Limits and files at every level of this machine: the exact outcome, not just 'no crash'.

Processes, text and state are in test_adversarial_processes.py. What is held or not is in table.py,
which README.md shows; here is what the model or an attacker gets to see.
"""

from pathlib import Path

import pytest

from retool_mcore.errors import ConfigError
from retool_mcore.sandbox.base import ExecRequest, Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.output import MAX_STREAM_BYTES
from tests.sandbox.sandbox_helpers import NOT_REDIRECTED, last_line, still_works

# ------------------------------------------------------------------- limits


async def test_infinite_loop_ends_at_the_time_limit_and_keeps_its_output(sandbox: LocalSandbox):
    result = await sandbox.execute("print('begun', end='')\nwhile True: pass", run_timeout_s=0.5)
    assert (result.status, result.return_code, result.stdout) == ("time_limit", None, "begun")
    assert 0.5 <= result.run_s < 2
    assert result.text == f"begun\n[stopped at the time limit, after {result.run_s:.1f} s]"


async def test_sleep_counts_as_wall_time(sandbox: LocalSandbox):
    result = await sandbox.execute("import time; time.sleep(60)", run_timeout_s=2)
    assert result.status == "time_limit"
    assert result.cpu_s < 1.5


async def test_allocation_over_the_limit_is_a_memory_error(sandbox: LocalSandbox):
    result = await sandbox.execute("x = bytearray(300 << 20)", memory_limit_mb=256)
    assert (result.status, result.return_code, last_line(result.stderr)) == ("finished", 1, "MemoryError")
    assert (await sandbox.execute("len(bytearray(200 << 20))", memory_limit_mb=256)).stdout == "209715200\n"


async def test_numpy_works_under_a_small_memory_limit(strongest: LocalSandbox):
    result = await strongest.execute("import numpy as np\nfloat(np.ones((256, 256)).sum())", memory_limit_mb=64)
    assert result.stdout == "65536.0\n"


async def test_children_each_under_the_limit_are_contained_together(sandbox: LocalSandbox):
    if not sandbox.memory_is_bounded_per_execution:
        pytest.skip("no writable memory cgroup: memory is bounded per process only")
    code = """
import os, time
children = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        x = b"x" * (200 << 20)
        time.sleep(1)
        os._exit(0)
    children.append(pid)
killed = sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9 for pid in children)
print("killed" if killed >= 2 else f"only {killed} killed")
"""
    result = await sandbox.execute(code, memory_limit_mb=256)
    assert (result.status, result.stdout) == ("finished", "killed\n")


async def test_an_execution_killed_for_memory_says_so(sandbox: LocalSandbox):
    if not sandbox.memory_is_bounded_per_execution:
        pytest.skip("no writable memory cgroup: memory is bounded per process only")
    # The kernel kills the largest process: here the first one, while its children hold most of the
    # cgroup.
    code = """
import os, time
read_end, write_end = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        x = b"x" * (80 << 20)
        os.write(write_end, b"1")
        time.sleep(60)
for _ in range(3): os.read(read_end, 1)
print("filled", flush=True)
x = b"x" * (230 << 20)
"""
    result = await sandbox.execute(code, memory_limit_mb=256)
    assert (result.status, result.return_code, result.stdout) == ("memory_limit", None, "filled\n")
    assert result.text == "filled\n[stopped at the memory limit]"
    assert await still_works(sandbox)


async def test_5_mb_of_output_is_capped_and_the_count_is_told(strongest: LocalSandbox):
    result = await strongest.execute("print('head'); print('x' * 5_000_000); print('tail')")
    assert (result.status, result.return_code) == ("finished", 0)
    assert result.stdout_dropped_bytes == 5 + 5_000_001 + 5 - MAX_STREAM_BYTES
    assert result.stdout.startswith("head\nxxx") and result.stdout.endswith("xxx\ntail\n")
    assert f"[... {result.stdout_dropped_bytes} bytes dropped ...]" in result.text
    assert len(result.stdout) < MAX_STREAM_BYTES + 100


async def test_endless_stderr_ends_at_the_time_limit_capped(strongest: LocalSandbox):
    result = await strongest.execute("import sys\nwhile True: sys.stderr.write('e' * 10_000)", run_timeout_s=0.5)
    assert result.status == "time_limit"
    assert result.stderr_dropped_bytes > 0
    assert len(result.stderr) < MAX_STREAM_BYTES + 100


async def test_filling_the_working_directory_and_shared_memory(sandbox: LocalSandbox):
    code = """
import os
try:
    for i in range(4):
        with open(f"/dev/shm/{i}-of-retool-test", "wb") as f:
            for _ in range(60): f.write(b"x" * (1 << 20))
except OSError as error:
    print(type(error).__name__, error.errno)
finally:
    for i in range(4):
        try: os.unlink(f"/dev/shm/{i}-of-retool-test")
        except OSError: pass
"""
    result = await sandbox.execute(code)
    expected = {
        Level.NAMESPACES: "OSError 28\n",  # /dev/shm is the execution's own tmpfs
        Level.LANDLOCK: "",  # in the working directory, where each file is bounded (README.md)
        Level.RLIMITS: "",  # the host's /dev/shm: not protected
    }
    assert result.stdout == expected[sandbox.level]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
async def test_a_run_timeout_nobody_can_mean_is_an_error(strongest: LocalSandbox, seconds: float):
    with pytest.raises(ConfigError, match="run_timeout_s"):
        await strongest.execute("1", run_timeout_s=seconds)


async def test_a_huge_limit_is_clamped():
    request = ExecRequest(code="1", run_timeout_s=1e9, memory_limit_mb=10**9)
    assert (request.run_timeout_s, request.memory_limit_mb) == (600.0, 65_536)


# ------------------------------------------------------------- file system


async def test_writing_outside_the_working_directory(sandbox: LocalSandbox, tmp_path: Path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    for directory in (open_to_all, *open_to_all.parents):
        if directory != Path("/"):
            directory.chmod(0o777 if directory == open_to_all else directory.stat().st_mode | 0o011)
    code = f"""{NOT_REDIRECTED}
for path in ("/etc/x", "/usr/lib/x", "/x", {str(open_to_all / "x")!r}):
    try:
        open(path, "w").close()
        print("written")
    except OSError as error:
        print(error.errno)
"""
    result = await sandbox.execute(code)
    expected = {
        Level.NAMESPACES: "30 30 30 2",  # read-only, and the host's directory is not there
        Level.LANDLOCK: "13 13 13 13",
        Level.RLIMITS: "13 13 13 written",  # file permissions only
    }
    assert " ".join(result.stdout.split()) == expected[sandbox.level]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a\0b", "."])
async def test_path_traversal_is_rejected_before_anything_runs(strongest: LocalSandbox, name: str):
    with pytest.raises(ConfigError, match="file path"):
        await strongest.execute("print('ran')", files={name: b"x"})
    with pytest.raises(ConfigError, match="file path"):
        await strongest.execute("print('ran')", fetch_files=[name])


async def test_a_fetched_symlink_shows_only_what_the_code_could_read(sandbox: LocalSandbox):
    result = await sandbox.execute("import os; os.symlink('/etc/shadow', 'link')", fetch_files=["link"])
    assert result.ok and result.files == {}
    result = await sandbox.execute("import os; os.symlink('/dev/zero', 'zero')", fetch_files=["zero"])
    assert (result.ok, result.stderr, result.files) == (True, "", {})

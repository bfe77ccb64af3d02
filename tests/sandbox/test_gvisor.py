"""What is gvisor's alone: when it is chosen, how it is refused, that no container stays behind."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox
from retool_mcore.sandbox.open import open_sandbox
from retool_mcore.sandbox.state import remove_stale
from tests.sandbox.sandbox_helpers import containers_of, open_at, owner_at, still_works, until_running
from tests.sandbox.test_levels import run_refused

RUNSC = shutil.which("runsc")
VERSION = subprocess.check_output([RUNSC, "--version"], text=True) if RUNSC else ""


async def test_without_runsc_the_refusal_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable) as caught:
        await open_sandbox("local", min_level="gvisor").execute("1")
    text = str(caught.value)
    assert "does not give the sandbox level 'gvisor' that was asked for (min_level)" in text
    assert f"gvisor: no program called runsc in PATH = {str(tmp_path)!r}" in text
    assert "to allow it: install gVisor's runsc" in text
    assert "namespaces:" not in text  # nothing weaker was tried


async def test_a_runsc_that_is_too_old_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A stand-in, since no such version can be had: it answers as runsc does to an option it does
    not know.
    """
    runsc = tmp_path / "runsc"
    runsc.write_text("#!/bin/sh\necho 'flag provided but not defined: -ignore-cgroups' >&2\nexit 2\n")
    runsc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="flag provided but not defined: -ignore-cgroups"):
        await open_sandbox("local", min_level="gvisor").execute("1")


@pytest.mark.parametrize(
    "refused, words",
    [
        ("mount", "error setting up chroot: error converting mounts: operation not permitted"),
        ("ptrace", "did not start a container: panic: unable to attach: operation not permitted; running container"),
    ],
)
@pytest.mark.skipif("20221219" not in VERSION, reason=f"the words are those of 20221219.0, not of {VERSION!r}")
async def test_what_the_kernel_refuses_runsc_is_quoted(containers: LocalSandbox, refused: str, words: str):
    text = run_refused([refused], "gvisor")
    assert "refused: this machine does not give the sandbox level 'gvisor'" in text
    assert words in text
    assert "to allow it: install gVisor's runsc" in text and "must let runsc use unshare, mount" in text


async def test_it_is_never_chosen_unasked():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        assert sandbox.level != Level.GVISOR


async def test_the_host_sees_neither_kernel_nor_name_nor_processes(containers: LocalSandbox):
    code = "import os; print(os.uname().version == " + repr(os.uname().version) + ", os.uname().nodename)"
    result = await containers.execute(code)
    assert (result.stdout, result.level) == ("False sandbox\n", Level.GVISOR)


async def test_only_what_python_needs_can_be_read(containers: LocalSandbox):
    code = """
import os
for path in ("/etc", "/root", "/home", "/usr/bin", "/var", "/retool/retool_mcore"):
    try: print(path, sorted(os.listdir(path)))
    except OSError as error: print(path, error.errno)
"""
    lines = (await containers.execute(code)).stdout.splitlines()
    assert lines[0] == "/etc ['ld.so.cache']" and lines[-1] == "/retool/retool_mcore ['__init__.py', 'sandbox']"
    assert "/home 2" in lines and "/var 2" in lines


async def test_imports_do_not_count_as_run_time_and_the_container_not_as_queue(containers: LocalSandbox):
    result = await containers.execute("import sympy\nfrom scipy import optimize\n'done'", run_timeout_s=0.3)
    assert (result.status, result.stdout) == ("finished", "'done'\n")
    assert result.queue_s < 0.2


async def test_a_container_that_is_killed_from_outside_is_told_as_a_kill(containers: LocalSandbox):
    call = asyncio.ensure_future(containers.execute("import time; time.sleep(60)", run_timeout_s=90))
    await until_running(containers, "", 1)
    for pid in containers_of(containers):
        with contextlib.suppress(ProcessLookupError):  # runsc's processes take one another along
            os.kill(pid, 9)
    result = await call
    assert (result.status, result.return_code) == ("finished", -9)
    assert containers_of(containers) == []
    assert await still_works(containers)


async def test_after_any_end_there_is_no_container_and_no_file(containers: LocalSandbox):
    codes = ["1", "1/0", "import os; os._exit(3)", "while True: pass", "import os; os.fork(); os.kill(1, 9)"]
    await asyncio.gather(*(containers.execute(code, run_timeout_s=0.5) for code in codes))
    assert containers_of(containers) == []
    waiting = {slot.directory for slot in containers.spares}
    assert {path for path in containers.state_dir.iterdir() if path.name.startswith("slot")} == waiting


async def test_the_container_that_waits_serves_one_execution_and_has_seen_none_before(containers: LocalSandbox):
    await asyncio.gather(containers.execute("1"), containers.execute("2"))
    waiting = list(containers.spares.values())
    assert len(waiting) == 2 and all(spare.alive for spare in waiting)
    code = "import os; open('/tmp/left', 'w').close(); globals()['left'] = 1; os.listdir('/box')"
    first, second = [await containers.execute(code) for _ in range(2)]
    assert (first.stdout, second.stdout) == ("[]\n", "[]\n")
    assert not any(spare.alive for spare in waiting) and not set(waiting) & set(containers.spares.values())
    probe = "import os; (os.listdir('/tmp'), 'left' in globals())"
    assert {(await containers.execute(probe)).stdout for _ in range(2)} == {"([], False)\n"}


async def test_no_more_containers_wait_than_there_are_workers(interpreter: LocalSandbox):
    if interpreter.level != Level.GVISOR:
        pytest.skip("only containers wait")
    for _ in range(2):  # the fixture has two workers, and two slots more for its sessions
        await asyncio.gather(*(interpreter.execute("1") for _ in range(3)))
    waiting = list(interpreter.spares.values())
    assert len(waiting) == 2
    await interpreter.execute("1")
    assert not waiting[0].alive and waiting[1].alive


async def test_a_waiting_container_that_died_is_replaced_unseen(containers: LocalSandbox):
    await asyncio.gather(containers.execute("1"), containers.execute("2"))
    for spare in containers.spares.values():
        spare.image.kill(spare.child.pidfd)
        await asyncio.wait((spare.child.exit,))
    assert (await containers.execute("6 * 7")).stdout == "42\n"


async def test_the_memory_limit_of_a_waiting_container_is_that_of_the_request(containers: LocalSandbox):
    for limit_mb, outcome in ((256, "MemoryError"), (512, "314572800")):
        result = await containers.execute("len(bytearray(300 << 20))", memory_limit_mb=limit_mb)
        assert result.text.splitlines()[-1] == outcome


async def test_a_call_cancelled_at_any_moment_leaves_no_container_and_a_place_that_works(containers: LocalSandbox):
    for delay_ms in (0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 800):
        call = asyncio.ensure_future(containers.execute("6 * 7"))
        await asyncio.sleep(delay_ms / 1000)
        call.cancel()
        await asyncio.wait((call,))
    results = await asyncio.gather(*(containers.execute("6 * 7") for _ in range(4)))
    assert [result.stdout for result in results] == ["42\n"] * 4
    async with asyncio.timeout(10):  # a start that was cancelled is undone when it has happened
        while containers_of(containers):
            await asyncio.sleep(0.05)


async def test_closing_ends_containers_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = await open_at(Level.GVISOR, workers=2)
    calls = [asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)")) for _ in range(3)]
    await until_running(sandbox, "", 2)
    running = containers_of(sandbox)
    await sandbox.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, SandboxUnavailable) for outcome in outcomes)
    assert [pid for pid in running if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


async def test_a_killed_owner_leaves_no_container_and_its_directory_is_swept(containers: LocalSandbox, tmp_path: Path):
    owner = owner_at(Level.GVISOR, tmp_path)

    def running() -> list[bytes]:
        found: list[bytes] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(path.read_bytes())
        return [command for command in found if b"runsc" in command and str(tmp_path).encode() in command]

    async with asyncio.timeout(20):
        while len(running()) < 3:
            await asyncio.sleep(0.05)
    owner.kill()
    owner.wait()
    async with asyncio.timeout(10):
        while running():
            await asyncio.sleep(0.05)
    (left,) = tmp_path.glob("retool-sandbox-*")
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    remove_stale(tmp_path)
    assert list(tmp_path.glob("retool-sandbox-*")) == []

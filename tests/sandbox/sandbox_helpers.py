"""Helpers of several sandbox tests."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [Level.NAMESPACES, Level.LANDLOCK, Level.RLIMITS]

# Undoes the redirection of /tmp at landlock, as an attacker would, so that the kernel decides.
NOT_REDIRECTED = """
import builtins, os
for module in (builtins, os):
    for name, function in list(vars(module).items()):
        if hasattr(function, "__wrapped__"): setattr(module, name, function.__wrapped__)
"""


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `retool sandbox serve`. Returns the process and its URL."""
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--min-level", "rlimits", *options]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    assert url, server.communicate()[1]
    return server, url


OWNER = """
import asyncio, sys
from retool_mcore.sandbox import open_sandbox
async def main():
    sandbox = open_sandbox("local", min_level=sys.argv[1], workers=1)
    await sandbox.open()
    print("open", flush=True)
    await sandbox.execute("import time; time.sleep(60)")
asyncio.run(main())
"""


def start_owner(level: Level, folder: Path) -> subprocess.Popen[bytes]:
    """Start another process whose sandbox executes code, with its state in ``folder``."""
    environment = dict(os.environ, TMPDIR=str(folder))
    owner = subprocess.Popen([sys.executable, "-c", OWNER, level], env=environment, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"open\n"
    return owner


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def processes_named(name: str) -> list[str]:
    pids: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text().strip() == name:
                    pids.append(entry.name)
            except OSError:
                continue
    return pids


async def still_works(sandbox: LocalSandbox) -> bool:
    return (await sandbox.execute("6 * 7")).stdout == "42\n"


async def open_at(level: Level, **options: Any) -> LocalSandbox:
    """Open a sandbox at exactly ``level``; skip the test if this machine does not support it.

    The sandbox makes one attempt, so that a dying zygote is an error, not a retry.
    """
    sandbox = LocalSandbox(min_level=level, max_level=level, **options)
    try:
        await sandbox.open()
    except SandboxUnavailable as error:
        if any(
            reason in str(error) for reason in ("probe in the sandbox failed", "before it was confined", "[Errno 13]")
        ):
            raise  # a bug, not a kernel that lacks the level
        pytest.skip(f"no {level} here: {error}")
    return sandbox


async def longest_stall_s(call: asyncio.Future[Any]) -> float:
    """Return the longest CPU time that the event loop spent without a pause during ``call``.

    It is not wall time, because other threads and processes may use the cores of a busy machine.
    """
    longest_s = 0.0
    while not call.done():
        before = time.thread_time()
        await asyncio.sleep(0.002)
        longest_s = max(longest_s, time.thread_time() - before)
    return longest_s


async def until_running(name: str, count: int) -> None:
    """Wait until ``count`` processes named ``name`` run."""
    async with asyncio.timeout(60):
        while len(processes_named(name)) < count:
            await asyncio.sleep(0.02)


def children_of(parent: int, marker: str) -> list[int]:
    """Return the pids of direct children whose command line contains ``marker``."""
    children = [
        int(p) for task in Path(f"/proc/{parent}/task").iterdir() for p in (task / "children").read_text().split()
    ]
    matching: list[int] = []
    for pid in children:
        with contextlib.suppress(OSError):  # it may end meanwhile
            matching += [pid] if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return matching

"""Helpers of several sandbox tests."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor import guardian
from retool_mcore.sandbox.supervisor.local import LocalSandbox

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [Level.NAMESPACES, Level.LANDLOCK, Level.RLIMITS]
SERVE = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--min-level", "rlimits"]

# Undoes the redirection of /tmp at landlock, as an attacker would, so that the kernel decides.
NOT_REDIRECTED = """
import builtins, os
for module in (builtins, os):
    for name, function in list(vars(module).items()):
        if hasattr(function, "__wrapped__"): setattr(module, name, function.__wrapped__)
"""


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `retool sandbox serve`. Returns the process and its URL."""
    server = subprocess.Popen([*SERVE, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    assert url, server.communicate()[1]
    return server, url


def named(name: str) -> str:
    """Return code that gives its process this name."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n"


def processes_named(name: str) -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            if (entry / "comm").read_text().strip() == name:
                pids.append(int(entry.name))
    return pids


async def until_running(name: str, count: int) -> None:
    async with asyncio.timeout(60):
        while len(processes_named(name)) < count:
            await asyncio.sleep(0.02)


def children_of(parent: int, marker: str) -> list[int]:
    """Return the pids of direct children whose command line contains ``marker``."""
    matching: list[int] = []
    for pid in guardian.children(parent):
        with suppress(OSError):
            if marker in Path(f"/proc/{pid}/cmdline").read_text():
                matching.append(pid)
    return matching


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


async def still_works(sandbox: LocalSandbox) -> bool:
    return (await sandbox.execute("6 * 7")).stdout == "42\n"


async def open_at(level: Level, **options: Any) -> LocalSandbox:
    """Open a sandbox at exactly ``level``; skip the test if this machine does not support it."""
    sandbox = LocalSandbox(min_level=level, max_level=level, **options)
    try:
        await sandbox.open()
    except SandboxUnavailable as error:
        bugs = ("probe in the sandbox failed", "before it was confined", "[Errno 13]")
        if any(bug in str(error) for bug in bugs):
            raise  # not a kernel that lacks the level
        pytest.skip(f"no {level} here: {error}")
    return sandbox

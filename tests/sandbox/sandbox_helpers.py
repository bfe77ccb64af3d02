"""What several sandbox tests ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def processes_named(name: str) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text().strip() == name:
                    found.append(entry.name)
            except OSError:
                continue
    return found


async def still_works(sandbox: LocalSandbox) -> bool:
    return (await sandbox.execute("6 * 7")).stdout == "42\n"


async def open_at(level: Level, **options: int) -> LocalSandbox:
    """A sandbox at exactly ``level``; one attempt, so that a dying zygote is an error and not a retry."""
    sandbox = LocalSandbox(min_level=level, max_level=level, attempts=1, **options)
    try:
        await sandbox.open()
    except SandboxUnavailable as error:
        pytest.skip(f"no {level} here: {error}")
    return sandbox


def children_of(parent: int, marker: str) -> list[int]:
    """Pids of direct children whose command line contains ``marker``."""
    pids = [int(p) for task in Path(f"/proc/{parent}/task").iterdir() for p in (task / "children").read_text().split()]
    return [pid for pid in pids if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]

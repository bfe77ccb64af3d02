"""What a user sees on the terminal: our lines, and none of the libraries'."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
from pathlib import Path

import pytest

from tests.e2e.commands import MARK, ROOT, argv_retool, assert_nothing_left
from tests.e2e.test_sft import settings

pytestmark = pytest.mark.slow

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OURS = (
    re.compile(r"sft\b.*"),  # the bar of steps
    re.compile(r"(note|error): .*"),
    re.compile(r"exported .*|wrote .*"),
)


def lines_on_terminal(argv: list[str], mark: str, timeout_s: float = 300) -> tuple[int, list[str]]:
    """The exit code, and every line that was on a terminal 200 columns wide."""
    leader, follower = pty.openpty()
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # the last process has closed the terminal
                return
            if not part:
                return
            seen.extend(part)

    env = {**os.environ, MARK: mark, "COLUMNS": "200", "TERM": "xterm"}
    child = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = child.wait(timeout=timeout_s)
    finally:
        child.kill()
    reader.join(timeout=10)
    os.close(leader)
    text = CONTROL.sub("", seen.decode("utf-8", errors="replace"))
    return code, [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_sft_shows_its_own_lines_only(task: Path, tmp_path: Path, mark: str):
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *settings(task, tmp_path, "train.steps=2", "run.name=seen"))
    code, lines = lines_on_terminal(argv, mark)
    assert code == 0, lines[-20:]
    foreign = [line for line in lines if not any(own.fullmatch(line) for own in OURS)]
    assert not foreign, "\n".join(foreign[:40])
    assert any(line.startswith("sft  loss") for line in lines)
    assert_nothing_left(mark)

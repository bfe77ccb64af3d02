"""A command on a real terminal (pty), read as a user would see it."""

import os
import pty
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PARTS = re.compile(r"\x1b\[([0-9]*)[0-9;?]*([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


def lines_on_terminal(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float = 300
) -> tuple[int, list[str]]:
    """The exit code, and every line that was on a terminal 200 columns wide.

    ``env`` is added to this process's environment.
    """
    code, sent = _sent(argv, cwd, env, timeout_s)
    lines = re.split(r"[\r\n]+", CONTROL.sub("", sent))
    return code, [line.strip() for line in lines if line.strip()]


def screen(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float = 300) -> tuple[int, list[str]]:
    """The exit code, and the lines that stay: what was erased or written over is not there."""
    code, sent = _sent(argv, cwd, env, timeout_s)
    lines, row, column = [""], 0, 0
    for match in PARTS.finditer(sent):
        part, number = match[0], int(match[1] or 1)
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.endswith("A") and match[2]:
            row = max(0, row - number)
        elif part.endswith("K") and match[2]:
            assert number == 2, "of the ways to erase this one is used"
            lines[row] = ""
        elif not match[2]:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return code, [line.rstrip() for line in lines if line.strip()]


def _sent(argv: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
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

    whole = {**os.environ, "COLUMNS": "200", "TERM": "xterm", **env}
    child = subprocess.Popen(argv, cwd=cwd, env=whole, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = child.wait(timeout=timeout_s)
    finally:
        child.kill()
    reader.join(timeout=300)
    os.close(leader)
    return code, seen.decode("utf-8", errors="replace")

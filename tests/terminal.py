"""A command on a real terminal (pty), read as a user would see it."""

import os
import pty
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines_on_terminal(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float = 300
) -> tuple[int, list[str]]:
    """The exit code, and every line that was on a terminal 200 columns wide.

    ``env`` is added to this process's environment.
    """
    code, sent = _sent(argv, cwd, env, timeout_s)
    lines = re.split(r"[\r\n]+", CONTROL.sub("", sent))
    return code, [line.strip() for line in lines if line.strip()]


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

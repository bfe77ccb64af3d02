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
    text = CONTROL.sub("", seen.decode("utf-8", errors="replace"))
    return code, [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]

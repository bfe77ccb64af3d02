"""The command serves the viewer on loopback until Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.unit.report.view.test_serve import run  # noqa: F401  a fixture


def test_the_command_serves_on_loopback_until_ctrl_c(run: Path):
    argv = [sys.executable, "-m", "retool_mcore", "view", str(run), "--out", str(run / "view.html"), "--serve"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            form = r"serving (http://127\.0\.0\.1:\d+/\S{22}/) until Ctrl-C; \S+ is the same page\n"
            found = re.fullmatch(form, line)
            assert found, line
            answer = httpx.get(found[1], trust_env=False, timeout=300)
            policy = answer.text[:2000].count("connect-src 'self'")
            assert (answer.status_code, policy) == (200, 1)
            os.kill(child.pid, signal.SIGINT)
            assert child.wait(timeout=300) == 130
            assert child.stdout.read() == ""
        finally:
            child.kill()

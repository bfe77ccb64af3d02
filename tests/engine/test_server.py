"""How an SGLang server is stopped, with a stand-in for its processes."""

import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from retool_mcore.rollout.server import SglangServer
from tests.e2e.commands import wait_until

# As SGLang: after SIGTERM, the server waits for 5 s, a child just ends, and the resource tracker
# ignores it. The tracker frees what is left when the pipe closes, because all others have ended.
SERVER = """
    import os, signal, sys, time
    folder = sys.argv[1]
    pipe = os.pipe()
    if os.fork() == 0:
        time.sleep(20)
    signal.signal(signal.SIGTERM, lambda *_: time.sleep(5))
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(pipe[1])
        open(f"{folder}/ready", "w").close()
        os.read(pipe[0], 1)
        open(f"{folder}/freed", "w").close()
        os._exit(0)
    time.sleep(20)
"""


def test_a_server_stops_without_the_diagnosis_of_a_crash_and_its_shared_memory_is_freed(tmp_path: Path):
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(tmp_path)]
    platform: Any = SimpleNamespace(sglang_command=lambda *_, **__: command, process_env=dict)
    server = SglangServer("model", platform, dtype="float32", log_path=tmp_path / "log", max_running_requests=1)
    server.start()
    wait_until((tmp_path / "ready").exists, "the stand-in is ready", timeout_s=60)
    began_s = time.monotonic()
    server.stop()
    assert time.monotonic() - began_s < 4
    assert (tmp_path / "freed").exists(), "SIGKILL for the whole group would end the tracker, too"

"""The checker processes of the judge end with the process that started them."""

import os
import subprocess
import sys
import time
from pathlib import Path


def test_checkers_end_with_their_parent(tmp_path):
    script = (
        "import os, signal\n"
        "from retool_mcore.reward import answer\n"
        "assert answer.judge(r'\\ln 8', r'3\\ln 2', timeout_s=60).equivalent\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    raise AssertionError("the checker outlived its parent")

"""The quickstart's stages: failures, a second start, and a kill."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from retool_mcore.quickstart import StageFailed, Stages

# The commands that a stage starts ask for SIGTERM when their parent dies, however it dies.
CHILD = "import time; from retool_mcore.process import end_with_parent_if_requested as end; end(); "
CHILD += "print('up', flush=True); time.sleep(60)"
PARENT = """
from pathlib import Path
from rich.console import Console
from retool_mcore.quickstart import Stages
Stages(Path({root!r}), Console(quiet=True)).run("s", "s", "-c", {child!r})
"""


def test_a_failed_stage_shows_the_end_of_its_log_and_is_run_again(tmp_path: Path):
    fail = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(StageFailed, match=r"failing failed with exit code 3(.|\n)*the reason"):
        Stages(tmp_path, Console(quiet=True)).run("fail", "failing", "-c", fail)
    Stages(tmp_path, Console(quiet=True)).run("fail", "failing", "-c", "pass")
    assert (tmp_path / "logs" / "fail.log").read_text() == "the reason\n"


def test_killing_the_quickstart_ends_its_command(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", PARENT.format(root=str(tmp_path), child=CHILD)]) as process:
        log = tmp_path / "logs" / "s.log"
        deadline_s = time.monotonic() + 300
        while not (log.exists() and log.read_text() == "up\n"):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)

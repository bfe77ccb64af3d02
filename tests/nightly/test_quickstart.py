"""The quickstart's stages: progress, failures, a second start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from retool_mcore.quickstart import StageFailed, Stages


def stages(root: Path) -> Stages:
    return Stages(root, Console(quiet=True))


def test_a_failed_stage_shows_the_end_of_its_log_and_is_run_again(tmp_path: Path):
    fail = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(StageFailed, match=r"failing failed with exit code 3(.|\n)*the reason"):
        stages(tmp_path).run("fail", "failing", "-c", fail)
    stages(tmp_path).run("fail", "failing", "-c", "pass")
    assert (tmp_path / "logs" / "fail.log").read_text() == "the reason\n"


def test_killing_the_quickstart_ends_its_command(tmp_path: Path):
    """The commands that a stage starts ask for SIGTERM when their parent dies, however it dies."""
    child = (
        "import time; from retool_mcore.process import end_with_parent_if_requested as end; end(); "
        "print('up', flush=True); "
    )
    parent = (
        "from pathlib import Path; from rich.console import Console; from retool_mcore.quickstart import Stages; "
        f"Stages(Path({str(tmp_path)!r}), Console(quiet=True)).run('s', 's', '-c', {child + 'time.sleep(60)'!r})"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        log = tmp_path / "logs" / "s.log"
        deadline_s = time.monotonic() + 300
        while not (log.exists() and log.read_text() == "up\n"):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(children) == 1
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline_s, os.listdir(f"/proc/{children[0]}")
        time.sleep(0.1)

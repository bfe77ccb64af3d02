"""A terminal that is closed, and a signal in the middle of somebody else's code."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A run as the commands have it: its output goes to a log, its words to the terminal.
RUN = """
import signal, sys, time
from pathlib import Path
from rich.console import Console
from retool_mcore.cli.common import guarded
from retool_mcore.process import redirect_output
from retool_mcore.run.ending import Ended, Ending
from retool_mcore.run.status import bar_of_steps

@guarded
def run():
    with redirect_output(Path(sys.argv[1])) as terminal:
        console = Console(file=terminal)
        with Ending(30) as ending, bar_of_steps(console) as bars:
            bar = bars.add_task("rl", total=9)
            Path(sys.argv[2]).touch()
            while not ending.first_signal:
                bars.advance(bar, 0)
                time.sleep(0.02)
        console.print("a word for nobody")
        print("saved", flush=True)
        raise Ended(ending.first_signal, "saved")

run()
"""
# An evaluation as its command has it: bars on the terminal itself.
EVALUATION = """
import sys, time
from pathlib import Path
import typer
from rich.progress import Progress
from retool_mcore.cli.common import guarded
from retool_mcore.process import exit_on_sigterm

@guarded
def run():
    exit_on_sigterm(ctrl_c=False)
    try:
        with Progress() as bars:
            bars.add_task("samples", total=9)
            Path(sys.argv[2]).touch()
            time.sleep(60)
    finally:
        Path(sys.argv[1]).write_text("saved\\n")

try:
    run()
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.parametrize("program", [RUN, EVALUATION], ids=["run", "evaluation"])
def test_what_has_lost_its_terminal_saves_and_ends(program: str, tmp_path: Path):
    leader, follower = pty.openpty()
    argv = [sys.executable, "-c", program, str(tmp_path / "log"), str(tmp_path / "up")]
    env = {**os.environ, "TERM": "xterm"}
    child = subprocess.Popen(argv, env=env, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    try:
        while not (tmp_path / "up").exists():
            assert child.poll() is None
            os.read(leader, 65536)
        os.close(leader)  # what is written from here on is an error
        child.send_signal(signal.SIGHUP)
        assert child.wait(timeout=300) == 129
    finally:
        child.kill()
    assert (tmp_path / "log").read_text().endswith("saved\n"), "no traceback follows"

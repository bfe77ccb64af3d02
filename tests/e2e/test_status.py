"""What a start shows before its bar: a line that counts on a terminal, a line a stage elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.terminal import lines_on_terminal, screen

ROOT = Path(__file__).parents[2]
# In what follows a stage has lasted at once, and in LONG never: no test waits for a clock.
SOON = "from retool_mcore.run import status\nstatus.SLOW_AFTER_S = 0.2\n"
LONG = SOON.replace("0.2", "600.0")
# A command that becomes another program, as `retool sft` does.
FIRST = f"""{SOON}
import os, sys, time
from retool_mcore.run.start import begin_early
from retool_mcore.run.status import show_early_stage
begin_early("settings")
with show_early_stage("sft"):
    time.sleep(1.7)
begin_early("processes")
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
SECOND = f"""{SOON}
import os, time
from retool_mcore.run.status import show_early_stage
with show_early_stage("sft"):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as a run's output goes to its log
    print("an engine's word", file=open(2, "w", closefd=False))
    time.sleep(1.7)
"""
MISTAKE = """
import time
import typer
from retool_mcore.cli.common import guarded
from retool_mcore.cli.evaluate import _Bars
from retool_mcore.errors import ConfigError
from retool_mcore.evaluate.cases import Case
from retool_mcore.run.start import begin_early
from retool_mcore.run.status import show_early_stage
begin_early("settings")
@guarded
def command(which: str, after_s: float):
    with show_early_stage("sft") if which == "sft" else _Bars([Case(name="mine", model="m")]):
        time.sleep(after_s)
        raise ConfigError("train.steps = 0")
typer.run(command)
"""
ARGV = [sys.executable, "-c", FIRST, SECOND]
SAID = [
    "checking settings, model and data",
    "starting a process for each device, which imports the trainer",
]


def in_a_pipe(*argv: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False, env=env)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_terminal_has_the_stage_and_its_seconds_through_an_exec():
    code, lines = lines_on_terminal(ARGV, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert code == 0, lines
    kinds = dict.fromkeys(line.rpartition(", ")[0] for line in lines)
    assert list(kinds) == [f"sft  {words}" for words in SAID]
    assert "sft  checking settings, model and data, 1 s" in lines, "it counts"


def test_a_mistake_that_is_found_at_once_is_one_line_in_a_log():
    assert in_a_pipe("-c", LONG + MISTAKE, "eval", "0.5") == ["error: train.steps = 0"]
    stage, error = in_a_pipe("-c", SOON + MISTAKE, "eval", "0.5")
    assert re.match(r" +0\.0 s  reading the problems", stage)
    assert error == "error: train.steps = 0"


def test_a_mistake_is_one_line_on_a_terminal_whose_line_has_counted():
    code, lines = screen([sys.executable, "-c", MISTAKE, "sft", "1.3"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert (code, lines) == (2, ["error: train.steps = 0"])


def test_only_a_terminal_wraps_text_and_cuts_no_word():
    text = "error: [x] the folder runs/mine cannot be written. Set run.root, or change its rights. :smile:"
    code = f"from retool_mcore.cli.common import echo; echo({text!r}, err=True)"
    _, lines = lines_on_terminal([sys.executable, "-c", code], cwd=ROOT, env={"COLUMNS": "60"})
    assert len(lines) == 2 and max(map(len, lines)) <= 60 and " ".join(lines) == text
    narrow = {**os.environ, "COLUMNS": "60"}
    log = subprocess.run([sys.executable, "-c", code], env=narrow, capture_output=True, text=True, check=True).stderr
    assert log == f"{text}\n"

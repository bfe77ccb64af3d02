"""What a start shows before its bar: a line that counts on a terminal, a line a stage elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

from tests.terminal import lines_on_terminal

ROOT = Path(__file__).parents[2]
# A command that becomes another program, as `retool sft` does.
FIRST = """
import os, sys, time
from retool_mcore.run.status import begins, shown
begins("settings")
with shown("sft"):
    time.sleep(1.2)
begins("processes")
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
SECOND = """
import os, time
from retool_mcore.run.status import shown
with shown("sft"):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as a run's output goes to its log
    print("an engine's word", file=open(2, "w", closefd=False))
    time.sleep(0.4)
"""
EVALUATION = """
import time
from retool_mcore.cli.evaluate import _Bars
from retool_mcore.evaluate.cases import Case
with _Bars([Case(name="mine", model="m"), Case(name="other", model="m")]) as bars:
    bars.start("mine", 0, 2)
    bars.stage("starting the rollout engines")
    time.sleep(1.3)
    for right in (True, False):
        bars.advance("mine", right)
        time.sleep(0.3)
"""
ARGV = [sys.executable, "-c", FIRST, SECOND]


def test_a_terminal_has_the_stage_and_its_seconds_through_an_exec():
    code, lines = lines_on_terminal(ARGV, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert code == 0, lines
    kinds = dict.fromkeys(line.rpartition(", ")[0] for line in lines)
    assert list(kinds) == [
        "sft  checking settings, model and data",
        "sft  starting a process for each device, which imports the trainer",
    ]
    assert "sft  checking settings, model and data, 1 s" in lines, "it counts"


def test_a_log_has_a_line_for_each_stage():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(ARGV, capture_output=True, text=True, check=False, env=env)
    first, second = done.stderr.splitlines()
    assert first == "    0.0 s  checking settings, model and data"
    at_s, words = second.split(" s  ")
    assert float(at_s) >= 1.2 and words == "starting a process for each device, which imports the trainer"
    assert done.stdout == ""


def test_a_terminal_that_cannot_move_its_cursor_has_lines():
    code, lines = lines_on_terminal(ARGV, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "TERM": "dumb"})
    assert code == 0 and [line.split(" s  ")[1] for line in lines] == [
        "checking settings, model and data",
        "starting a process for each device, which imports the trainer",
    ]


def test_an_evaluation_shows_what_it_waits_for_before_it_has_answers():
    argv = [sys.executable, "-c", EVALUATION]
    code, lines = lines_on_terminal(argv, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "COLUMNS": "80"})
    assert code == 0, lines
    assert "eval  starting the rollout engines, 1 s" in lines
    first_bar = next(number for number, line in enumerate(lines) if "━" in line)
    assert all(line.startswith("eval  ") for line in lines[:first_bar])
    assert lines[-2].startswith("mine") and lines[-2].endswith("0.500 right"), lines

"""The scripts of launch/gsm8k/ for tests: as modules, and as commands."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "launch" / "gsm8k"
SAMPLE = ROOT / "tests" / "data" / "samples" / "gsm8k_60.jsonl"
QUESTION = "Natalia sold clips to 48 of her friends in April, and half as many in May. How many altogether?"
ANSWER = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)

sys.path.insert(0, str(FOLDER))  # they import each other by their names, as Python runs them


def script(name: str, *words: object, fails: bool = False) -> str:
    """What a script prints that must end well, or the error of one that must be refused."""
    command = [sys.executable, str(FOLDER / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if fails else 0), done.stderr
    return " ".join((done.stderr if fails else done.stdout).split())

"""What a user sees on the terminal: our lines, and none of the libraries'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.commands import MARK, ROOT, argv_retool, assert_nothing_left
from tests.e2e.test_sft import settings
from tests.terminal import lines_on_terminal

pytestmark = pytest.mark.slow

OURS = (
    re.compile(r"sft\b.*"),  # the bar of steps
    re.compile(r"(note|error): .*"),
    re.compile(r"exported .*|wrote .*"),
    re.compile(r"validation at step 2: val_loss \d+\.\d+"),
    re.compile(r"next: retool report .*|retool (view|rl) .*"),  # what can be done with it
)


def test_sft_shows_its_own_lines_only(task: Path, tmp_path: Path, mark: str):
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *settings(task, tmp_path, "train.steps=2", "run.name=seen"))
    code, lines = lines_on_terminal(argv, cwd=ROOT, env={MARK: mark})
    assert code == 0, lines[-20:]
    foreign = [line for line in lines if not any(own.fullmatch(line) for own in OURS)]
    assert not foreign, "\n".join(foreign[:40])
    assert any(line.startswith("sft  loss") for line in lines)
    assert_nothing_left(mark)

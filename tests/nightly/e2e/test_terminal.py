"""SFT shows its own lines only."""

import re
from pathlib import Path

from tests.e2e.commands import MARK, ROOT, argv_retool, sft_settings
from tests.terminal import lines_on_terminal

OURS = (
    re.compile(r"sft\b.*"),  # the bar of steps
    re.compile(r"(note|error): .*"),
    re.compile(r"exported .*|wrote .*"),
    re.compile(r"validation at step 2: val_loss \d+\.\d+"),
    re.compile(r"next: retool report .*|retool (view|rl) .*"),  # what can be done with it
)


def test_sft_shows_its_own_lines_only(task: Path, tmp_path: Path, mark: str):
    own = ("train.steps=2", "checkpoint.every_steps=0", "run.name=seen")
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *sft_settings(task, tmp_path, *own))
    code, lines = lines_on_terminal(argv, cwd=ROOT, env={MARK: mark})
    assert code == 0, lines[-20:]
    foreign = [line for line in lines if not any(own.fullmatch(line) for own in OURS)]
    assert not foreign, "\n".join(foreign[:40])
    assert any(line.startswith("sft  loss") for line in lines)
    saved = [folder.name for folder in (tmp_path / "seen" / "checkpoints").iterdir()]
    assert saved == ["global_step_2"], "0: only the last"

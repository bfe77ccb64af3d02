"""What a user sees on the terminal: our lines, and none of the libraries'."""

import json
import re
from pathlib import Path

import pytest

from retool_mcore.config import RlConfig, load_config
from retool_mcore.run import checkpoint
from tests.e2e import test_rl
from tests.e2e.commands import MARK, ROOT, argv_retool, argv_rl, sft_settings
from tests.terminal import lines_on_terminal


def test_a_finished_rl_run_has_its_end_on_the_terminal(task: Path, tmp_path: Path, mark: str):
    """All of the command but Ray, engines and steps: the run's last step is saved already."""
    own = test_rl.settings(task, tmp_path, "run.name=done", "checkpoint.export=false")
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", own)
    with checkpoint.Saver(config, write_weights, rank=0, barrier=lambda: None) as saver:  # pyright: ignore[reportArgumentType]
        saver.save(4)
    row = {"step": 4, "val/accuracy": 0.5, "val/accuracy/low": 0.25, "val/accuracy/high": 0.75}
    (config.run.dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    code, lines = lines_on_terminal(argv_rl(*own), cwd=ROOT, env={MARK: mark})
    run = config.run.dir
    assert code == 0, lines[-20:]
    assert lines[-4:] == [
        f"saved {run}/checkpoints/global_step_4",
        "validation at step 4: accuracy 0.500 (95 %: 0.250 to 0.750)",
        f"next: retool report {run} --out {run}/report.html",
        f"retool view {run} --out {run}/view.html",
    ]
    foreign = [line for line in lines[:-4] if not line.startswith(("note: ", "rl "))]  # its bar is erased
    assert not foreign, "\n".join(foreign[:40])


def write_weights(folder: str, step: int) -> None:
    (Path(folder) / "actor").mkdir(parents=True)
    (Path(folder) / "actor" / "weights").write_text(str(step))


LINES_OF_SFT = (
    re.compile(r"sft\b.*"),  # the bar of steps
    re.compile(r"(note|error): .*"),
    re.compile(r"exported .*|wrote .*"),
    re.compile(r"validation at step 2: val_loss \d+\.\d+"),
    re.compile(r"next: retool report .*|retool (view|rl) .*"),  # the next commands
)


@pytest.mark.long
def test_sft_shows_its_own_lines_only(task: Path, tmp_path: Path, mark: str):
    own = ("train.steps=2", "checkpoint.every_steps=0", "run.name=seen")
    argv = argv_retool("sft", "configs/sft_tiny_cpu.toml", *sft_settings(task, tmp_path, *own))
    code, lines = lines_on_terminal(argv, cwd=ROOT, env={MARK: mark})
    assert code == 0, lines[-20:]
    foreign = [line for line in lines if not any(own.fullmatch(line) for own in LINES_OF_SFT)]
    assert not foreign, "\n".join(foreign[:40])
    assert any(line.startswith("sft  loss") for line in lines)
    saved = [folder.name for folder in (tmp_path / "seen" / "checkpoints").iterdir()]
    assert saved == ["global_step_2"], "0: only the last"

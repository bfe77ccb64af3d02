"""What a user sees on the terminal: our lines, and none of the libraries'."""

import json
from pathlib import Path

from retool_mcore.config import RlConfig, load_config
from retool_mcore.run import checkpoint
from tests.e2e import test_rl
from tests.e2e.commands import MARK, ROOT, argv_rl
from tests.terminal import lines_on_terminal


def write_weights(folder: str, step: int) -> None:
    (Path(folder) / "actor").mkdir(parents=True)
    (Path(folder) / "actor" / "weights").write_text(str(step))


def test_a_finished_rl_run_has_its_end_on_the_terminal(task: Path, tmp_path: Path, mark: str):
    """All of the command but Ray, engines and steps: the run's last step is saved already."""
    own = test_rl.settings(task, tmp_path, "run.name=done", "checkpoint.export=false")
    config = load_config(RlConfig, ROOT / "configs/rl_tiny_cpu.toml", own)
    with checkpoint.Saver(config, write_weights, rank=0, barrier=lambda: None) as saver:  # pyright: ignore[reportArgumentType]
        saver.save(4)
    row = {"step": 4, "val/accuracy": 0.5, "val/accuracy/low": 0.25, "val/accuracy/high": 0.75}
    run = config.run.dir
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    code, lines = lines_on_terminal(argv_rl(*own), cwd=ROOT, env={MARK: mark})
    assert code == 0, lines[-20:]
    assert lines[-4:] == [
        f"saved {run}/checkpoints/global_step_4",
        "validation at step 4: accuracy 0.500 (95 %: 0.250 to 0.750)",
        f"next: retool report {run} --out {run}/report.html",
        f"retool view {run} --out {run}/view.html",
    ]
    foreign = [line for line in lines[:-4] if not line.startswith(("note: ", "rl "))]  # its bar is erased
    assert not foreign, "\n".join(foreign[:40])
